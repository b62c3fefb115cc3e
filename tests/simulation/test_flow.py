"""Loops under full load, with windows and memory as small as can be: nothing waits for itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from protocol.messages import decode_incoming_rpc
from tests.simulation.world import METHOD_TICK, TINY, SimulatedApp, World

METHOD_RING = 9
HOPS = 9

SMALLEST = replace(
    TINY,
    group_size_bytes=1,
    output_memory_bytes=1,
    spill_row_bytes=1,
    peer_window_bytes=1,
    peer_window_frames=1,
    peer_frame_bytes=1,
    receive_budget_bytes=1,
    grant_bytes_min=1,
    app_window_bytes=1,
    read_size_bytes=1,
)


class RingApp(SimulatedApp):
    """Each tick also sends two messages around: to oneself and to the next instance in turn."""

    def _call(self, data: bytes) -> None:
        super()._call(data)
        rpc = decode_incoming_rpc(data)
        if rpc.method_id == METHOD_TICK:
            for number in (2 * self.state["ticks"], 2 * self.state["ticks"] + 1):
                self._send("", METHOD_RING, [self.name, number, HOPS])
        elif rpc.method_id == METHOD_RING:
            origin, number, hops = json.loads(rpc.arguments)
            self.state.setdefault("ring", []).append([origin, number, hops])
            if hops:
                names = self.world.names
                following = names[(names.index(self.name) + 1) % len(names)]
                to = "" if hops % 2 == 0 or following == self.name else following
                self._send(to, METHOD_RING, [origin, number, hops - 1])


class RingWorld(World):
    app_type = RingApp

    def done(self) -> bool:
        return super().done() and len(self._ring()) == len(self.names) * self.tick_count * 2 * (HOPS + 1)

    def _ring(self) -> list[list[object]]:
        return [entry for node in self.nodes.values() if node.app for entry in node.app.state.get("ring", [])]

    def check(self) -> None:
        super().check()
        ring = self._ring()
        assert len({tuple(entry) for entry in ring}) == len(ring), "one was executed twice"


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")], ids=["self-calls", "a cycle of three"])
@pytest.mark.parametrize("spill_limit_bytes", [0, 400])
@pytest.mark.parametrize("crash_rate", [0.0, 0.003])
def test_a_loop_under_full_load_goes_on(names: tuple[str, ...], spill_limit_bytes: int, crash_rate: float) -> None:
    for seed in range(3):
        limits = replace(SMALLEST, spill_limit_bytes=spill_limit_bytes)
        world = RingWorld(seed, names=names, tick_count=5, crash_rate=crash_rate, loss_rate=0.05, limits=limits)
        world.run()
        world.check()
