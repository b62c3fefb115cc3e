"""Network between cores, with the messenger's promise: a frame is sent again until it is answered.

Frames and answers are late, lost, doubled and out of order. A way between two instances can be cut, which loses its
frames, or hang, which delays them. No duplicate is dropped, and frames on their way when their sender dies still
arrive: the streams must need no more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.peer_frames import FrameType, PeerFrame, decode_frame, encode_frame
from tests.simulation.clock import MS, US, Clock
from tests.simulation.plan import Plan

if TYPE_CHECKING:
    from tests.simulation.node import Node

RETRY_NS = 2 * MS


@dataclass(slots=True, eq=False)
class Sent:
    """Frame on its way, until it is answered or its sender gives it up."""

    sender: Node
    life: int  # of its sender
    effect: ef.SendToPeer
    frame: PeerFrame
    sent_ns: int
    over: bool = False


@dataclass(slots=True, eq=False)
class Token:
    """Data with which an answer finds its way."""

    sent: Sent
    receiver: Node
    life: int  # of the receiver


class Network:
    def __init__(self, plan: Plan, clock: Clock) -> None:
        self.lost = self.doubled = self.held = self.delivered = 0
        self.answered_twice = 0  # frames that arrived again after they had been answered
        self.overtaken = 0  # Welcomes with a higher position than their sender knew to be acknowledged
        self.unanswered: dict[tuple[int, str], list[Sent]] = {}  # by the sender's node and the destination
        self.blocked: dict[tuple[str, str], str] = {}  # by direction: "cut" or "hang"
        self._held: dict[tuple[str, str], list[tuple[Callable[..., None], tuple[object, ...]]]] = {}
        self._rng = plan.stream("network")
        self._plan = plan
        self._clock = clock
        self._retrying: set[tuple[int, str]] = set()
        self.given_up_arrives = True  # frames on their way when their sender gives them up
        self._cut_off: dict[int, int] = {}  # by node: frames of its lives before this one no longer arrive
        self.nodes: dict[str, Node] = {}

    # --- for a node --------------------------------------------------------------------------------------------------

    def send(self, sender: Node, effect: ef.SendToPeer) -> None:
        sent = Sent(sender, sender.life, effect, decode_frame(encode_frame(effect.frame)), self._clock.now_ns)
        link = (sender.number, effect.destination)
        self.unanswered.setdefault(link, []).append(sent)
        self._transmit(sent)
        if link not in self._retrying:
            self._retrying.add(link)
            self._clock.after(RETRY_NS, self._retry, link)

    def reply(self, effect: ef.ReplyToPeer) -> None:
        token = effect.token
        assert isinstance(token, Token)
        if token.life == token.receiver.life:  # a connection ends with its process
            frame = decode_frame(encode_frame(effect.frame))
            self.answered_twice += token.sent.over
            self._pass(token.receiver.name, token.sent.sender.name, self._answer, token, frame)

    def give_up(self, sender: Node, destination: str) -> None:
        """Stop sending the frames to a destination again."""
        for sent in self.unanswered.pop((sender.number, destination), ()):
            sent.over = True

    def forget(self, sender: Node) -> None:
        """Send no frame of ``sender`` again: its process is gone."""
        for number, destination in [link for link in self.unanswered if link[0] == sender.number]:
            for sent in self.unanswered.pop((number, destination)):
                sent.over = True

    def cut_off(self, node: Node) -> None:
        """Let no frame of the node's earlier lives arrive any more: they ended long ago."""
        self._cut_off[node.number] = node.life

    @property
    def is_quiet(self) -> bool:
        return not any(self.unanswered.values()) and not self.blocked

    # --- on the way --------------------------------------------------------------------------------------------------

    def _transmit(self, sent: Sent) -> None:
        self._pass(sent.sender.name, sent.effect.destination, self._arrive, sent)
        if self._rng.random() < self._plan.duplicate_rate:
            self.doubled += 1
            self._pass(sent.sender.name, sent.effect.destination, self._arrive, sent)

    def _pass(self, origin: str, destination: str, action: Callable[..., None], *arguments: object) -> None:
        blocked = self.blocked.get((origin, destination))
        if blocked == "cut" or self._rng.random() < self._plan.loss_rate:
            self.lost += 1
        elif blocked == "hang":
            self.held += 1
            self._held.setdefault((origin, destination), []).append((action, arguments))
        else:
            spread = self._rng.random()
            late_ns = 3 * MS if self._rng.random() < self._plan.late_rate else 0
            self._clock.after(30 * US + spread * (120 * US + late_ns), action, *arguments)

    def _retry(self, link: tuple[int, str]) -> None:
        waiting = [sent for sent in self.unanswered.get(link, ()) if not sent.over]
        if not waiting:
            self.unanswered.pop(link, None)
            self._retrying.discard(link)
            return
        self.unanswered[link] = waiting
        for sent in waiting:
            if self._clock.now_ns - sent.sent_ns >= RETRY_NS:
                self._transmit(sent)
        self._clock.after(RETRY_NS, self._retry, link)

    def _arrive(self, sent: Sent) -> None:
        receiver = self.nodes[sent.effect.destination]
        if sent.over and not self.given_up_arrives:
            return
        if receiver.machine is not None and sent.life >= self._cut_off.get(sent.sender.number, 0):
            self.delivered += 1
            receiver.post(ev.PeerFrameReceived(Token(sent, receiver, receiver.life), sent.frame))

    def _answer(self, token: Token, frame: PeerFrame) -> None:
        sent = token.sent
        if sent.over or sent.life != sent.sender.life or token.life < self._cut_off.get(token.receiver.number, 0):
            return
        sent.over = True
        self.overtaken += frame.frame_type is FrameType.WELCOME and frame.position > sent.frame.position
        waiting = self.unanswered.get((sent.sender.number, sent.effect.destination))
        if waiting is not None:
            waiting.remove(sent)
        assert sent.sender.peer_side is not None
        sent.sender.peer_side.replied(ev.PeerReplied(sent.effect.destination, sent.effect.tag, frame))

    # --- faults ------------------------------------------------------------------------------------------------------

    def block(self, how: str, *directions: tuple[str, str]) -> None:
        for direction in directions:
            self.blocked[direction] = how

    def heal(self, *directions: tuple[str, str]) -> None:
        for direction in directions:
            self.blocked.pop(direction, None)
            for action, arguments in self._held.pop(direction, ()):
                self._clock.after(self._rng.random() * MS, action, *arguments)
