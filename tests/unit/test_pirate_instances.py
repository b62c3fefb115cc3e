"""Pools of instances: who is meant by a pattern, and what can't be asked of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from immortal import Immortal, query, rpc
from immortal.appsdk.client.methods import TypedMethod, typed_method
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.patterns.pirate.driver import instances
from immortal.client import NotConnectable, start
from immortal.patterns.pirate import connect_instances


class Bank(Immortal):
    def __init__(self) -> None:
        pass

    @rpc
    def debit(self, coins: int) -> int:
        return coins

    @query
    def total(self) -> int:
        return 0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("bank-2", "bank-1", "teller"):
        (tmp_path / f"{name}.toml").write_text('peer = "tcp://127.0.0.1:1"\n')
    return tmp_path


def test_a_pattern_means_those_that_are_registered(home: Path) -> None:
    assert list(instances(home, "bank-*")) == ["bank-1", "bank-2"]
    assert list(instances(home, "*")) == ["bank-1", "bank-2", "teller"]
    assert list(instances(home / "nowhere", "*")) == []


def test_it_is_looked_up_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect_instances(Bank, "bank-*", home=home) as banks:
        pool: Any = banks
        calls = pool._immortal_parts[0]
        assert calls.servers == {"bank-1": "dead", "bank-2": "dead"}
        (home / "bank-3.toml").write_text('peer = "tcp://127.0.0.1:1"\n')
        (home / "bank-1.toml").unlink()
        with calls._shell.lock:
            calls._shell.machine._refresh_due_s = 0.0
            calls._shell.machine.process()
        assert sorted(calls.servers) == ["bank-2", "bank-3"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bank-9*",), "no instance in .* fits 'bank-9\\*'"),
        ((["bank-9"],), "there is no instance 'bank-9'"),
        ((Bank, ["bank-1", "bank-9"]), "there is no instance 'bank-9'"),
    ],
)
def test_instances_that_are_not_there(home: Path, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(NotConnectable, match=text), connect_instances(*arguments, home=home):
        pass


@pytest.mark.parametrize("arguments", [(Bank,), (["bank-1"], "bank-2"), ([],), (Bank, [])])
def test_arguments_that_make_no_sense(home: Path, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="expected"):
        connect_instances(*arguments, home=home)


def test_calls_of_a_pool_wait_for_their_replies(home: Path) -> None:
    with connect_instances(Bank, "bank-*", home=home) as banks:
        with pytest.raises(TypeError, match="wait for their replies"):
            banks.debit.fork(1)
        with pytest.raises(TypeError, match="a handle is of one instance"):
            start(banks.debit, 1)


def test_queries_are_known_by_the_class() -> None:
    methods: list[TypedMethod] = [typed_method(definition_of(Bank), name) for name in ("debit", "total")]
    assert [method.is_query for method in methods] == [False, True]
