"""Real coordinator processes, spoken to over real sockets: what apps and operators rely on."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.log import format as log_format
from immortal.coordinator.operator import control
from immortal.coordinator.service.process import STATUS_NO_RECOVERY
from immortal.log import create_log, open_log
from immortal.protocol.extensions import encode_app_batch
from immortal.protocol.messages import (
    MessageType,
    RpcType,
    encode_attach_to,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from tests.helpers.processes import BASE_TYPES, FORWARD, TOLD, House, SocketApp

KINDS = pytest.mark.parametrize("extended", [False, True], ids=["base", "extended"])


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


# --- the ordinary life -----------------------------------------------------------------------------------------------


@KINDS
def test_a_first_start_and_a_recovery(house: House, extended: bool) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=extended)
    for number in (1, 2, 3):
        app.impulse(number)
    app.until(lambda: app.state["forwarded"] == [1, 2, 3])
    status = process.until(lambda status: status["phase"] == "normal" and not status["backlog_records"])
    assert (status["name"], status["epoch"], status["pid"]) == ("alice", 1, process.process.pid)
    assert status["unsent_bytes"] == 0
    assert status["app_silent_s"] == 0
    app.close()
    process.line("the app disconnected; waiting for the next one")
    again = house.app("alice", extended=extended).ready()
    assert again.restored_from == {"sequence_id": -1, "begun": False, "forwarded": [], "told": []}
    assert again.state["forwarded"] == [1, 2, 3]
    process.line("recovered")
    assert process.until(lambda status: status["phase"] == "normal")["epoch"] == 2
    if not extended:
        assert app.types | again.types <= BASE_TYPES
    else:
        assert {MessageType.RECORD_TIME, MessageType.IMPULSES_ACCEPTED} <= app.types


@KINDS
def test_calls_between_two_instances(house: House, extended: bool) -> None:
    house.register("alice", "bob")
    _, bob = house.both("bob", extended=extended)
    process, alice = house.both("alice", peer="bob", extended=extended)
    numbers = list(range(1, 201))
    for number in numbers:
        alice.impulse(number)
    alice.until(lambda: alice.state["forwarded"] == numbers)
    bob.until(lambda: len(bob.state["told"]) == len(numbers))
    assert bob.state["told"] == numbers
    output = process.until(lambda status: status["outputs"]["bob"]["acknowledged"] == 200)["outputs"]["bob"]
    assert (output["position"], output["waiting_bytes"], output["state"]) == (200, 0, "open")


@KINDS
@pytest.mark.parametrize("victim", ["alice", "bob"])
def test_a_killed_coordinator_recovers_and_nothing_is_lost_or_doubled(
    house: House, victim: str, extended: bool
) -> None:
    house.register("alice", "bob")
    bob_process, bob = house.both("bob", extended=extended)
    alice_process, alice = house.both("alice", peer="bob", extended=extended)
    for number in range(1, 101):
        alice.impulse(number)
    if victim == "alice":
        bob.until(lambda: len(bob.state["told"]) >= 40)
        alice_process.kill()
        alice.until_closed()
        alice_process, alice = house.both("alice", peer="bob", extended=extended)
        alice.until(lambda: alice.state["sequence_id"] >= alice_process.status()["sequence_id"])
        done = alice.state["forwarded"]
        assert done == list(range(1, len(done) + 1)), "impulses that were not told as accepted are cut at the end only"
        assert len(done) >= 40
    else:
        alice.until(lambda: len(alice.state["forwarded"]) == 100)
        bob_process.kill()
        bob.until_closed()
        bob_process, bob = house.both("bob", extended=extended)
        done = list(range(1, 101))
    for number in range(len(done) + 1, 121):
        alice.impulse(number)
    bob.until(lambda: len(bob.state["told"]) >= 120)
    alice.until(lambda: len(alice.state["forwarded"]) == 120)
    alice_process.until(lambda status: status["outputs"]["bob"]["acknowledged"] == 120)
    assert bob.state["told"] == list(range(1, 121))


def test_an_app_whose_peer_is_down_is_slowed_and_loses_nothing(house: House) -> None:
    house.register("alice", "bob", spill_limit_mb=0)
    with house.registry.path("alice").open("a") as file:
        file.write("[tuning]\npeer_buffer_mib_max = 1\n")
    process, alice = house.both("alice", peer="bob")
    alice.send(encode_attach_to("bob"))
    told = 0
    alice.socket.setblocking(False)
    pending = b""
    while told < 300:  # 30 MB; the sockets hold a few
        pending = pending or encode_outgoing_rpc("bob", TOLD, 1, told.to_bytes(4, "little") + bytes(100_000))
        if not select.select([], [alice.socket], [], 1)[1]:
            break
        pending = pending[alice.socket.send(pending) :]
        told += not pending
    assert told < 200, "the app was never slowed"
    assert process.status()["outputs"]["bob"]["waiting_bytes"] < 3 << 20
    _, bob = house.both("bob")
    alice.socket.setblocking(True)
    alice.send(pending)
    told += bool(pending)
    bob.until(lambda: len(bob.state["told"]) == told)
    assert bob.state["told"] == list(range(told))


def test_what_was_accepted_survives_a_kill(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=True)
    for number in range(1, 51):
        app.impulse(number)
    app.until(lambda: app.accepted >= 20)
    process.kill()
    _, again = house.both("alice", extended=True)
    again.until(lambda: len(again.state["forwarded"]) >= app.accepted)
    assert again.state["forwarded"] == list(range(1, len(again.state["forwarded"]) + 1))


@KINDS
def test_sigterm_takes_a_checkpoint_and_ends_with_status_0(house: House, extended: bool) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=extended)
    app.impulse(7)
    app.until(lambda: app.state["forwarded"] == [7])
    process.terminate()
    app.until_closed()
    status, lines = process.ended()
    assert status == 0, lines
    assert "stopped" in lines[-1]
    assert app.goodbye == ("the coordinator was asked to stop" if extended else "")
    assert control.running(process.settings.folder) is None
    _, again = house.both("alice", extended=extended)
    assert again.restored_from == {"sequence_id": 1, "begun": True, "forwarded": [7], "told": []}


def test_sigterm_without_an_app_or_before_the_first_one(house: House) -> None:
    house.register("alice")
    process = house.start("alice")
    process.terminate()
    assert process.ended()[0] == 0
    process, app = house.both("alice")
    app.close()
    process.line("the app disconnected")
    process.terminate()
    assert process.ended()[0] == 0


def test_a_second_sigterm_does_not_wait_for_the_app(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    app.gives_checkpoints = False
    process.terminate()
    app.until(lambda: MessageType.TAKE_CHECKPOINT in app.types)
    process.terminate()  # of the same moment: no second wish
    while process.process.poll() is None:
        process.terminate()
        select.select([], [], [], 0.05)
    assert process.ended()[0] == 0
    assert process.count("stopping without one: the log has everything") == 1


def test_checkpoint_sizes_of_fixed_width(house: House) -> None:
    # Clients written in C send 8 bytes.
    house.register("alice")
    process, app = house.both("alice", fixed_width=True)
    app.impulse(7)
    app.until(lambda: app.state["forwarded"] == [7])
    assert control.query(process.settings.folder, "checkpoint") == {"asked": True}
    app.until(lambda: MessageType.TAKE_CHECKPOINT in app.types)
    process.line("checkpoint taken", count=2)
    app.close()
    process.line("the app disconnected")
    again = house.app("alice", fixed_width=True).ready()
    assert again.restored_from == {"sequence_id": 1, "begun": True, "forwarded": [7], "told": []}


# --- apps that do wrong ----------------------------------------------------------------------------------------------


def test_an_app_that_leaves_in_the_middle_of_a_message(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    app.impulse(1)
    app.send(encode_outgoing_rpc("", FORWARD, 2, (2).to_bytes(4, "little"))[:-1])
    app.until(lambda: app.state["forwarded"] == [1])
    app.close()
    process.line("the app disconnected; waiting for the next one")
    assert process.count("the app's connection ended in the middle of a message; that message is dropped") == 1
    again = house.app("alice").ready()
    assert again.state["forwarded"] == [1]
    again.impulse(3)
    again.until(lambda: again.state["forwarded"] == [1, 3])


@KINDS
@pytest.mark.parametrize("nonsense", [b"\x00", b"\xff" * 20, encode_message(3), b"GET / HTTP/1.1\r\n\r\n"])  # type: ignore[arg-type]
def test_an_app_that_speaks_nonsense(house: House, nonsense: bytes, extended: bool) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=extended)
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    app.send(nonsense)
    if nonsense.startswith(b"GET"):
        app.send(bytes(200))
    app.until_closed()
    line = process.line("the app broke the protocol")
    assert "its connection is closed, nothing logged is lost" in line
    assert process.count(" error ") == 1
    assert bool(app.refusal) is extended
    again = house.app("alice", extended=extended).ready()
    assert again.state["forwarded"] == [1]
    assert process.count("in the middle of a message") == 0


def test_a_second_app_is_turned_away_and_the_first_goes_on(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    second = house.app("alice").until_closed()
    assert not second.types
    assert process.line("a second app was turned away").endswith("  a second app was turned away: one is connected")
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])


def test_an_app_that_dies_while_it_is_not_read_makes_room_for_the_next(house: House) -> None:
    house.register("alice", "bob", spill_limit_mb=0)  # bob is down: what alice sends it waits
    settings = house.registry.path("alice")
    settings.write_text(settings.read_text() + "\n[tuning]\npeer_buffer_mib_max = 1\n")
    process, app = house.both("alice", peer="bob", extended=True)
    payload = encode_incoming_rpc(TOLD, RpcType.FORK, bytes(600_000))
    app.send(encode_attach_to("bob"))
    for _ in range(3):
        app.send(encode_app_batch(MessageType.STREAM_BATCH, "bob", 1, payload))
    process.until(lambda status: status["outputs"].get("bob", {}).get("waiting_bytes", 0) > 1 << 20)
    app.close()
    process.line("the app disconnected")
    house.app("alice", peer="bob", extended=True).ready()


def test_another_kind_of_app_is_refused(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    app.close()
    process.line("the app disconnected")
    other = house.app("alice", extended=True).until_closed()
    assert "an instance keeps the kind of app that it was begun with" in other.refusal
    house.app("alice").ready()


def test_a_call_to_an_unknown_destination_is_not_lost(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice", peer="carol")
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    assert "there is no instance 'carol'" in process.line("nothing is sent to 'carol', its calls wait")
    app.close()
    process.kill()
    house.register("carol")
    _, carol = house.both("carol")
    house.both("alice", peer="carol")
    carol.until(lambda: carol.state["told"] == [1])


# --- what keeps a coordinator from starting --------------------------------------------------------------------------


def test_a_second_coordinator_on_the_same_log(house: House) -> None:
    house.register("alice")
    first, app = house.both("alice")
    line = house.start("alice", started=False).failed()
    assert f"is in use by process {first.process.pid}" in line
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    assert first.status()["pid"] == first.process.pid, "the second one took the first one's control file away"


@pytest.mark.parametrize("which", ["app", "peer"])
def test_a_port_in_use_is_named(house: House, which: str) -> None:
    house.register("alice")
    settings = house.settings("alice")
    port = settings.app_port if which == "app" else int(settings.peer.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        line = house.start("alice", started=False).failed()
    assert str(port) in line
    assert "use" in line
    house.both("alice")


def test_the_log_folder_of_another_instance(house: House, tmp_path: Path) -> None:
    create_log(tmp_path / "log", "bob").close()
    house.register("alice", log=tmp_path / "log")
    line = house.start("alice", started=False).failed(expected=3)
    assert "belongs to instance 'bob', not to 'alice'" in line


def _write_past_the_store(house: House, name: str, table: str, key: bytes, change: object) -> None:
    store = open_log(house.settings(name).log, name)
    handle = store.backend.tables[table]
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        value = bytes(transaction.get(key, db=handle))
        transaction.put(key, change(value), db=handle)  # type: ignore[operator]
    store.close()


def test_a_log_of_a_newer_format(house: House) -> None:
    house.register("alice")
    create_log(house.settings("alice").log, "alice").close()
    key = log_format.META_FORMAT
    newer = log_format.ENCRYPTED_VERSION + 1
    _write_past_the_store(house, "alice", "meta", key, lambda _: log_format.seal(b"meta", key, newer))
    line = house.start("alice", started=False).failed(3)
    assert f"has format version {newer}, this program reads version {log_format.ENCRYPTED_VERSION}" in line


def test_a_log_of_another_instance_is_refused_for_good(house: House) -> None:
    house.register("alice", "bob")
    create_log(house.settings("bob").log, "alice").close()
    assert "belongs to instance 'alice', not to 'bob'" in house.start("bob", started=False).failed(STATUS_NO_RECOVERY)


@pytest.mark.parametrize("damaged", [3, 5], ids=["in the middle", "at the end"])
def test_a_damaged_record_is_named(house: House, damaged: int) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=True)
    for number in range(1, 6):
        app.impulse(number)
        app.until(lambda: len(app.state["forwarded"]) == number)  # noqa: B023
    process.kill()
    key = struct.pack(">Q", damaged)
    _write_past_the_store(
        house, "alice", "records", key, lambda value: value[:40] + bytes((value[40] ^ 1,)) + value[41:]
    )
    process = house.start("alice")
    app = house.app("alice", extended=True).until_closed()
    assert f"record {damaged} is damaged" in process.failed(STATUS_NO_RECOVERY)
    assert app.state["sequence_id"] < damaged, "the damaged record reached the app"


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    process.terminate()
    app.until_closed()
    assert process.ended()[0] == 0
    key = log_format.CHUNK_KEY.pack(2, 0)
    _write_past_the_store(house, "alice", "chunks", key, lambda value: value[:-1] + bytes((value[-1] ^ 1,)))
    process, app = house.both("alice")
    assert "checkpoint 2 is damaged" in process.line("falling back to the one before")
    assert app.restored_from == {"sequence_id": -1, "begun": False, "forwarded": [], "told": []}
    assert app.state["forwarded"] == [1]


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _send_until_refused(app: SocketApp, padding: int) -> None:
    app.socket.setblocking(True)
    number = 0
    while not app.closed:
        number += 1
        try:
            app.impulse(number, TOLD, padding)
        except OSError:
            return
        app.until(lambda: app.closed or app.accepted >= number)  # noqa: B023


@pytest.mark.parametrize("padding", [1000, 100_000], ids=["inline", "on the thread"])
def test_a_full_disk_stops_it_and_nothing_accepted_is_lost(house: House, small_disk: Path, padding: int) -> None:
    house.register("alice", log=small_disk / "log")
    process, app = house.both("alice", extended=True)
    _send_until_refused(app, padding)
    line = process.failed()
    assert f"the disk of the log folder {small_disk / 'log'} is full" in line
    assert "make room, then start again" in line
    assert "is full" in app.refusal
    assert app.accepted > 5
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    process, again = house.both("alice", extended=True)
    told = again.state["told"]
    assert len(told) >= app.accepted
    assert told == list(range(1, len(told) + 1))
    again.impulse(number := len(told) + 1, TOLD)
    again.until(lambda: again.state["told"][-1] == number)
