"""What is on its way between the instances of an environment: at least once, in order, until it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from immortal.appsdk.testing.node import Node
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.peer import PeerFrame


@dataclass(slots=True, eq=False)
class _Message:
    """Sent again, to each life of its receiver, until it is answered."""

    sender: Node
    effect: ef.SendToPeer
    delivered: tuple[Node, int] | None = None  # to which life of the receiver
    answer: PeerFrame | None = None


class Network:
    """Loses nothing and keeps the order. Who is parted waits."""

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
        """Bring the first that can be brought; False if there is none."""
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
