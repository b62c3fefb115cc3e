"""All input passes the delivery policy before it is logged."""

from __future__ import annotations

import pytest

from immortal.coordinator.core.input.admission import Delivered, Delivery
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, BatchSource, decode_trailer
from tests.helpers.clients import call as client_call
from tests.helpers.clients import request
from tests.helpers.core import Driven, attach, call, rpc


def logged(driven: Driven) -> list[BatchSource]:
    """What the log has, behind the initial message."""
    sources: list[BatchSource] = []
    for value in driven.store.read(1, 1 << 20):
        header = decode_header(value)
        sources += decode_trailer(value[header.size_bytes :], header.check).batches
    return sources


@pytest.mark.source
def test_all_input_passes_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[BatchSource] = []
    append = Delivery._append

    def noted(self: Delivery, source: BatchSource, calls: bytes, *, from_app: bool) -> Delivered:
        passed.append(source)
        return append(self, source, calls, from_app=from_app)

    monkeypatch.setattr(Delivery, "_append", noted)
    driven = Driven.started()
    driven.data(attach("~"))
    driven.batch("t", 1, rpc(1), rpc(2))
    driven.data(call("", 3))
    driven.data(call("", 4, rpc_type=2))
    driven.handle(request("t", 1, client_call(5)))
    kinds = [(source.kind, source.name) for source in passed]
    assert kinds == [
        (BatchKind.STREAM, "b"),
        (BatchKind.STREAM, ""),
        (BatchKind.IMPULSES, ""),
        (BatchKind.CLIENT, "~c"),
    ]
    assert logged(driven) == passed
