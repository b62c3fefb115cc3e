"""Handlers of the real SDK that fail, each in its way, and the fates of their calls."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, Protocol

import immortal
from immortal import CalleeFailed, CallRefused, Immortal, impulse, rpc
from immortal.appsdk.calls.context import Context
from immortal.appsdk.handlers.decorators import method_id_of_name
from immortal.coordinator.core.failures.poison_guard import KILLED_TYPE
from immortal.protocol.client_frames import split_caller
from immortal.protocol.messages import IncomingRpc
from immortal.protocol.verdicts import VerdictKind
from tests.simulation.failing import Death, Doom, Failures, waits
from tests.simulation.trace import Violation


class Life(Protocol):
    """One app, as handlers in it need it."""

    rng: random.Random
    failures: Failures
    context: Context

    def is_late(self, what: str) -> None: ...


class Now:
    """Current app: all apps share a process here."""

    life: ClassVar[Life]


class Broken(Exception):  # noqa: N818
    pass


class Stranger(Immortal):
    """Wrong class for a worker: one method is unknown to it, the other has another type of argument."""

    @rpc
    def unknown(self, number: int) -> int: ...

    @rpc
    def misfit(self, number: str) -> int: ...


class Failing(Immortal):
    """Handlers of a worker that fail. ``spoiled``: changed only by undone calls, so it stays 0."""

    kept: int
    lucky: int
    spoiled: int
    me: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()

    @rpc
    def poison(self) -> None:
        raise Violation(f"{self.me} was sent what a call has made that failed")

    def spoil(self, number: int) -> None:
        """Make changes, calls and a signal that must all be undone."""
        self.spoiled += number + 1
        for other in self.others:
            getattr(self, f"to_{other}").poison.fork()
        self.poison.fork()
        immortal.signal(f"deal {number}", 1)
        context = Now.life.context
        Now.life.failures.called((context.sequence_id, context.message_index, 0, 0))

    @rpc
    def undone(self, number: int) -> int:
        self.spoil(number)
        raise Broken(f"undone {number}")

    @rpc(on_error="keep")
    def remains(self, number: int) -> int:
        self.kept += 1
        getattr(self, f"to_{self.others[0]}").count_one.fork()
        raise Broken(f"kept {number}")

    @rpc
    def count_one(self) -> None:
        self.lucky += 1

    @rpc
    def flaky(self, number: int) -> int:
        life, context = Now.life, Now.life.context
        self.spoiled += number + 1
        if life.failures.fails_now((context.sequence_id, context.message_index, 0, 0), life.rng):
            getattr(self, f"to_{self.others[0]}").poison.fork()
            raise Broken(f"by chance {number}")
        self.spoiled -= number + 1
        self.lucky += 1
        getattr(self, f"to_{self.others[0]}").count_one.fork()
        return number

    @rpc
    def lethal(self, number: int) -> int:
        self.spoil(number)
        raise Death

    @rpc
    def misfit(self, number: int) -> int:
        raise Violation(f"{self.me} was called with what does not fit: {number!r}")

    @rpc
    async def undone_later(self, number: int) -> int:
        await immortal.step(self.count_kept)
        await immortal.sleep(timedelta(microseconds=200))
        raise Broken(f"later {number}")

    @rpc
    async def lethal_later(self, number: int) -> int:
        await immortal.sleep(timedelta(microseconds=200))
        for other in self.others:
            getattr(self, f"to_{other}").poison.fork()
        raise Death

    @impulse
    async def doomed_deal(self, number: int) -> None:
        await immortal.step(self.count_kept)
        await immortal.step(self.undone_step, number)

    @rpc
    def count_kept(self) -> None:
        self.kept += 1

    @rpc
    def undone_step(self, number: int) -> int:
        self.spoiled += number + 1
        for other in self.others:
            getattr(self, f"to_{other}").poison.fork()
        raise Broken(f"step {number}")

    @rpc(on_error="keep")
    def kept_step(self, number: int) -> int:
        self.kept += 1
        raise Broken(f"kept step {number}")

    @rpc
    def fork_doomed(self, number: int) -> None:
        """Fork one call of each kind to another instance and to this one."""
        other = self.others[number % len(self.others)]
        for to in (getattr(self, f"to_{other}"), self):
            to.undone.fork(number)
            to.flaky.fork(number)
            to.remains.fork(number)
            to.undone_later.fork(number)
            to.count_one.fork()
            to.flaky.fork(number)
        stranger = getattr(self, f"strange_{other}")
        stranger.unknown.fork(number)
        stranger.misfit.fork("no number")
        if number % 2:
            getattr(self, f"to_{other}").lethal.fork(number)
        elif number % 4:
            getattr(self, f"to_{other}").lethal_later.fork(number)

    async def deal_that_fails(self, kind: int, other: str, number: int) -> int:
        """Run a deal whose parts fail, as they should."""
        to, stranger = getattr(self, f"to_{other}"), getattr(self, f"strange_{other}")
        if kind == 0:
            return await expect_failed(to.undone(number), Broken.__name__, f"undone {number}")
        if kind == 1:
            await expect_refused(stranger.misfit("no number"))
            return await expect_refused(stranger.unknown(number))
        if kind == 2:
            await expect_failed(immortal.step(self.undone_step, number), Broken.__name__, f"step {number}")
            return await expect_failed(immortal.step(self.kept_step, number), Broken.__name__, f"kept step {number}")
        if kind == 3:
            return await expect_failed(to.undone_later(number), Broken.__name__, f"later {number}")
        if kind == 4:
            return await expect_failed(to.lethal(number), KILLED_TYPE)
        if kind == 5:
            await expect_failed(to.remains(number), Broken.__name__, f"kept {number}")
            return await expect_failed(asyncio.gather(self.think(number), to.undone(number)), Broken.__name__)  # type: ignore[attr-defined]
        await immortal.step(self.fork_doomed, number)
        return number

    # --- callers from outside ----------------------------------------------------------------------------------------

    @rpc
    def serve_badly(self, client: int, number: int) -> int:
        self.spoil(client)
        raise Broken(f"request {number}")

    @rpc
    def serve_deadly(self, client: int, number: int) -> int:
        self.spoil(client)
        raise Death


async def expect_failed(awaitable: Any, type_name: str, message: str | None = None) -> int:
    try:
        result = await awaitable
    except CalleeFailed as error:
        if error.type_name != type_name or message not in (None, error.message):
            raise Violation(f"{type_name}, {message} was expected: {error}") from error
        return 1
    raise Violation(f"{type_name}, {message} was expected, there is a result: {result!r}")


async def expect_refused(awaitable: Any) -> int:
    try:
        result = await awaitable
    except CallRefused:
        return 2
    raise Violation(f"a refusal was expected, there is a result: {result!r}")


KINDS_OF_DEALS = 7
_DOOMED = {
    "undone": VerdictKind.UNDONE,
    "remains": VerdictKind.KEPT,
    "flaky": VerdictKind.UNDONE,
    "lethal": VerdictKind.KILLED,
    "misfit": VerdictKind.REFUSED,
    "unknown": VerdictKind.REFUSED,
    "undone_later": VerdictKind.KEPT,
    "lethal_later": VerdictKind.KILLED,
    "doomed_deal": VerdictKind.KEPT,
    "serve_badly": VerdictKind.UNDONE,
    "serve_deadly": VerdictKind.KILLED,
}
_TASKS = ("undone_later", "lethal_later", "doomed_deal")


@cache
def _names() -> dict[int, str]:
    return {method_id_of_name(name): name for name in _DOOMED}


def doom_of(rpc: IncomingRpc) -> Doom | None:
    name = _names().get(rpc.method_id)
    if name is None:
        return None
    caller = split_caller(rpc.arguments)[0] if waits(rpc) else None
    return Doom(_DOOMED[name], caller, name == "flaky", name in _TASKS)
