"""Fleet of instances that do not run, whose logs say which of them called which."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from immortal.coordinator.core.interfaces import SourcePosition, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.log import create_log
from immortal.protocol.batch import encode_batch
from immortal.protocol.messages import RpcKind, encode_incoming_rpc
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

LATENCY_NS = 3_000_000


def write_fleet(home: Path, callers: Mapping[str, Sequence[str]], answering: Mapping[str, Sequence[str]]) -> None:
    """Register each instance of ``callers``. Who has callers has a log, of one message from each of them and from each
    that answers it; each message took LATENCY_NS."""
    registry = Registry(home)
    for name, calling in callers.items():
        registry.register(name, peer="tcp://127.0.0.1:*")
        if not calling:
            continue  # it has never been started
        kinds = dict.fromkeys(calling, RpcKind.CALL) | dict.fromkeys(answering.get(name, ()), RpcKind.RETURNED_NOTHING)
        messages = [encode_incoming_rpc(5, 1, b"\x91\x01", kind) for kind in kinds.values()]
        record = encode_record(7, 0, b"".join(encode_batch(message, 1) + message for message in messages))
        now_ns = time.time_ns()
        batches = [BatchSource(BatchKind.STREAM, one, 1, 1, now_ns - LATENCY_NS) for one in kinds]
        trailer = encode_trailer(Trailer(now_ns, batches), decode_header(record).check)
        store = create_log(home / name / "log", name, committer_id=7)
        sources = {one: SourcePosition(7, 1, 1) for one in kinds}
        store.commit(Transaction(records=[(0, record + trailer)], sources=sources, epoch=1, extensions=frozenset()))
        store.close()


def leave_dead(home: Path, name: str) -> None:
    """Leave the file of a coordinator that was killed."""
    control.announce(home / name, home / name / "control.sock")
    announced = control.path(home / name)
    announced.write_text(announced.read_text().replace('"pid":', '"pid":9'))  # of no process
