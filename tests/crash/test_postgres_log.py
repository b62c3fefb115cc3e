"""An instance whose log is in PostgreSQL, as processes: it is killed, it sleeps, and its server restarts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.instances.registry import Registry, free_port
from immortal.coordinator.operator import control
from immortal.log import open_reader
from tests.helpers.cli import Run, immortal
from tests.helpers.counting import CALLS, WAIT_S, House
from tests.helpers.postgres import Postgres


@pytest.fixture
def house(postgres: Postgres, tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, postgres.url() + f"#{tmp_path.name}")
    yield house
    for run in house.runs:
        run.stop()


def follower_status(house: House) -> dict[str, Any]:
    return control.query(house.registry.load("counter").folder / "followers" / "1", "status")


def another_machine(house: House) -> House:
    """The same instance with a home of its own, as on a machine of its own: with the same keys, and its own address."""
    home = house.home / "elsewhere"
    home.mkdir()
    other = House.__new__(House)
    other.home, other.registry, other.runs = home, Registry(home), house.runs
    settings = (house.home / "counter.toml").read_text()
    port = free_port(("127.0.0.1",), set())
    (home / "counter.toml").write_text(re.sub(r"127\.0\.0\.1:[0-9]+", f"127.0.0.1:{port}", settings))
    (home / "counter").mkdir(mode=0o700)
    shutil.copytree(house.home / "counter" / "keys", home / "counter" / "keys")
    shutil.copy(house.home / "counter" / "public_keys", home / "counter")
    shutil.copy(house.home / "counting.py", home)
    return other


def all_is_counted(house: House) -> None:
    house.until(lambda: house.call("feeder", "totals")[:2] == [CALLS, CALLS], "all calls are answered")
    assert house.call("feeder", "totals")[2] == 0
    assert house.call("counter", "totals") == [CALLS, 0]


def test_who_cannot_have_the_log_follows_and_takes_over_under_load(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    second = house.run("counter")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    house.until(lambda: follower_status(house)["phase"] == "following", "the second one follows")
    assert second.said("following")
    first.kill()
    house.until(lambda: second.said("recovered"), "it takes over")
    all_is_counted(house)
    assert house.status("counter")["role"] == "writing"
    assert second.stop() == 0


def caught_up(house: House, *others: House) -> None:
    """Somebody follows who could take over at once, and who has the instance knows it."""
    houses = (house, *others)

    def is_known() -> bool:
        for one in houses:
            with contextlib.suppress(control.ControlError):
                status = one.status("counter")
                return any(standby["ready"] for standby in status["standbys"])
        return False

    house.until(is_known, "a standby has caught up")


def test_a_clean_stop_hands_over_to_who_follows_without_a_checkpoint(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    second = house.run("counter")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    caught_up(house)
    before = house.status("counter")["checkpoint"]["id"]
    stopped = house.immortal("stop", "counter")
    assert stopped.returncode == 0, stopped
    assert f"counter is stopped here, and now runs on {socket.gethostname()} (process " in stopped.stdout
    assert first.process.wait(WAIT_S) == 0
    house.until(lambda: second.said("recovered"), "it goes on")
    all_is_counted(house)
    taken = [line for line in first.lines if line["message"] == "checkpoint taken"]
    assert [line["checkpoint"] for line in taken] == [before], "none was taken for the stop"
    third = house.run("counter")
    caught_up(house)
    assert second.stop() == 0
    house.until(lambda: third.said("recovered"), "at the address of one that had followed itself")
    assert house.call("counter", "totals") == [CALLS, 0]
    assert third.stop() == 0, "nobody follows any more: this one stops as ever"
    assert third.said("checkpoint taken")


def test_an_instance_migrates_there_and_back_under_load(house: House) -> None:
    first = house.run("counter", "counting:Counter", "--restart")
    house.until(lambda: first.said("ready"), "the first one is up")
    elsewhere = another_machine(house)
    second = elsewhere.run("counter", "counting:Counter", "--restart")
    with (house.home / "feeder.toml").open("a") as file:
        file.write(f'\n[peers]\ncounter = "{house.registry.load("counter").log}"\n')
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    caught_up(house)
    (standby,) = house.status("counter")["standbys"]
    nobody = house.immortal("migrate", "counter", "--to", "nowhere")
    assert nobody.returncode == 1
    assert f"'nowhere' does not follow its log; who does: {standby['name']}" in nobody.stderr
    there = house.immortal("migrate", "counter", "--to", socket.gethostname())
    assert there.returncode == 0, there
    assert f"counter now runs on {standby['name']}, at {elsewhere.registry.load('counter').peer}" in there.stdout
    house.until(lambda: second.said("recovered"), "it works there")
    assert first.said("handed over")
    house.until(lambda: first.said("another process writes its log by now; it follows from now on"), "so it is said")
    assert not first.said("died")
    peers = [one.registry.load("counter").peer for one in (house, elsewhere)]
    house.until(lambda: house.status("feeder")["outputs"]["counter"]["endpoint"] == peers[1], "its caller follows it")
    not_here = house.immortal("migrate", "counter")
    assert not_here.returncode == 1
    assert f"{standby['name']} has it" in not_here.stderr
    caught_up(elsewhere)
    (standby,) = elsewhere.status("counter")["standbys"]
    back = elsewhere.immortal("migrate", "counter", "--json")
    assert back.returncode == 0, back
    assert json.loads(back.stdout) == {
        "name": "counter",
        "to": standby["name"],
        "peer": house.registry.load("counter").peer,
    }
    house.until(lambda: house.status("counter")["role"] == "writing", "it is back")
    house.until(lambda: house.status("feeder")["outputs"]["counter"]["endpoint"] == peers[0], "and its caller, too")
    all_is_counted(house)


NEXT = """
from __future__ import annotations

