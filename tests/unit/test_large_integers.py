"""Integers of any size wherever a value goes: arguments, results and state, and what people and programs see."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import immortal
from immortal import CallRefused, Immortal, peer, query, rpc
from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.client.methods import NamedMethod, typed_method
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.tree import Fields, state_rows, to_json, tree
from immortal.coordinator.core.formatting import format_call
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.pipeline.sql.states import read_tables
from immortal.protocol.client_frames import Reply, ReplyKind
from immortal.protocol.extension_values import decode_plain
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType, encode_incoming_rpc
from immortal.replay.findings import pair_arguments
from immortal.testing import Environment

LARGE = [2**64, -(2**63) - 1, 2**70, -(10**5000)]
EDGES = [2**64 - 1, -(2**63), 0]


@dataclass
class Entry:
    number: int
    others: dict[int, list[int]] = field(default_factory=dict)


class Ledger(Immortal):
    total: int
    entries: list[Entry]
    facts: dict[str, Any]

    def __init__(self) -> None:
        self.total, self.entries, self.facts = 0, [], {}

    @rpc
    def add(self, number: int, note: str = "", more: Any = None) -> int:
        self.total += number
        self.entries.append(Entry(number, {number: [number]}))
        self.facts[note] = more
        return self.total

    @rpc
    def entry(self, entry: Entry) -> Entry:
        return entry

    @query
    def whole(self) -> dict[str, Any]:
        return {"total": self.total, **self.facts}

    @rpc
    async def later(self, number: int) -> int:
        return number + await immortal.event("go", int)

    @rpc
    def go(self, number: int) -> None:
        immortal.signal("go", number)


class Asking(Immortal):
    ledger = peer(Ledger, "ledger")

    @rpc
    async def ask(self, number: int) -> int:
        self.ledger.add.fork(number)
        self.ledger.add.fork(number, "note", {"of": [number]})
        return await self.ledger.add(number)


@pytest.mark.parametrize("number", [*LARGE, *EDGES], ids=lambda number: hex(number)[:9])
def test_as_an_argument_a_result_and_state(number: int) -> None:
    with Environment() as env:
        ledger, asking = env.start(Ledger, "ledger"), env.start(Asking, "asking")
        assert asking.call(Asking.ask, number) == 3 * number
        entry = Entry(number, {number: [number, 1]})
        assert ledger.call(Ledger.entry, entry) == entry
        assert ledger.call(Ledger.whole) == {"total": 3 * number, "": None, "note": {"of": [number]}}
        pending = ledger.begin(Ledger.later, number)
        ledger.checkpoint()
        ledger.crash()
        ledger.recover()
        assert ledger.state.total == 3 * number
        assert ledger.state.entries[1] == Entry(number, {number: [number]})
        ledger.call(Ledger.go, number)
        assert pending.result() == 2 * number


def test_where_another_type_is_wanted_it_is_refused() -> None:
    class Texts(Immortal):
        @rpc
        def take(self, text: str) -> None: ...

        @rpc
        def few(self, number: int | None, ratio: float = 0.5) -> float:
            return ratio

    with Environment(fail_alone=True) as env:
        texts = env.start(Texts, "texts")
        with pytest.raises(CallRefused, match="Expected `str`"):
            texts.call(Texts.take, 2**70)
        assert texts.call(Texts.few, 2**70) == 0.5


@pytest.mark.parametrize("number", LARGE[:3], ids=hex)
def test_clients_with_the_class_and_without(number: int) -> None:
    definition = definition_of(Ledger)
    typed, plain = typed_method(definition, "add"), NamedMethod("add")
    codec = definition.codec(definition.handlers["add"])
    for method in (typed, plain):
        assert codec.decode(method.encode((number, "a", (number,)), {}))[0] == number
        assert method.value(Reply(1, ReplyKind.VALUE, encode_value(number))) == number
    assert codec.decode(typed.encode((1, "a", (number,)), {})) == (1, "a", (number,))


@pytest.mark.parametrize("number", LARGE, ids=lambda number: hex(number)[:9])
def test_what_people_see(number: int) -> None:
    message = encode_incoming_rpc(8, RpcType.FORK, encode_value((number, [number])))
    words = format_call(message, "", {("", 8): "Ledger.add"})
    has_many_digits = abs(number) > 10**4000
    assert (hex(number)[:100] if has_many_digits else str(number)) in words
    as_json = json.loads(json.dumps(to_json(tree({"n": number}))))["n"]
    assert as_json == ({"$int": hex(number)} if has_many_digits else number)
    if not has_many_digits:
        shown = ArgumentDecoder(definition_of(Ledger)).decode(
            RpcKind.CALL, RpcType.FORK, definition_of(Ledger).handlers["add"].method_id, encode_value((number, "a"))
        )
        assert json.loads(shown.arguments_json or "") == {"number": number, "note": "a"}


def test_columns_of_sql_hold_them_as_json(tmp_path: Path) -> None:
    state = Fields({"total": tree(2**70), "small": 5, "entries": tree({1: 2**64, 2: 3})})
    file = tmp_path / "rows"
    file.write_text("".join(f"{json.dumps([table, to_json(row)])}\n" for table, row in state_rows(state)))
    tables = read_tables(file)
    assert tables["state"].to_pylist() == [{"total": str(2**70), "small": 5}]
    assert [row["value"] for row in tables["entries"].to_pylist()] == [str(2**64), "3"]


def test_arguments_beside_one_another() -> None:
    def rpc_of(number: int) -> IncomingRpc:
        return IncomingRpc(RpcKind.CALL, 8, RpcType.FORK, encode_value((number,)))

    (pair,) = pair_arguments(rpc_of(2**70), rpc_of(2**70 + 1), is_msgpack=True)
    assert (pair.old, pair.new, pair.differs) == (str(2**70), str(2**70 + 1), True)


@pytest.mark.parametrize("data", [b"Z", b"", b"T\xc1", b"D\xa1x", b"u\xc4\x01a", b"m\x90", b"T" + b"\x91" * 5000])
def test_an_extension_that_is_none_is_a_decode_error(data: bytes) -> None:
    raw = msgspec.msgpack.encode(msgspec.msgpack.Ext(73, data))
    if data:
        with pytest.raises(msgspec.DecodeError):
            decode_plain(raw)
    else:
        assert decode_plain(raw) == msgspec.msgpack.Ext(73, b"")
