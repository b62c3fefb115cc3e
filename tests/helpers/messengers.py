"""Messengers that a test drives, over each transport, by a clock of its own."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from immortal.coordinator.messenger.security import connect_with
from immortal.messenger import EndpointInUseError, KeyPair, Messenger, Received, Security

WAIT_SECONDS = 20.0


class FakeClock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


class House:
    """Messengers in one loop, which calls process() only when a descriptor is ready or a deadline due.

    Without keys the messengers share a ZeroMQ context. With CURVE, each has its own context, and all have the same key.
    """

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport, _, curve = transport.partition("+")
        self.security = None
        self.peer = "friend" if curve else None
        if curve:
            pair = KeyPair.new()
            self.security = Security(pair, {pair.public: "friend"}, lambda endpoint: (pair.public,))
        self.context: zmq.Context[Any] = zmq.Context()
        self.clock = FakeClock()
        self.messengers: list[Messenger] = []
        self.receives_apart = False  # as an owner whose other work is more urgent than sending
        self._folder = folder
        self._names = 0

    def messenger(self, **options: Any) -> Messenger:
        context = self.context if self.security is None else None
        options = {"clock_ns": self.clock, "context": context, "security": self.security, **options}
        messenger = Messenger(**options)
        self.messengers.append(messenger)
        return messenger

    def endpoint(self) -> str:
        self._names += 1
        return {
            "tcp": "tcp://127.0.0.1:*",
            "ipc": f"ipc://{self._folder}/{self._names}",
            "inproc": f"inproc://house-{self._names}",
        }[self.transport]

    def fixed_endpoint(self) -> str:
        """Return an endpoint at which nobody listens yet."""
        if self.transport != "tcp":
            return self.endpoint()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def raw(self, kind: int) -> zmq.Socket[bytes]:
        """Return a socket with a friend's key that belongs to no messenger; a ROUTER accepts everybody."""
        made = self.context.socket(kind)
        if self.security is not None:
            connect_with(made, self.security.own, self.security.own.public)
            if kind == zmq.ROUTER:
                made.setsockopt(zmq.CURVE_SERVER, 1)
        return made

    def close(self, messenger: Messenger) -> None:
        self.messengers.remove(messenger)
        messenger.close()

    def drive(self, until: Callable[[], object]) -> None:
        """Process readable and due messengers, by their clock, until the condition holds."""
        end = time.monotonic() + WAIT_SECONDS
        while not until():
            poller = select.poll()
            by_descriptor = {messenger.fileno(): messenger for messenger in self.messengers}
            for descriptor in by_descriptor:
                poller.register(descriptor, select.POLLIN)
            due = [
                messenger
                for messenger in self.messengers
                if (deadline_ns := messenger.next_deadline_ns()) is not None and deadline_ns <= self.clock.now_ns
            ]
            ready = poller.poll(0 if due else max(0.0, end - time.monotonic()) * 1000)
            for messenger in dict.fromkeys([*due, *(by_descriptor[descriptor] for descriptor, _ in ready)]):
                if messenger not in self.messengers:
                    continue
                if messenger in due or not self.receives_apart:
                    messenger.process()
                else:
                    messenger.receive()
                    messenger.flush()
            if time.monotonic() > end:
                pytest.fail("the condition did not come about: a wake-up or a message was lost")

    def settle(self) -> None:
        """Drive until nothing is readable, twice in a row over a real round trip of ZeroMQ's threads."""
        probe, answers = Messenger(context=self.context), []
        self.messengers.append(probe)
        endpoint = probe.listen("inproc://settle", lambda received: received.reply())
        for _ in range(3):
            probe.send_message(endpoint, b"", answers.append)
            wanted = len(answers) + 1
            self.drive(lambda wanted=wanted: len(answers) >= wanted)
        self.close(probe)


def listen_when_free(
    messenger: Messenger, endpoint: str, server_loop: Callable[[Received], None], *, ordered: bool = False
) -> str:
    """Listen at an endpoint that was just released: ZeroMQ's thread closes the old socket a moment later."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return messenger.listen(endpoint, server_loop, ordered=ordered)
        except EndpointInUseError:
            assert time.monotonic() < end
            time.sleep(0)


def echo(received: Received) -> None:
    received.reply(*received.parts)
