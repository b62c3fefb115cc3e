"""Names, keys and arguments that can't be encoded are refused where they are given, and never at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Immortal, peer, rpc
from immortal.appsdk.client.clients import with_key
from immortal.appsdk.patterns.queue.model import Submission
from immortal.errors import DefinitionError, UsageError
from immortal.patterns.groups import group
from immortal.testing import Environment

HALF = "\ud800"
EVENTS = ["approved", HALF, "a" + HALF]


class Name(str):
    __slots__ = ()


class Waiting(Immortal):
    done: int

    def __init__(self) -> None:
        self.done = 0

    @rpc
    async def wait(self, name: int) -> int:
        return await immortal.event(EVENTS[name], int)

    @rpc
    async def wait_for_subclass(self) -> int:
        return await immortal.event(Name("approved"), int)

    @rpc
    def tell(self, name: int, value: int) -> None:
        immortal.signal(EVENTS[name], value)

    @rpc
    def tell_subclass(self, value: int) -> None:
        immortal.signal(Name("approved"), value)

    @rpc
    def tell_half(self) -> None:
        immortal.signal("approved", HALF)

    @rpc
    async def tells(self, name: int) -> None:
        immortal.signal(EVENTS[name], 1)

    @rpc
    async def goes_on(self, text: str) -> None:
        immortal.continue_as(HALF)

    @rpc
    def ping(self) -> int:
        self.done += 1
        return self.done


@pytest.mark.parametrize(
    ("handler", "arguments", "said"),
    [
        (Waiting.wait, (1,), "UsageError: immortal.event.*without lone surrogates"),
        (Waiting.wait, (2,), "UsageError: immortal.event.*without lone surrogates"),
        (Waiting.tell, (1, 3), "UsageError: immortal.signal.*without lone surrogates"),
        (Waiting.tells, (1,), "UsageError: immortal.signal.*without lone surrogates"),
        (Waiting.tell_half, (), "TypeError: immortal.signal.*can't be encoded"),
        (Waiting.goes_on, ("a",), "TypeError: immortal.continue_as: .*parameter 'text'"),
    ],
)
def test_what_handlers_give(handler: Callable[..., Any], arguments: tuple[Any, ...], said: str) -> None:
    with Environment(fail_alone=True) as env:
        waiting = env.start(Waiting, "waiting")
        with pytest.raises(CalleeFailed, match=said):
            waiting.call(handler, *arguments)
        waiting.checkpoint()
        waiting.crash()
        waiting.recover()
        assert waiting.call(Waiting.ping) == 1


def test_a_name_may_be_of_a_class_below_str() -> None:
    with Environment(fail_alone=True) as env:
        waiting = env.start(Waiting, "waiting")
        pending = waiting.begin(Waiting.wait_for_subclass)
        waiting.call(Waiting.tell_subclass, 5)
        assert pending.result() == 5
        waiting.call(Waiting.tell_subclass, 2**70)
        waiting.checkpoint()
        waiting.crash()
        waiting.recover()
        assert waiting.call(Waiting.wait, 0) == 2**70


@pytest.mark.parametrize(
    ("give", "error"),
    [
        (lambda: peer(Waiting, HALF), DefinitionError),
        (lambda: group(Waiting, HALF, ["a"]), DefinitionError),
        (lambda: group(Waiting, "a", [HALF]), DefinitionError),
        (lambda: Environment().start(Waiting, HALF), UsageError),
        (lambda: with_key(object(), HALF), TypeError),
        (lambda: Submission(HALF, b"\x90"), ValueError),
        (lambda: Submission("f", b"\x90", key=HALF), ValueError),
        (lambda: Submission("f", b"\x90", dedup=HALF), ValueError),
    ],
)
def test_what_others_give(give: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error, match="ud800"):
        give()
