"""All instances of an environment, what is on its way between them, and the clock. One thread, no chance in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from appsdk.definition import Definition
from appsdk.testing.crashes import CrashPlan
from appsdk.testing.node import Node
from coordinator.core import effects as ef
from coordinator.core import events as ev
from protocol.errors import ImmortalError
from protocol.peer import PeerFrame

STEPS_MAX = 500_000
"""Of all instances, at one moment of the clock: handlers that call each other for ever would be waited for."""


class RestlessError(ImmortalError):
    """The instances go on and on at one moment of the clock."""


@dataclass(slots=True, eq=False)
class _Message:
    """Sent again, to each life of its receiver, until it is answered."""

    sender: Node
    effect: ef.SendToPeer
    delivered: tuple[Node, int] | None = None  # to which life of the receiver
    answer: PeerFrame | None = None


class Network:
    """Loses nothing and keeps the order. Who is parted waits."""

    def __init__(self, world: World) -> None:
        self._world = world
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
        """Bring the first that can be brought; False if there is none."""
        for message in self._messages:
            effect = message.effect
            receiver = self._world.nodes.get(effect.destination)
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


class World:
    """``seed``: of the apps' randomness. ``order``: by which the order of all steps is drawn; None: each in turn."""

    def __init__(self, start_ns: int, seed: int, order: int | None, crashes: CrashPlan) -> None:
        self.now_ns = start_ns
        self.seed = seed
        self.crashes = crashes
        self.network = Network(self)
        self.nodes: dict[str, Node] = {}
        self.reports: list[tuple[str, str]] = []  # (instance, a warning of its coordinator's)
        self._random = None if order is None else random.Random(order)

    def add(self, name: str, definition: Definition | None) -> Node:
        node = self.nodes[name] = Node(self, name, definition, len(self.nodes) + 1)
        return node

    def settle(self) -> None:
        """Until nobody has anything to do at this moment. Raises what ended an app or a coordinator."""
        steps_left = STEPS_MAX
        while moved := self._pass(steps_left) if self._random is None else self._drawn(self._random):
            steps_left -= moved
            if steps_left <= 0:
                raise RestlessError(
                    f"after {STEPS_MAX:,} steps there is still something to do at one moment of the clock: do "
                    f"handlers call each other for ever? (A pause, such as await self.sleep(...), ends it.)"
                )

    def _pass(self, steps_max: int) -> int:
        """Each in turn, as far as it gets; how many steps that were."""
        steps = 0
        for step in [*(node.step for node in self.nodes.values()), self.network.step]:
            while steps < steps_max and step():
                steps += 1
        return steps

    def _drawn(self, rng: random.Random) -> int:
        steps = [node.step for node in self.nodes.values()] + [self.network.step] * len(self.nodes)
        rng.shuffle(steps)
        return any(step() for step in steps)

    def next_due_ns(self) -> int | None:
        """When the next timer of all is due."""
        due = [node.next_due_ns for node in self.nodes.values()]
        return min((one for one in due if one is not None), default=None)

    def advance_to(self, time_ns: int) -> None:
        """Let the clock go on, from timer to timer."""
        self.settle()
        while (due_ns := self.next_due_ns()) is not None and due_ns <= time_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.settle()
        self.now_ns = max(self.now_ns, time_ns)
        self.settle()
