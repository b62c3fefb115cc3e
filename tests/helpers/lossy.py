"""Network between messengers that loses messages and replies, and changes their order, as no TCP connection does."""

from __future__ import annotations

import heapq
import random
import threading
import time
from typing import Any

import zmq

POLL_MS = 2


class LossyNetwork:
    """Proxy that passes ZeroMQ's messages on between ``endpoint`` and ``target``. A context manager.

    ``loss``: the share that is lost, each way. ``reordered``: the share that is delayed by up to ``late_s``.
    """

    def __init__(
        self, target: str, *, loss: float, reordered: float = 0.0, late_s: float = 0.005, seed: int = 1
    ) -> None:
        self.lost_count = self.late_count = 0
        self._target, self._loss, self._reordered, self._late_s = target, loss, reordered, late_s
        self._chance = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.RCVHWM, 0)
        self._front.setsockopt(zmq.SNDHWM, 0)
        self._front.bind("tcp://127.0.0.1:*")
        endpoint = self._front.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.rstrip(b"\0").decode()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}  # by the route of the sender
        self._late: list[tuple[float, int, zmq.Socket[bytes], list[bytes]]] = []
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LossyNetwork:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._ended.is_set():
            ready: Any
            for ready, _ in poller.poll(POLL_MS):
                if ready is self._front:
                    route, *parts = self._front.recv_multipart()
                    if route not in self._backs:
                        self._backs[route] = self._connect()
                        poller.register(self._backs[route], zmq.POLLIN)
                    self._pass_on(self._backs[route], parts)
                else:
                    (route,) = (route for route, back in self._backs.items() if back is ready)
                    self._pass_on(self._front, [route, *ready.recv_multipart()])
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to, parts = heapq.heappop(self._late)
                to.send_multipart(parts)

    def _connect(self) -> zmq.Socket[bytes]:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.SNDHWM, 0)
        back.setsockopt(zmq.RCVHWM, 0)
        back.connect(self._target)
        return back

    def _pass_on(self, to: zmq.Socket[bytes], parts: list[bytes]) -> None:
        if self._chance.random() < self._loss:
            self.lost_count += 1
        elif self._chance.random() < self._reordered:
            self.late_count += 1
            self._number += 1
            due_s = time.monotonic() + self._late_s * self._chance.random()
            heapq.heappush(self._late, (due_s, self._number, to, parts))
        else:
            to.send_multipart(parts)
