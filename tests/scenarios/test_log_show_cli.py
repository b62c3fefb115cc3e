"""`immortal log show` where the class is known: names, decoded arguments, and nothing that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.instances.registry import Registry
from tests.helpers.cli import HOME, immortal
from tests.helpers.recorded import load_module, write_module
from tests.helpers.waiting import EffectsByHand, WaitingInstances

SOURCE = """
from datetime import timedelta
from typing import Any

import immortal
from immortal import Immortal, impulse, initial, peer, rpc


class Missing(Exception):
    pass


def rate(word: str) -> float:
    return 0.0


class Counter(Immortal):
    @rpc(raises=[Missing])
    def count(self, word: str) -> int:
        if word == "none":
            raise Missing(word)
        return len(word)


class Reader(Immortal):
    counter = peer(Counter, "counter")

    @initial
    def begin(self) -> None: ...

    @impulse
    async def line(self, word: str, value: Any) -> None:
        try:
            await self.counter.count(word)
        except Missing:
            await immortal.effect(rate, word)
            await immortal.sleep(timedelta(seconds=1))

    @impulse
    def keep(self, value: Any) -> None: ...
"""

NASTY = "\x1b[2J\nrecord 99  \x9b31m\u2028\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry where ``reader`` has a log, and where its module is."""
    folder = tmp_path_factory.mktemp("show")
    name = write_module(folder, SOURCE)
    module = load_module(folder, name)
    effects = EffectsByHand()
    instances = WaitingInstances(folder / "logs", {"reader": module.Reader, "counter": module.Counter}, effects)
    reader = instances["reader"]
    reader.impulse("line", "the", 1.5)
    reader.impulse("line", "none", {"a": b"\x00\xff"})
    effects.waiting[0].returned(0.25)
    instances.settle()
    instances.pass_all_time()
    reader.impulse("keep", [float("nan"), float("-inf"), b"\x1b[2J", NASTY, {1: None}, 1 << 63])
    instances.close()
    registry = Registry(folder / HOME)
    registry.register("reader", "tcp://127.0.0.1:*", log=folder / "logs" / "reader" / "log")
    registry.remember_app("reader", f"{name}:Reader")
    return folder


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def rows(said: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refused) for line in said.splitlines()]


def messages(folder: Path, *options: str) -> list[dict[str, Any]]:
    shown = rows(immortal(folder, "log", "show", "reader", "--json", *options))
    found = [message for row in shown for message in row["messages"] if message["type"] != "RECORD_TIME"]
    return [message.get("wraps", message) for message in found]


def test_methods_have_names_and_arguments_values(folder: Path) -> None:
    said = immortal(folder, "log", "show", "reader").splitlines()
    texts = [line.partition(" bytes  ")[2] for line in said if line.startswith("    RPC")]
    assert said[3].endswith(" wraps RPC fork  1 bytes  Reader.begin()")
    assert texts[:4] == [
        "Reader.line('the', 1.5)",
        "the answer 3 of Counter.count to call 2",
        "Reader.line('none', {'a': b'\\x00\\xff'})",
        "the answer of Counter.count to call 4: it raised Missing('none')",
    ]
    assert texts[4] == "rate(word='none') of Reader.line('none', {'a': b'\\x00\\xff'}) returned 0.25"
    assert any(text.startswith("the clock says ") for text in texts[5:])


def test_as_json(folder: Path) -> None:
    raw = {"type", "kind", "method_id", "rpc_type", "size_bytes", "arguments", "in_words", "batch"}
    found = [{key: each[key] for key in each if key not in raw} for each in messages(folder) if each["type"] == "RPC"]
    assert found[:5] == [
        {"method": "Reader.begin", "values": []},
        {"method": "Reader.line", "values": ["the", 1.5]},
        {"method": "Counter.count", "call_number": 2, "value": 3},
        {"method": "Reader.line", "values": ["none", {"a": {"$bytes": "00ff"}}]},
        {"method": "Counter.count", "call_number": 4, "raised": "Missing", "values": ["none"], "attributes": {}},
    ]
    odd = [{"$float": "nan"}, {"$float": "-inf"}, {"$bytes": "1b5b324a"}, NASTY, {"1": None}, 1 << 63]
    assert found[-1] == {"method": "Reader.keep", "values": [odd]}


def test_nothing_in_a_log_moves_the_cursor_or_makes_a_line(folder: Path) -> None:
    for options in ([], ["--json"]):
        said = immortal(folder, "log", "show", "reader", *options)
        assert all(line.isprintable() for line in said.split("\n"))
        assert "[2J" in said
        assert not any(line.startswith("record 99") for line in said.splitlines())
    assert "\\x1b[2J\\nrecord 99  \\x9b31m\\u2028\\u202e" in immortal(folder, "log", "show", "reader")


def test_the_class_may_be_given_and_need_not_be_known(folder: Path) -> None:
    app = Registry(folder / HOME).load("reader").app
    assert app is not None
    with_names = immortal(folder, "log", "show", "reader")
    copy = folder / "copy"
    assert "there is no module 'nowhere'" in immortal(
        folder, "log", "show", "reader", "--app", "nowhere:Reader", status=1
    )
    assert "names no app" in immortal(folder, "log", "show", "reader", "--app", "nowhere", status=2)
    assert immortal(folder, "log", "show", "reader", "--app", app) == with_names
    # Where the class can't be found the log is shown all the same.
    copy.mkdir()
    (copy / HOME).symlink_to(folder / HOME)
    said = immortal(copy, "log", "show", "reader", "--limit", "2")
    assert "wraps RPC method -1 fork" in said
    assert "note: methods are shown by their numbers: " in said
    assert "give the class with --app MODULE:CLASS, where it can be imported" in said