import counting
from immortal import Immortal, peer, rpc, upgrades


@upgrades(counting.Counter)
class Counter(Immortal):
    seen: int
    wrong: int

    def __init__(self) -> None:
        self.seen = self.wrong = 0

    @classmethod
    def upgrade(cls, old: counting.Counter) -> Counter:
        new = cls()
        new.seen, new.wrong = old.seen, old.wrong
        return new

    @rpc
    def add(self, number: int) -> None:
        self.wrong += number != self.seen + 1
        self.seen += 1
        self.feeder.noted.fork(number)

    @rpc
    def totals(self) -> tuple[int, int]:
        return self.seen, self.wrong

    feeder = peer(lambda: counting.Feeder, "feeder")
"""


def test_a_standby_with_the_next_version_follows_and_is_upgraded_as_it_takes_over(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    elsewhere = another_machine(house)
    (elsewhere.home / "next.py").write_text(NEXT)
    shutil.copy(house.home / "feeder.toml", elsewhere.home)
    (elsewhere.home / "feeder").mkdir(mode=0o700)
    shutil.copy(house.home / "feeder" / "public_keys", elsewhere.home / "feeder")
    asked = elsewhere.immortal("upgrade", "counter", "next:Counter", "--to", "2")
    assert asked.returncode == 0, asked
    second = elsewhere.run("counter")
    with (house.home / "feeder.toml").open("a") as file:
        file.write(f'\n[peers]\ncounter = "{house.registry.load("counter").log}"\n')
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    caught_up(house)
    assert (house.status("counter")["version"], second.said("upgraded")) == (1, False)
    moved = house.immortal("migrate", "counter")
    assert moved.returncode == 0, moved
    house.until(lambda: second.said("upgraded"), "it is upgraded")
    assert not second.said("ready") or elsewhere.status("counter")["version"] == 2
    house.until(lambda: house.call("feeder", "totals")[:2] == [CALLS, CALLS], "all calls are answered")
    assert house.call("feeder", "totals")[2] == 0
    assert elsewhere.call("counter", "totals") == [CALLS, 0]
    assert "version 2; no upgrade is requested" in elsewhere.immortal("upgrade", "counter").stdout
    with open_reader(house.registry.load("counter").log) as reader:
        assert [start.version for start in reader.summary().versions] == [1, 2]
    assert second.stop() == 0


def test_an_instance_that_nobody_follows_stays_where_it_is(house: House) -> None:
    run = house.run("counter", "counting:Counter")
    house.until(lambda: run.said("ready"), "it is up")
    refused = house.immortal("migrate", "counter")
    assert refused.returncode == 1
    assert "nobody follows its log: 'immortal run' it on another machine first" in refused.stderr
    assert house.call("counter", "totals") == [0, 0]
    run.kill()
    refused = house.immortal("migrate", "counter")
    assert refused.returncode == 1
    assert "'counter' does not run here, so nothing can be handed over" in refused.stderr


@pytest.mark.parametrize("calls", ["calls come", "no calls"])
def test_a_coordinator_that_slept_while_another_took_over_is_fenced(house: House, calls: str) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    if calls == "calls come":
        house.run("feeder", "counting:Feeder")
        house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    elsewhere = another_machine(house)
    second = elsewhere.run("counter", "counting:Counter")
    house.until(lambda: follower_status(elsewhere)["phase"] == "following", "the second one follows")
    sleeper = house.status("counter")["pid"]
    os.kill(sleeper, signal.SIGSTOP)
    try:
        house.until(lambda: second.said("recovered"), "the lease has run out, and it takes over")
        house.until(lambda: elsewhere.call("counter", "totals")[1] == 0, "it answers")
        seen, _ = elsewhere.call("counter", "totals")
    finally:
        os.kill(sleeper, signal.SIGCONT)
    house.until(lambda: first.process.poll() is not None, "the first one ends by itself")
    assert first.process.returncode == 4
    assert first.said(f"fenced by {socket.gethostname()} (process ")
    if calls == "calls come":
        assert house.status("feeder")["outputs"]["counter"]["acknowledged"] <= seen
    assert elsewhere.call("counter", "totals") == [seen, 0]
    assert second.stop() == 0


def test_a_live_what_if_goes_on_behind_a_takeover_and_a_restart_of_the_server(house: House, postgres: Postgres) -> None:
    source = (house.home / "counting.py").read_text()
    (house.home / "other.py").write_text(
        source.replace("noted.fork(number)", f"noted.fork(-number if number in {{10, {CALLS}}} else number)")
    )
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    command = [sys.executable, "-m", "immortal", "--home", str(house.home), "what-if", "--fleet", "--live", "--json"]
    with open(said := house.home / "shadow.txt", "w") as file:
        shadow = subprocess.Popen([*command, "--change", "counter=other:Counter"], cwd=house.home, stdout=file)
    try:
        house.until(lambda: "from checkpoint" in said.read_text(), "it follows")
        elsewhere = another_machine(house)
        shutil.copy(house.home / "feeder.toml", elsewhere.home)
        (elsewhere.home / "feeder").mkdir(mode=0o700)
        shutil.copy(house.home / "feeder" / "public_keys", elsewhere.home / "feeder")
        second = elsewhere.run("counter", "counting:Counter")
        house.until(lambda: follower_status(elsewhere)["phase"] == "following", "the second one follows")
        with (house.home / "feeder.toml").open("a") as toml:
            toml.write(f'\n[peers]\ncounter = "{house.registry.load("counter").log}"\n')
        house.run("feeder", "counting:Feeder")
        house.until(lambda: "would be Feeder.noted(-10)" in said.read_text(), "a difference is told")
        sleeper = house.status("counter")["pid"]
        os.kill(sleeper, signal.SIGSTOP)
        try:
            house.until(lambda: second.said("recovered"), "the lease has run out, and the second one takes over")
        finally:
            os.kill(sleeper, signal.SIGCONT)
        postgres.stop()
        house.until(lambda: "it is tried again" in said.read_text(), "the log is away")
        postgres.start()
        house.until(lambda: f"would be Feeder.noted(-{CALLS})" in said.read_text(), "the last call is compared")
        house.until(lambda: elsewhere.call("counter", "totals") == [CALLS, 0], "all calls have come")
        shadow.send_signal(signal.SIGINT)
        assert shadow.wait(WAIT_S) == 3
    finally:
        shadow.kill()
        shadow.wait()
    told = [json.loads(line) for line in said.read_text().splitlines()]
    assert [one["text"].rpartition("would be ")[2] for one in told if one["type"] == "difference"] == [
        "Feeder.noted(-10)",
        f"Feeder.noted(-{CALLS})",
    ]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_while_its_server_is_down_an_instance_waits_and_goes_on(
    house: House, postgres: Postgres, how: signal.Signals
) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    postgres.stop(how)
    try:
        house.until(lambda: house.status("counter")["log_silent_s"] is not None, "it says so, and can be asked")
        shown = house.immortal("status", "counter")
        assert "the log has not answered for" in shown.stdout, shown
    finally:
        postgres.start()
    all_is_counted(house)
    assert house.status("counter")["log_silent_s"] is None
    assert first.stop() == 0


def test_an_instance_moves_into_the_database_and_back_and_keeps_its_count(postgres: Postgres, tmp_path: Path) -> None:
    house = House(tmp_path)
    url = f"{postgres.url()}#{tmp_path.name}"
    try:
        run = house.run("counter", "counting:Counter")
        house.until(lambda: run.said("ready"), "it is up")
        house.run("feeder", "counting:Feeder")
        house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
        refused = house.immortal("log", "copy", "counter", "--to", url, "--switch")
        assert refused.returncode == 1
        assert "'counter' runs, as process" in refused.stderr
        for target in (url, str(tmp_path / "moved")):
            run.kill()
            copied = house.immortal("log", "copy", "counter", "--to", target, "--switch")
            assert copied.returncode == 0, copied
            assert ": verified" in copied.stdout
            run = house.run("counter", "counting:Counter")
            house.until(lambda run=run: run.said("ready"), "it goes on from the copy")  # type: ignore[misc]
        assert house.registry.load("counter").log == str(tmp_path / "moved")
        all_is_counted(house)
    finally:
        for one in house.runs:
            one.stop()


LARGE = """
from immortal import Immortal, Impulses, on_primary, rpc

