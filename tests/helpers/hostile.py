"""Instance that sends any bytes a test gives it, as a peer of the others, in an environment of the SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from immortal.appsdk.testing.outside import OutsideApp
from immortal.appsdk.testing.world import Node
from immortal.coordinator.core import events as ev
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, encode_request
from immortal.protocol.extensions import encode_app_batch
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    encode_attach_to,
    encode_incoming_rpc,
)
from immortal.testing import Environment

DEEP = b"\x91" * 1100 + b"\x01"
"""Message of 1.1 kB: 1,100 nested arrays."""


class HostileApp(OutsideApp):
    """App that answers calls as ``answer_with`` says: from the call's number to (kind, arguments) of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answer_with: Callable[[int], tuple[int, bytes]] | None = None
        self.asked: list[tuple[str, int, int]] = []  # (caller, number, method ID)

    def say(self, destination: str, messages: bytes, count: int = 1) -> None:
        if destination not in self._attached:
            self._attached.add(destination)
            self.output += encode_attach_to(destination)
        self.output += encode_app_batch(MessageType.IMPULSE_BATCH, destination, count, messages)

    def _answer(self, content: bytes, start: int, end: int) -> None:
        from immortal.protocol.client_frames import decode_caller

        rpc = decode_incoming_rpc(content, start, end)
        caller = decode_caller(content, start, end)
        if rpc.kind != RpcKind.CALL or caller is None:
            return
        self.asked.append((caller.name, caller.number, rpc.method_id))
        if self.answer_with is not None:
            kind, arguments = self.answer_with(caller.number)
            self.say(caller.name, encode_incoming_rpc(rpc.method_id, RpcType.ASYNC, arguments, kind))


class _HostileNode(Node):
    def connect(self) -> None:
        self.app = HostileApp()
        self.failure = None
        self.paused = self.closing = False
        self.do(lambda: self._handle(ev.AppConnected()))


def hostile(env: Environment, name: str) -> HostileApp:
    """Start a new instance of ``env`` that the test controls."""
    world = env._world
    node = world.nodes[name] = _HostileNode(world, name, None, len(world.nodes) + 1)
    node.start()
    env.run()
    assert isinstance(node.app, HostileApp)
    return node.app


def client_says(
    env: Environment,
    name: str,
    method_id: int,
    arguments: bytes,
    *,
    number: int = 1,
    client_id: str = "c",
    caller: str = "",
    query: bool = False,
    runs: bool = True,
    **more: Any,
) -> None:
    """Send a client's request or query to the instance ``name``. ``runs``: then run until all is at rest."""
    kind = ClientFrameType.QUERY if query else ClientFrameType.REQUEST
    values: dict[str, Any] = {"count": 1, "payload": encode_request(method_id, arguments)} | more
    frame = ClientFrame(kind, client_id, name, number=number, **values)
    env._world.nodes[name].handle(ev.ClientFrameReceived("t", frame, caller))
    if runs:
        env.run()
