"""The audit of ordered multicasts over the logs of several instances: sound ones, and planted violations."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.jobs.audit import audit_rows
from pipeline.jobs.evidence import BATCH, Row
from pipeline.jobs.judgement import judge
from pipeline.jobs.reports import AuditReport
from protocol.messages import RpcType, encode_incoming_rpc
from protocol.ordering import EXECUTED_METHOD_ID

Run = tuple[str, int, int, int]  # sender, number, timestamp, count of calls


def executed(*runs: Run) -> bytes:
    return encode_incoming_rpc(EXECUTED_METHOD_ID, RpcType.FORK, msgspec.msgpack.encode((len(runs), runs)))


def audit(logs: dict[str, list[bytes]]) -> AuditReport:
    """Each log has these messages to itself, one a record."""
    rows = [
        Row(name, name, BATCH, record, position=record, items=1, payload=payload)
        for name, payloads in sorted(logs.items())
        for record, payload in enumerate(payloads, 1)
    ]
    return judge(audit_rows(rows), {})


SOUND = [executed(("s", 1, 5, 2)), executed(("t", 1, 5, 1), ("s", 2, 9, 1))]


def test_one_order_is_sound() -> None:
    report = audit({"a": SOUND, "b": [SOUND[0], executed(("s", 2, 9, 1))], "c": [executed(("t", 1, 5, 1))]})
    assert report.counts.get("consistency", 0) == 0


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ([executed(("t", 1, 5, 1)), executed(("s", 1, 5, 2))], "behind multicast 1 of 't', which comes later"),
        ([executed(("s", 2, 9, 1), ("t", 1, 5, 1))], "behind multicast 2 of 's', which comes later"),
        ([executed(("s", 1, 5, 2), ("s", 1, 5, 2))], "behind multicast 1 of 's'"),
        ([executed(("s", 1, 6, 2))], "has another place or other calls"),
        ([executed(("s", 1, 5, 1))], "has another place or other calls"),
        ([encode_incoming_rpc(EXECUTED_METHOD_ID, RpcType.FORK, b"\x91\x01")], "can't be read"),
    ],
)
def test_each_planted_violation_is_found(log: list[bytes], text: str) -> None:
    report = audit({"a": SOUND, "b": log})
    assert report.counts["consistency"] == 1
    (violation,) = [one for one in report.violations if one.kind == "consistency"]
    assert text in violation.text
