"""Processes that write a log until a planted fault ends them: ``python -m tests.faults.writers FUNCTION ARGUMENTS``."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import ImpulseBatch, Transaction
from immortal.log import create_log, log_exists, open_log
from tests.faults.sample_log import COMMITTER_ID, NAME, put_checkpoint, put_record

MODULE = "tests.faults.writers"
MAP_SIZE_BYTES = 1 << 24


def two_records(folder: str) -> None:
    """Create the log or open it; write two records, and tell the number of each."""
    try:
        if log_exists(folder):
            store = open_log(folder, NAME, map_size_bytes=MAP_SIZE_BYTES)
        else:
            store = create_log(folder, NAME, committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
        first = store.summary().last_sequence_id + 1
        for number in range(first, first + 2):
            put_record(store, number)
            print(number, flush=True)
    except (LogError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    store.close()


def first_small_commit(folder: str, control: str) -> None:
    """Create a log; write the first record on a disk that fails as ``control`` says."""
    store = create_log(folder, NAME, committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    Path(os.environ["DISK_SHIM_CONTROL"]).write_text(control)
    try:
        put_record(store, 0)
    except LogError as error:
        print(error)
    store.close()


def all_kinds(folder: str, seed: str) -> None:
    """Write records, impulses and checkpoints into a new log; note in a file what the log has acknowledged."""
    rng = random.Random(int(seed))
    acknowledged = os.open(Path(folder) / "acknowledged", os.O_WRONLY | os.O_CREAT)

    def tell(what: bytes, number: int) -> None:
        os.pwrite(acknowledged, (b"%s %d" % (what, number)).ljust(30), 0)

    store = create_log(Path(folder) / "log", NAME, committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    tell(b"created", 0)
    checkpoint_id = 0
    for number in range(60):
        put_record(store, number, rng.choice((300, 300, 300, 5000, 40000)))
        tell(b"record", number)
        if rng.random() < 0.2:
            impulse = ImpulseBatch(number + 1, 1, bytes(rng.randrange(5000)), "carol")
            store.commit(Transaction(impulses=[impulse], epoch=number))
            tell(b"epoch", number)
        if rng.random() < 0.15:
            checkpoint_id += 1
            put_checkpoint(store, checkpoint_id, number, rng.choice((900, 9000, 30000)))
            tell(b"checkpoint", checkpoint_id)
            while store.trim(keep_checkpoints=2):
                pass


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
