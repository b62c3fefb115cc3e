"""Callers from outside, which are no instances. Their requests are done once, however often they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from immortal.appsdk.handlers.decorators import method_id_of_name
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.client_frames import (
    REFUSED_CALL,
    ClientFrame,
    ClientFrameType,
    ReplyKind,
    decode_client_frame,
    decode_replies,
    encode_client_frame,
    encode_numbers,
    encode_request,
)
from immortal.protocol.verdicts import FAILED_CALL
from tests.simulation.clock import MS, US
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

METHODS_THAT_FAIL = ("serve_badly", "serve_deadly", "unknown")
AT_ONCE_MAX = 3


class Caller:
    """Client of the instance ``target``: ``count`` requests, each sent again until it is answered."""

    def __init__(self, world: World, number: int, target: str, count: int) -> None:
        self.target, self.count = target, count
        self._number = number
        self.client_id = f"caller{number}"
        self._world = world
        self._rng = world.plan.stream(f"caller {number}")
        self._pause_ms = self._rng.choice((1, 1, 8))
        self._replies: dict[int, object] = {}
        world.clock.after(self._rng.random() * MS, self._ask)

    @property
    def is_done(self) -> bool:
        return len(self._replies) == self.count

    @property
    def _answered(self) -> int:
        """Return the number up to which all requests are answered."""
        number = 0
        while number + 1 in self._replies:
            number += 1
        return number

    def _ask(self) -> None:
        """Send unanswered requests again, whether the instance took them or not."""
        if self.is_done:
            return
        rng, first = self._rng, self._answered + 1
        released = self._answered if rng.random() < 0.7 else 0
        last = min(self.count, first + rng.randrange(AT_ONCE_MAX))
        numbers = range(first, last + 1)
        if rng.random() < 0.2:
            payload, kind = encode_numbers(numbers), ClientFrameType.PING
        else:
            payload, kind = b"".join(map(self._request, numbers)), ClientFrameType.REQUEST
        frame = ClientFrame(
            kind,
            self.client_id,
            self.target,
            number=first if kind is ClientFrameType.REQUEST else 0,
            acknowledged=released,
            count=len(numbers),
            payload=payload,
        )
        for _ in range(2 if rng.random() < 0.1 else 1):
            if rng.random() >= self._world.plan.loss_rate:
                late_ns = 3 * MS if rng.random() < 0.1 else 100 * US
                self._world.clock.after(rng.random() * late_ns, self._arrive, frame)
        self._world.clock.after((0.3 + rng.random()) * MS * self._pause_ms, self._ask)

    def _request(self, number: int) -> bytes:
        arguments = msgspec.msgpack.encode((self._number, number))
        return encode_request(method_id_of_name(self._method(number)), arguments)

    def _method(self, number: int) -> str:
        return method_of_request(number, fails=self._world.plan.fails)

    def _arrive(self, frame: ClientFrame) -> None:
        node = self._world.network.nodes[self.target]
        if node.machine is not None:
            node.post(ev.ClientFrameReceived(self, decode_client_frame(encode_client_frame(frame))))

    def replied(self, effect: ef.ReplyToClient) -> None:
        """Send a frame back to the client."""
        if self._rng.random() >= self._world.plan.loss_rate:
            frame = decode_client_frame(encode_client_frame(effect.frame))
            self._world.clock.after(self._rng.random() * 200 * US, self._receive, frame)

    def _receive(self, frame: ClientFrame) -> None:
        if frame.frame_type is not ClientFrameType.REPLY:
            return
        for reply in decode_replies(frame.payload, frame.count):
            number = reply.number
            method = self._method(number)
            if reply.kind == ReplyKind.RAISED and method in METHODS_THAT_FAIL:
                self._check_failed(number, method, reply.value)
                continue
            if reply.kind != ReplyKind.VALUE:
                if number not in self._replies:
                    raise Violation(f"{self.client_id} is told that the reply to {number} is gone, and never had it")
                continue
            value = msgspec.msgpack.decode(reply.value)
            if value != served_value(self._number, number) or self._replies.setdefault(number, value) != value:
                raise Violation(f"{self.client_id} gets {value!r} in reply to {number}")

    def _check_failed(self, number: int, method: str, value: bytes) -> None:
        name, arguments, _ = msgspec.msgpack.decode(b"\x93" + value)
        expected = REFUSED_CALL if method == "unknown" else FAILED_CALL
        if name != expected or self._replies.setdefault(number, value) != value:
            raise Violation(f"{self.client_id} gets {name} {arguments} in reply to {number}, {expected} was expected")
        self._world.marks["caller told of a failure"] += 1


def method_of_request(number: int, *, fails: bool) -> str:
    """Return the method of a caller's request. ``fails``: some of them fail."""
    if fails and number % 3 == 0:
        return METHODS_THAT_FAIL[number // 3 % 3]
    return ("serve", "serve_later")[number % 2]


def served_value(client: int, number: int) -> int:
    return 1000 * client + 3 * number
