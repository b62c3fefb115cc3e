"""Checkpoints that are far larger than what a coordinator may hold: taken, kept, and given back in pieces.

IMMORTAL_TEST_CHECKPOINT_MIB=5200 tries one of more than 4 GiB; it needs that much disk three times over.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.operator import control
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import MessageType, decode_messages, encode_checkpoint
from immortal.protocol.readers import BlobData, BlobStart, RecordReader
from tests.helpers.processes import FORWARD, CoordinatorProcess, House

MIB = 1 << 20
SIZE_MIB = int(os.environ.get("IMMORTAL_TEST_CHECKPOINT_MIB", "256"))
MEMORY_MIB_MAX = 64  # of its own; pages of the mapped log are the system's, and go when they are wanted
PIECE = bytes(MIB - 8)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def pieces() -> Iterator[bytes]:
    for index in range(SIZE_MIB):
        yield index.to_bytes(8, "little") + PIECE


def own_memory_mib(process: CoordinatorProcess) -> float:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


def received_blob(connection: socket.socket, process: CoordinatorProcess) -> tuple[int, int, float]:
    """(size in bytes, CRC, the most memory seen) of the blob that a recovering coordinator sends."""
    reader = RecordReader()
    size_bytes = check = 0
    peak_mib = 0.0
    while True:
        data = connection.recv(1 << 20)
        assert data, "the coordinator closed the connection"
        reader.receive_data(data)
        while (event := reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                assert event.size_bytes == SIZE_MIB * MIB
            elif isinstance(event, BlobData):
                if event.data and size_bytes // (16 * MIB) != (size_bytes + len(event.data)) // (16 * MIB):
                    peak_mib = max(peak_mib, own_memory_mib(process))
                size_bytes += len(event.data)
                check = crc64(event.data, check)
            else:
                types = [message_type for message_type, _, _ in decode_messages(event.content)]
                if MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT in types:
                    return size_bytes, check, peak_mib


@pytest.mark.timeout(120 if SIZE_MIB <= 1024 else 1800)
@pytest.mark.usefixtures("started_anew")
def test_a_checkpoint_of_any_size_passes_through_little_memory(house: House) -> None:
    house.register("big", "small")
    big, app = house.both("big")
    _, other = house.both("small", peer="big")
    big.until(lambda status: status["phase"] == "normal")
    app.gives_checkpoints = False
    control.query(big.settings.folder, "checkpoint")
    app.until(lambda: MessageType.TAKE_CHECKPOINT in app.types)
    before = big.status()["sequence_id"]
    app.socket.settimeout(60)
    app.send(encode_checkpoint(SIZE_MIB * MIB))
    peak_mib, check = 0.0, 0
    for index, piece in enumerate(pieces()):
        app.socket.sendall(piece)
        check = crc64(piece, check)
        if index == SIZE_MIB // 2:
            # In the middle of the blob the input of others is accepted and logged.
            other.impulse(1, FORWARD)
            other.until(lambda: other.state["forwarded"] == [1])
            big.until(lambda status: status["sequence_id"] > before and status["phase"] == "taking a checkpoint")
        if index % 16 == 0:
            peak_mib = max(peak_mib, own_memory_mib(big))
    taken = big.until(lambda status: status["checkpoint"]["id"] == 2)
    assert taken["checkpoint"]["size_bytes"] == SIZE_MIB * MIB
    app.close()
    big.kill()

    again = house.start("big")
    connection = socket.create_connection(("127.0.0.1", big.settings.app_port), 60)
    try:
        size_bytes, received_check, peak_back_mib = received_blob(connection, again)
    finally:
        connection.close()
    assert (size_bytes, received_check) == (SIZE_MIB * MIB, check)
    assert max(peak_mib, peak_back_mib) < MEMORY_MIB_MAX, (peak_mib, peak_back_mib)
    print(f"{SIZE_MIB} MiB: own memory at most {peak_mib:.0f} MiB taking it, {peak_back_mib:.0f} MiB giving it back")
