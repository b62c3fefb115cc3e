"""World of a test: all instances of an environment, their network and clock; single-threaded and deterministic."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import NoReturn, cast

from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.calls.user_code import inherited_context, mark_interrupts
from immortal.appsdk.errors import AppError, UsageError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.testing.node import OUTSIDE_NAME, CrashPlan, Node, OutsideApp
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import InvariantError, require
from immortal.protocol.errors import ImmortalError
from immortal.protocol.peer_frames import PeerFrame

STEPS_MAX = 500_000
"""Limit of steps of all instances at one moment of the clock: else handlers that call each other would run for ever."""

REPORTS_SHOWN = 3  # of the coordinators, if an answer does not come


class LivelockError(ImmortalError):
    """Raised if the instances never come to rest at one moment of the clock."""


class NoAnswerError(ImmortalError):
    """Raised if a call has no answer, and nothing more will happen by itself."""


class World:
    """All instances and their clock. ``seed``: of the apps' randomness. ``order``: seed of the order of all steps.

    ``order`` None: each instance in turn. ``outside``: the test itself. ``variables``: the context in which each life
    of each app begins.
    """

    def __init__(
        self, start_ns: int, seed: int, order: int | None, crashes: CrashPlan, *, fail_alone: bool = False
    ) -> None:
        self.variables = inherited_context()
        self.now_ns = start_ns
        self.fail_alone = fail_alone
        self.seed = seed
        self.crashes = crashes
        self.nodes: dict[str, Node] = {}
        self.network = Network(self.nodes)
        self.reports: list[tuple[str, str]] = []  # (instance, a warning of its coordinator's)
        self.is_closed = False
        self._random = None if order is None else random.Random(order)  # noqa: S311 (from a seed)
        self._outside = self.add(OUTSIDE_NAME, None)
        self._outside.start()
        self._settle()

    def clear_away(self) -> None:
        """Close waiting handlers at the end of the test, not in the middle of another one."""
        for node in self.nodes.values():
            if (app := node.local_app) is not None:
                app.dispatcher.tasks.clear_away()

    @property
    def outside(self) -> OutsideApp:
        app = self._outside.app
        require(isinstance(app, OutsideApp), "the test itself has no app: it never crashes")
        return cast("OutsideApp", app)

    def add(self, name: str, definition: Definition | None) -> Node:
        node = self.nodes[name] = Node(self, name, definition, len(self.nodes) + 1)
        return node

    def _settle(self) -> None:
        """Run until no instance has anything to do at this moment. Raises errors that ended an app or a coordinator."""
        steps_left = STEPS_MAX
        at_rest = False
        while not at_rest:
            moved, at_rest = self._pass(steps_left) if self._random is None else self._drawn(self._random)
            steps_left -= moved
            if steps_left <= 0:
                raise LivelockError(
                    f"after {STEPS_MAX:,} steps there is still something to do at one moment of the clock: do "
                    f"handlers call each other for ever? (A pause, such as await immortal.sleep(...), ends it.)"
                )

    def _pass(self, steps_max: int) -> tuple[int, bool]:
        """Run each instance in turn, as far as possible; return (number of steps, True if all are at rest after it)."""
        steps = 0
        for node in list(self.nodes.values()):
            while steps < steps_max and node.step():
                steps += 1
        own_steps = steps
        while steps < steps_max and self.network.step():
            steps += 1
        return steps, steps == own_steps  # they reach each other only over the network

    def _drawn(self, rng: random.Random) -> tuple[int, bool]:
        steps = [node.step for node in self.nodes.values()] + [self.network.step] * len(self.nodes)
        rng.shuffle(steps)
        moved = any(step() for step in steps)
        return moved, not moved

    def next_due_ns(self) -> int | None:
        """Return the time of the next timer of all instances; None: there is none."""
        due = [node.next_due_ns for node in self.nodes.values()]
        return min((one for one in due if one is not None), default=None)

    def _advance_to(self, time_ns: int) -> None:
        self._settle()
        while (due_ns := self.next_due_ns()) is not None and due_ns <= time_ns:
            self._skip_to(due_ns)
        self._skip_to(time_ns)

    def _skip_to(self, time_ns: int) -> None:
        self.now_ns = max(self.now_ns, time_ns)
        self._settle()

    # --- for the test ------------------------------------------------------------------------------------------------
    # __tracebackhide__: pytest shows a failure in the test and in the handler, not here.

    def run(self) -> None:
        """Run until all are at rest. Raises the errors that ended an app or a coordinator, the user's own if any."""
        __tracebackhide__ = True
        self.do(self._settle)

    def advance_to(self, time_ns: int) -> None:
        """Advance the clock, from timer to timer. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.do(lambda: self._advance_to(time_ns))

    def skip_to(self, time_ns: int) -> None:
        """Let the clock jump: what is due meanwhile fires late. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.run()
        self.do(lambda: self._skip_to(time_ns))

    def do(self, action: Callable[[], None]) -> None:
        """Run ``action``; raise the user's own exception if there is one. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.require_open()
        try:
            with mark_interrupts():
                action()
            return
        except ImmortalError as error:
            failure = error
        raise_user_error(failure)

    def require_open(self) -> None:
        """Check that the environment is not closed. Raises UsageError."""
        if self.is_closed:
            raise UsageError("this environment is closed: what is to be looked at is asked before close()")

    def wait_for(self, call: str, is_done: Callable[[], bool], patience: timedelta) -> None:
        """Advance the clock, from timer to timer, until ``is_done``. Raises NoAnswerError, and as :meth:`run`."""
        __tracebackhide__ = True
        self.run()
        latest_ns = self.now_ns + patience // timedelta(microseconds=1) * 1000
        while not is_done():
            due_ns = self.next_due_ns()
            if due_ns is None:
                raise NoAnswerError(f"{call} has no answer, and nothing more happens by itself{self._who_waits()}")
            if due_ns > latest_ns:
                next_text = datetime_of(due_ns).isoformat()
                raise NoAnswerError(
                    f"{call} has no answer within {patience} (the next timer is due at {next_text}){self._who_waits()}"
                )
            self.do(partial(self._skip_to, due_ns))

    def _who_waits(self) -> str:
        lines = [f"{name}: {message}" for name, message in self.reports[-REPORTS_SHOWN:]]
        for node in self.nodes.values():
            app = node.local_app
            if not node.is_up:
                lines.append(f"{node.name!r} is down")
            elif node.app is None:
                lines.append(f"the app of {node.name!r} is down")
            elif app is not None and app.dispatcher.tasks.count:
                lines.append(f"{node.name!r} has {app.dispatcher.tasks.count} async handlers that wait")
                retried = app.dispatcher.tasks.effects.retried
                lines += [f"the effect {one.name} is tried again: {one.failure}" for one in retried]
            if node.definition is not None:
                absent = {peer.name for peer in node.definition.peers.values()} - self.nodes.keys()
                lines += [f"{node.name!r} has a peer {name!r}, which was not started" for name in sorted(absent)]
        return "".join(f"\n  {line}" for line in lines)


# Messages in flight between the instances of an environment: sent in order, at least once, until they are answered.


@dataclass(slots=True, eq=False)
class _Message:
    """Message that is sent again, to each process of its receiver, until it is answered."""

    sender: Node
    effect: ef.SendToPeer
    delivered: tuple[Node, int] | None = None  # life of the receiver that has it
    answer: PeerFrame | None = None


class Network:
    """Network that loses nothing and keeps the order. Messages between partitioned instances wait."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._messages: list[_Message] = []
        self.parted: set[frozenset[str]] = set()

    def send(self, sender: Node, effect: ef.SendToPeer) -> None:
        self._messages.append(_Message(sender, effect))

    def reply(self, receiver: Node, effect: ef.ReplyToPeer) -> None:
        message = effect.token
        if isinstance(message, _Message) and message.delivered == (receiver, receiver.life):
            message.answer = effect.frame

    def forget_sender(self, sender: Node, destination: str | None = None) -> None:
        self._messages = [
            message
            for message in self._messages
            if message.sender is not sender or destination not in (None, message.effect.destination)
        ]

    def step(self) -> bool:
        """Deliver the first message that can be delivered; return False if there is none."""
        for message in self._messages:
            effect = message.effect
            receiver = self._nodes.get(effect.destination)
            if self.parted and frozenset((message.sender.name, effect.destination)) in self.parted:
                continue
            if message.answer is not None:
                self._messages.remove(message)
                message.sender.handle(ev.PeerReplied(effect.destination, effect.tag, message.answer))
                return True
            if receiver is None or not receiver.is_up or message.delivered == (receiver, receiver.life):
                continue
            message.delivered = (receiver, receiver.life)
            receiver.handle(ev.PeerFrameReceived(message, effect.frame))
            return True
        return False


# Failures of an app, as the test should see them.


_OWN_FOLDERS = (os.path.dirname(os.path.dirname(__file__)),)


def raise_user_error(failure: ImmortalError) -> NoReturn:
    """Raise the user's own exception that caused ``failure``, with its own traceback; without one, ``failure``."""
    __tracebackhide__ = True
    error = failure.__cause__
    if not isinstance(failure, AppError) or error is None:
        raise failure if isinstance(failure, InvariantError) else failure.with_traceback(None)
    said = str(failure).split("\n")
    for line in [*getattr(failure, "__notes__", ()), *said[: 2 if said[1:2] and "arguments:" in said[1] else 1]]:
        error.add_note(line.strip())
    raise error.with_traceback(_users_own(error.__traceback__))


def _users_own(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not the SDK's."""
    found = trace
    while found is not None and os.path.dirname(found.tb_frame.f_code.co_filename).startswith(_OWN_FOLDERS):
        found = found.tb_next
    return found or trace
