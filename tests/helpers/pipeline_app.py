"""App whose calls the pipeline decodes, and a writer that keeps committing in a process of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from immortal import Immortal, impulse, peer, rpc
from immortal.appsdk.handlers.decorators import method_id_of_name


class Store(Immortal):
    @rpc
    def fetch(self, item: str) -> int:
        return 0


class Shop(Immortal):
    store = peer(Store, "store")
    sold: dict[str, int]

    def __init__(self) -> None:
        self.sold = {}

    @rpc
    def sell(self, item: str, count: int = 1) -> None:
        self.sold[item] = self.sold.get(item, 0) + count

    @impulse
    def open(self, tags: list[str]) -> None:
        pass


SELL = method_id_of_name("sell")
OPEN = method_id_of_name("open")
FETCH = method_id_of_name("fetch")


def arguments(*values: object) -> bytes:
    return msgspec.msgpack.encode(values)


def keep_writing(folder: Path, count: int, pause_s: float) -> None:
    """Make ``count`` commits of one record each; print a line once the first is durable."""
    from tests.helpers.pipeline_logs import open_for_writing, random_specs, transaction_of

    store = open_for_writing(folder, "live")
    for spec in random_specs(3, count):
        store.commit(transaction_of([spec]))
        if spec.sequence_id == 0:
            print("writing", flush=True)
        time.sleep(pause_s)
    store.close()


if __name__ == "__main__":
    keep_writing(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
