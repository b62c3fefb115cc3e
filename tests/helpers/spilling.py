"""App whose calls are so large that its coordinator's memory soon has no room for them."""

from __future__ import annotations

from immortal.coordinator.instances.registry import Registry
from immortal.protocol.messages import RpcType, encode_attach_to, encode_outgoing_rpc
from tests.helpers.processes import FORWARD, TOLD, SocketApp

CALL_SIZE_BYTES = 256 << 10


class Caller(SocketApp):
    """App that calls its peer once for each impulse, with a large argument."""

    def _forward(self, number: int) -> None:
        if not self.attached:
            self.attached = True
            self.socket.sendall(encode_attach_to(self.peer))
        argument = number.to_bytes(4, "little") + bytes(CALL_SIZE_BYTES)
        self.send(encode_outgoing_rpc(self.peer, TOLD, RpcType.FORK, argument))

    def feed(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.socket.sendall(encode_outgoing_rpc("", FORWARD, RpcType.IMPULSE, number.to_bytes(4, "little")))
        self.until(lambda: len(self.state["forwarded"]) == last)


def limit_memory(registry: Registry, name: str, memory_mib: int = 1) -> None:
    """Limit the memory for messages to one peer; further ones are spilled to the log."""
    with registry.path(name).open("a") as file:
        file.write(f"\n[tuning]\npeer_buffer_mib_max = {memory_mib}\n")