class Large(Immortal):
    state: bytes

    def __init__(self) -> None:
        self.state = b""

    @rpc
    def grow(self, size_bytes: int) -> None:
        self.state += b"x" * size_bytes

    @on_primary
    def say(self, impulses: Impulses) -> None:
        print("large has", len(self.state), flush=True)
"""


def test_a_large_checkpoint_is_in_a_store_and_comes_back_from_there(postgres: Postgres, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    (tmp_path / "large.py").write_text(LARGE)
    store = tmp_path / "objects"
    log = postgres.url("large")
    options = ["--app", "large:Large", "--log", log, "--checkpoints-to", f"file://{store}"]
    immortal(tmp_path, "register", "large", "--peer", "tcp://127.0.0.1:*", *options)
    run = Run(tmp_path, "large", "--restart")
    try:
        run.line("large has 0")
        immortal(tmp_path, "call", "large", "grow", str(5 << 20))
        immortal(tmp_path, "checkpoint", "large")
        assert len([*store.glob("large/*")]) >= 4, "of whole MiB each"
        coordinator = json.loads(immortal(tmp_path, "status", "large", "--json"))["pid"]
        os.kill(coordinator, signal.SIGKILL)
        run.line(f"large has {5 << 20}")
        store.rename(tmp_path / "away")
        store.write_text("no folder")
        immortal(tmp_path, "call", "large", "grow", "1")
        immortal(tmp_path, "checkpoint", "large")
        said = immortal(tmp_path, "status", "large")
        assert f"checkpoints go into the database, in place of file://{store}" in said
        store.unlink()
        (tmp_path / "away").rename(store)
        immortal(tmp_path, "call", "large", "grow", "1")
        immortal(tmp_path, "checkpoint", "large")
        assert "in place of" not in immortal(tmp_path, "status", "large")
        assert "large: sound" in immortal(tmp_path, "log", "verify", "large")
    finally:
        run.kill()


def test_a_standby_takes_the_checkpoints_and_recoveries_begin_there(house: House) -> None:
    with (house.home / "counter.toml").open("a") as file:
        file.write('\ncheckpoints = "on-standby"\n')
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    second = house.run("counter")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    caught_up(house)
    taken = house.immortal("checkpoint", "counter", "--json")
    assert taken.returncode == 0, taken
    assert first.said("checkpoint taken by a standby")
    assert second.said("checkpoint taken for the primary")
    assert not first.said("no standby took"), first.lines
    first.kill()
    house.until(lambda: second.said("recovered"), "the standby takes over")
    second.kill()
    third = house.run("counter")
    house.until(lambda: third.said("ready"), "the next one is up")
    begun = [line for line in third.lines if line["message"] == "recovering"]
    assert begun[0]["checkpoint"] == json.loads(taken.stdout)["id"], "nobody has taken one since"
    all_is_counted(house)
    assert third.stop() == 0
    assert "counter: sound" in house.immortal("log", "verify", "counter").stdout


def test_without_a_standby_the_instance_takes_its_checkpoints(house: House) -> None:
    with (house.home / "counter.toml").open("a") as file:
        file.write('\ncheckpoints = "on-standby"\n')
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "it is up")
    assert house.immortal("checkpoint", "counter").returncode == 0
    assert len([line for line in first.lines if line["message"] == "checkpoint taken"]) == 2
