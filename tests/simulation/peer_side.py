"""Driver's port for peers and clients, while one process of the coordinator lives.

As the messenger does, it sends when it is flushed, and keeps answers back from a driver that is in no hurry.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.peer_frames import FrameType
from tests.simulation.callers import Caller
from tests.simulation.clock import MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.node import Node

REPLY_DELAY_NS_MAX = 2 * MS  # an answer that is not urgent waits at most so long


class PeerSide:
    def __init__(self, node: Node, rng: random.Random) -> None:
        self._node = node
        self._world = node.world
        self._rng = rng
        self._out: list[tuple[str, Callable[[], None]]] = []  # (stream, function that sends)
        self._patient = False
        self._answers: list[ev.PeerReplied] = []  # kept back
        self._is_gone = False

    def replied(self, event: ev.PeerReplied) -> None:
        """Take an answer that has arrived."""
        if not self._patient:
            self._node.post(event)
            return
        self._world.marks["answer kept back"] += 1
        self._answers.append(event)
        if len(self._answers) == 1:
            self._world.clock.after(self._rng.random() * REPLY_DELAY_NS_MAX, self._lose_patience)

    def _lose_patience(self) -> None:
        if not self._is_gone:
            self._node.post(*self._take_answers())

    def _take_answers(self) -> list[ev.PeerReplied]:
        answers, self._answers = self._answers, []
        return answers

    def end(self) -> None:
        """End the process: unsent frames are lost."""
        self._is_gone = True
        self._out.clear()

    # --- the driver's port -------------------------------------------------------------------------------------------

    def open(self, effect: ef.OpenPeer) -> None:
        pass

    def send(self, effect: ef.SendToPeer) -> None:
        self._node.checker.sent_to_peer(effect, self._node.number)
        self._out.append((effect.destination, partial(self._world.network.send, self._node, effect)))

    def reset(self, effect: ef.ResetPeer) -> None:
        destination = effect.destination
        self._out = [one for one in self._out if one[0] != destination]
        self._answers = [one for one in self._answers if one.destination != destination]
        self._world.network.give_up(self._node, destination)

    def reply(self, effect: ef.ReplyToPeer) -> None:
        self._node.checker.answered(effect)
        frame = effect.frame
        if frame.frame_type is FrameType.RESEND:
            self._world.marks["Resend"] += 1
        elif frame.frame_type is FrameType.REFUSED:
            self._world.refused(self._node, frame)
        self._out.append(("", partial(self._world.network.reply, effect)))

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        caller = effect.token
        assert isinstance(caller, Caller)
        self._world.marks["caller answered"] += 1
        self._out.append(("", partial(caller.replied, effect)))

    def begin_turn(self) -> None:
        pass

    @property
    def has_new(self) -> bool:
        return bool(self._out)

    def flush(self, *, patient: bool) -> None:
        self._patient = patient
        out, self._out = self._out, []
        for _, send in out:
            send()
        if not patient and self._answers:
            self._node.post(*self._take_answers())

    @property
    def replies_wait(self) -> bool:
        return bool(self._answers)

    def receive(self) -> None:
        self._node.post(*self._take_answers())
