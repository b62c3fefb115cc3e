"""Differences counted by method, the first of them kept, whatever order they are found in."""

from __future__ import annotations

import random

import msgspec

from immortal.protocol.messages import RpcType, encode_incoming_rpc
from immortal.replay.comparison import Difference, Kind
from immortal.replay.findings import Findings


def call(method_id: int, *arguments: object) -> bytes:
    return encode_incoming_rpc(method_id, RpcType.FORK, msgspec.msgpack.encode(arguments))


def test_counts_by_destination_and_method() -> None:
    findings = Findings(limit=10)
    findings.add(Difference(Kind.CHANGED, "b", (1, 0), call(7, "x"), call(8, "y")))
    findings.add(Difference(Kind.MISSING, "b", (2, 0), call(7, "x"), None))
    findings.add(Difference(Kind.ADDED, "c", (2, 0), None, call(7, "x")))
    assert findings.counts == {("b", 7, 0): {Kind.CHANGED: 1, Kind.MISSING: 1}, ("c", 7, 0): {Kind.ADDED: 1}}
    assert [findings.count(kind) for kind in Kind] == [1, 1, 1]
    assert findings.total == 3
    changed = findings.first[0]
    assert changed.old is not None
    assert changed.new is not None
    assert changed.old.with_method(None) == "method 7('x')"
    assert changed.new.with_method("Counter.count") == "Counter.count('y')"
    assert findings.first[2].old is None


def test_the_first_are_those_of_the_log_and_not_those_found_first() -> None:
    by_stream = {name: [((sequence_id, 0), sequence_id) for sequence_id in range(0, 40, 2)] for name in "bc"}
    kept = []
    for seed in range(5):
        source = random.Random(seed)
        findings = Findings(limit=5)
        waiting = {name: list(entries) for name, entries in by_stream.items()}
        while names := [name for name, entries in waiting.items() if entries]:
            name = source.choice(names)
            key, number = waiting[name].pop(0)
            findings.add(Difference(Kind.MISSING, name, key, call(7, number), None))
        assert findings.total == 40
        kept.append([(finding.key[0], finding.destination) for finding in findings.first])
    assert kept == [[(0, "b"), (0, "c"), (2, "b"), (2, "c"), (4, "b")]] * 5


def test_a_large_argument_is_not_kept_whole() -> None:
    findings = Findings(limit=1)
    findings.add(Difference(Kind.MISSING, "b", (1, 0), call(7, "x" * 100_000), None))
    assert findings.first[0].old is not None
    assert len(findings.first[0].old.with_method(None)) < 1000


def test_arguments_that_are_no_messagepack_are_shown_in_hex() -> None:
    findings = Findings(limit=1)
    findings.is_msgpack = False
    findings.add(Difference(Kind.MISSING, "b", (1, 0), encode_incoming_rpc(7, RpcType.FORK, b"\x01\x02"), None))
    assert findings.first[0].old is not None
    assert findings.first[0].old.with_method(None) == "method 7(01 02)"
