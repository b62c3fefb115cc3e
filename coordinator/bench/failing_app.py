"""The app of `immortal bench --failing`: a state of a given size, a call that works and one that fails."""

from __future__ import annotations

import os

from appsdk import Immortal, rpc

STATE_SIZE_VARIABLE = "IMMORTAL_BENCH_STATE_SIZE"
ROW_SIZE_BYTES = 1024


class Ledger(Immortal):
    rows: list[bytes]
    count: int

    def __init__(self) -> None:
        self.rows = [bytes(ROW_SIZE_BYTES) for _ in range(int(os.environ[STATE_SIZE_VARIABLE]) // ROW_SIZE_BYTES)]
        self.count = 0

    @rpc
    def work(self) -> int:
        self.count += 1
        return self.count

    @rpc
    def fail(self) -> int:
        self.count += 1
        raise ValueError("as it was asked to")
