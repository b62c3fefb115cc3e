"""Calls of 200 MiB between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.coordinator.peers import keys
from immortal.protocol.messages import RpcType, encode_attach_to, encode_outgoing_rpc
from tests.helpers.effort import effort
from tests.helpers.processes import TOLD, House

SIZE_BYTES = 200 << 20


@pytest.mark.slow
def test_a_peer_that_gets_calls_of_200_mib_is_connected(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.register("alice", rpc_limit_mb=200)
    house.register("bob")
    for one in ("alice", "bob"):
        keys.create(house.settings(one).folder)
    try:
        bob, bobs = house.both("bob")
        alice, alices = house.both("alice")
        alices.send(encode_attach_to("bob"))
        numbers = list(range(1, 1 + effort(1)))
        for number in numbers:
            argument = number.to_bytes(4, "little")
            alices.send(encode_outgoing_rpc("bob", TOLD, RpcType.FORK, argument + bytes(SIZE_BYTES - 4)))
        bobs.until(lambda: bobs.state["told"] == numbers)
        for process in (alice, bob):
            assert not process.count("no connection to"), process.lines
            assert not process.count("without an end"), process.lines
    finally:
        house.close()
