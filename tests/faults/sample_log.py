"""Log with rows in every table, and its contents: to check if a damaged copy of it reads otherwise."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    CheckpointHeader,
    ImpulseBatch,
    OutputBatch,
    OutputMark,
    SourcePosition,
    StreamStart,
    Transaction,
    VersionStart,
)
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.log.open import Log
from immortal.log import RowLogStore, create_log, open_log
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry, Trailer, encode_trailer

COMMITTER_ID = 77
NAME = "alice"
PAGE_SIZE_BYTES = 4096
CHUNKS = 3
PAGE_KINDS = {1: "branch", 2: "leaf", 4: "overflow", 8: "meta"}


def record(sequence_id: int, size_bytes: int, time_ns: int = 5) -> bytes:
    content = f"<record {sequence_id}>".encode() * (size_bytes // 10)
    encoded = encode_record(COMMITTER_ID, sequence_id, content)
    batches = [
        BatchSource(BatchKind.STREAM, "bob", sequence_id + 1, 1, 0),
        BatchSource(BatchKind.IMPULSES, "", sequence_id + 1, 1, 0),
    ]
    trailer = Trailer(time_ns + sequence_id, batches, [OutputMarkEntry("carol", sequence_id, 2)])
    return encoded + encode_trailer(trailer, int.from_bytes(encoded[8:16], "little"))


def put_record(store: RowLogStore, sequence_id: int, size_bytes: int = 300, time_ns: int = 5) -> None:
    sources = {
        "bob": SourcePosition(5, 1, sequence_id + 1),
        IMPULSES: SourcePosition(COMMITTER_ID, 1, sequence_id + 1),
    }
    store.commit(Transaction(records=[(sequence_id, record(sequence_id, size_bytes, time_ns))], sources=sources))


def put_checkpoint(store: RowLogStore, checkpoint_id: int, sequence_id: int, chunk_size_bytes: int = 9000) -> None:
    chunks = [f"<chunk {index} of {checkpoint_id}>".encode() * (chunk_size_bytes // 15) for index in range(CHUNKS)]
    for index, chunk in enumerate(chunks):
        store.write_checkpoint_chunk(checkpoint_id, index, chunk)
    blob = b"".join(chunks)
    outputs = {"carol": OutputMark(sequence_id, 2)}
    unacknowledged = {"carol": [OutputBatch(1, 1, f"<output of {checkpoint_id}>".encode() * 300)]}
    header = CheckpointHeader(checkpoint_id, sequence_id, len(blob), crc64(blob), 9, outputs, unacknowledged)
    store.commit(Transaction(checkpoint=header))


def write_log(folder: Log, records: int = 120, keys: Sequence[LogKey] = ()) -> None:
    """Write a log of ``records`` records; checkpoint 1 near the beginning, 2 in the middle; no table is empty."""
    store = create_log(folder, NAME, committer_id=COMMITTER_ID, map_size_bytes=1 << 24, keys=keys)
    others = {f"sender-{number:03}": SourcePosition(6, 1, number + 1) for number in range(120)}
    store.commit(Transaction(epoch=1, extensions=frozenset({1, 2}), version=VersionStart(1, -1, "m:C"), sources=others))
    for sequence_id in range(records):
        put_record(store, sequence_id, 6000 if sequence_id % 10 == 3 else 300)
        if sequence_id == 10:
            put_checkpoint(store, 1, sequence_id)
        if sequence_id == records // 2:
            put_checkpoint(store, 2, sequence_id)
        if sequence_id % 20 == 5:
            impulse = ImpulseBatch(sequence_id, 1, f"<impulse {sequence_id}>".encode() * 20, "carol")
            store.commit(Transaction(impulses=[impulse], acknowledged={"carol": sequence_id // 2}, peers={"bob": 5}))
    store.commit(Transaction(stream_starts={"dave": StreamStart(3, True, False)}, epoch=2))
    store.close()


@dataclass(frozen=True)
class Contents:
    """Contents of a log that a recovery uses."""

    tables: dict[str, Any]
    checkpoints: dict[int, tuple[int, bytes, Any]]
    records: list[bytes]


def read_contents(folder: Log) -> Contents:
    """Read a log as a coordinator does, opened for writing. Raises ImmortalError for damage."""
    store = open_log(folder, NAME, map_size_bytes=1 << 24)
    try:
        summary = store.summary()
        checkpoints = {}
        for header in summary.checkpoints:
            try:
                chunks = [store.read_checkpoint_chunk(header.checkpoint_id, index) for index in range(CHUNKS)]
            except LogError:
                continue  # left out, as a checkpoint with a damaged header is
            blob = b"".join(chunks)
            if (len(blob), crc64(blob)) == (header.size_bytes, header.check):
                checkpoints[header.checkpoint_id] = (header.sequence_id, blob, dict(header.unacknowledged))
        records: list[bytes] = []
        first = max(summary.first_sequence_id, 0)
        while values := store.read(first + len(records), 1 << 16):
            records += values
        tables = {
            name: getattr(summary, name)
            for name in ("sources", "acknowledged", "peers", "impulses", "extensions", "epoch", "versions")
        }
        tables |= {"stream_starts": summary.stream_starts, "last": summary.last_sequence_id, "first": first}
        return Contents(tables, checkpoints, records)
    finally:
        store.close()


def differences(found: Contents, written: Contents) -> list[str]:
    """List what a recovery would do differently than with the undamaged log. A checkpoint left out does not count."""
    different = [name for name in written.tables if found.tables[name] != written.tables[name]]
    if found.records != written.records:
        different.append(f"records: {len(found.records)} of {len(written.records)}")
    wrong = {number: one for number, one in found.checkpoints.items() if one != written.checkpoints.get(number)}
    if wrong:
        different.append(f"checkpoints {sorted(wrong)}")
    if not found.checkpoints:
        different.append("no checkpoint is left, and nobody says so")
    return different


SAME, NAMED, OTHER = "same", "named", "other"


def outcome(folder: Path, written: Contents, timeout_s: int = 20) -> tuple[str, str]:
    """Open the log in ``folder`` as a coordinator, in a process of its own; return the result.

    It is (SAME, ""), (NAMED, the error), (OTHER, what is different), or ("SIGSEGV" or another signal, "").
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _child(folder, written, write, timeout_s)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name, ""
    kind, _, text = said.partition(" ")
    assert kind in (SAME, NAMED, OTHER), (kind, text, status)
    return kind, text


def _child(folder: Path, written: Contents, write: int, timeout_s: int) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB prints its failed assertions there
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(timeout_s)
    try:
        different = differences(read_contents(folder), written)
        said = f"{OTHER} {different}" if different else SAME
    except ImmortalError as error:
        said = f"{NAMED} {error}"
    except BaseException as error:
        said = f"{OTHER} {error!r}"
    os.write(write, said.encode()[:60_000])
    os._exit(0)


def page_kinds(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield number and kind of every page that has a kind; the following pages of a long value have none."""
    number = 0
    while number < len(data) // PAGE_SIZE_BYTES:
        _, _, flags, lower, upper = struct.unpack_from("=QHHHH", data, number * PAGE_SIZE_BYTES)
        kind = PAGE_KINDS.get(flags & 0xF)
        if kind is not None:
            yield number, kind
        number += max(1, lower | upper << 16) if kind == "overflow" else 1
