"""The app of `immortal bench --failing`: a state of a given size, a call that works and one that fails."""

from __future__ import annotations

import os

from immortal import Immortal, rpc

STATE_SIZE_VARIABLE = "IMMORTAL_BENCH_STATE_SIZE"
ROW_SIZE_BYTES = 1000
ENCODED_ROW_SIZE_BYTES = 1024  # at most: what a state of 1 MiB holds is a small state's, with what is in front


class Ledger(Immortal):
    rows: list[bytes]
    count: int

    def __init__(self) -> None:
        self.rows = [
            bytes(ROW_SIZE_BYTES) for _ in range(int(os.environ[STATE_SIZE_VARIABLE]) // ENCODED_ROW_SIZE_BYTES)
        ]
        self.count = 0

    @rpc
    def book(self, works: bool) -> int:
        self.count += 1
        if not works:
            raise ValueError("as it was asked to")
        return self.count
