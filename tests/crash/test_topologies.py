"""docs/patterns/topologies.md as it is typed: its commands are run, with other places, and machines are lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.instances.registry import free_port
from tests.helpers.postgres import Postgres, binaries, user_of_servers
from tests.soak.service import SoakError, wait_for

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "patterns" / "topologies.md"
WAIT_S = 180.0
SHOP = """
from immortal import Immortal, rpc

class Shop(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def sell(self) -> int:
        self.sold += 1
        return self.sold
"""


def blocks(title: str) -> list[list[str]]:
    """The commands below a title, block by block."""
    text = GUIDE.read_text()
    section = text[text.index(f"## {title}\n") :].partition("\n## ")[0]
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


class Machine:
    """One on which commands are typed. ``places``: what stands for what in them."""

    def __init__(self, folder: Path, places: dict[str, str], user: str | None = None, **environment: str) -> None:
        self.folder, self._places, self._user = folder, places, user
        folder.mkdir(mode=0o755)
        (folder / "shop.py").write_text(SHOP)
        (folder / "immortal").write_text(f'#!/bin/sh\nexec {sys.executable} -m immortal "$@"\n')
        (folder / "immortal").chmod(0o755)
        path = f"{folder}:{binaries()}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), **environment}
        self.runs: list[subprocess.Popen[bytes]] = []
        self.output = folder / "output"
        self.output.touch()
        if user is not None:
            shutil.chown(folder, user)
            shutil.chown(self.output, user)

    def type(self, lines: list[str]) -> None:
        for line in lines:
            for shown, place in self._places.items():
                line = line.replace(shown, place)
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                self.environment[name] = value
            elif line.startswith("immortal run"):
                with self.output.open("ab") as output:
                    self.runs.append(self._process(f"exec {line}", output))
            else:
                with self.output.open("ab") as output:
                    status = self._process(line, output).wait(WAIT_S)
                assert status == 0, f"{line}: status {status}\n{self.said()}"

    def _process(self, line: str, output: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            user=self._user,
            stdin=subprocess.DEVNULL,
            stdout=output,  # type: ignore[arg-type]
            stderr=output,  # type: ignore[arg-type]
        )

    def asks(self, line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            user=self._user,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        return done.stdout + (done.stderr if done.returncode else "")

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def lose(self) -> None:
        """All that runs there ends at once: a supervisor's children die with it."""
        for run in self.runs:
            run.kill()
            run.wait()
        self.runs.clear()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of short paths, which the servers' user may enter."""
    made = Path(tempfile.mkdtemp(prefix="top-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made: list[Machine] = []
    yield made
    for machine in made:
        machine.lose()


def until(what: str, machines: list[Machine], *lines: str) -> None:
    """The output of one of the machines has all ``lines``."""

    def holds() -> bool:
        return any(all(line in machine.said() for line in lines) for machine in machines)

    with contextlib.suppress(SoakError):
        wait_for(holds, lambda: what, WAIT_S)
        return
    raise AssertionError("\n".join([f"not within {WAIT_S:g} s: {what}", *(machine.said() for machine in machines)]))


def answers(machine: Machine, wanted: str) -> None:
    """A call there, made again until it is answered."""
    wait_for(lambda: machine.asks("immortal call shop sell").strip() == wanted, machine.said, WAIT_S)


def has_caught_up(machine: Machine) -> None:
    """Who follows, as the instance on ``machine`` knows it."""
    ready = '"ready":true'
    wait_for(lambda: ready in machine.asks("immortal status shop --json").replace(" ", ""), machine.said, WAIT_S)


def port() -> str:
    return str(free_port(("127.0.0.1",), set()))


@pytest.mark.timeout(400)
def test_one_machine(folder: Path, machines: list[Machine]) -> None:
    machine = Machine(folder / "one", {":7001": f":{port()}"})
    machines.append(machine)
    ((register, first, second),) = blocks("One machine")
    machine.type([register, first])
    until("it runs", machines, "ready")
    machine.type([second])
    until("the other one follows", machines, "following ")
    answers(machine, "1")
    machine.runs.pop(0).kill()
    answers(machine, "2")
    assert "taking over" in machine.said()


@pytest.mark.timeout(400)
def test_two_machines_with_one_database(folder: Path, machines: list[Machine], postgres: Postgres) -> None:
    url = postgres.url(database="topologies")
    postgres.execute("CREATE DATABASE topologies")
    try:
        places = {
            "postgresql://immortal@db.example/immortal": url,
            "10.0.0.1:7001": f"127.0.0.1:{port()}",
            "10.0.0.2:7001": f"127.0.0.1:{port()}",
        }
        first, second = (Machine(folder / name, places) for name in ("one", "two"))
        machines += [first, second]
        on_first, on_second, move = blocks("Two machines, one database")
        first.type(on_first)
        assert "commits wait for no standby" in first.said()
        until("it runs", [first], "ready")
        second.type(on_second)
        until("the second one follows", [second], "following ")
        answers(first, "1")
        wait_for(
            lambda: '"ready":true' in first.asks("immortal status shop --json").replace(" ", ""), first.said, WAIT_S
        )
        first.type(move)
        until("it is told where it is", [first], "now runs on")
        answers(second, "2")
        until("the first one follows", [first], "following ")
        second.lose()
        answers(first, "3")
    finally:
        for machine in machines:
            machine.lose()
        postgres.execute("DROP DATABASE topologies WITH (FORCE)")


@pytest.mark.timeout(600)
def test_three_zones(folder: Path, machines: list[Machine]) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed: 'scripts/setup dev' does it")
    if binaries() is None:
        pytest.skip("there is no PostgreSQL 15 or newer: 'apt-get install postgresql'")
    user, ports = user_of_servers(), {name: port() for name in ("a", "b", "c")}
    hosts = f"host={','.join(['127.0.0.1'] * 3)} port={','.join(ports.values())}"
    places = {
        "host=db-a,db-b,db-c": hosts,
        "@db-a,db-b,db-c": f"@{','.join(f'127.0.0.1:{number}' for number in ports.values())}",
        "10.0.1.1:7001": f"127.0.0.1:{port()}",
        "10.0.2.1:7001": f"127.0.0.1:{port()}",
        'pg_ctl start -D "$PGDATA"': 'pg_ctl start -w -D "$PGDATA" -l log',
    }
    databases = {
        name: Machine(
            folder / f"db-{name}",
            places,
            user,
            PGDATA=str(folder / f"db-{name}" / "data"),
            PGHOST="127.0.0.1",
            PGPORT=number,
            PGUSER="postgres",
        )
        for name, number in ports.items()
    }
    on_primary, on_standby, on_first, on_second, promotion = blocks("Three zones")
    try:
        primary = databases["a"]
        primary.type(["initdb -U postgres -A trust -E UTF8 --no-locale"])
        with (folder / "db-a" / "data" / "postgresql.conf").open("a") as file:
            file.write("unix_socket_directories = ''\nwal_retrieve_retry_interval = 200ms\n")
        primary.type(['pg_ctl start -D "$PGDATA"', "createuser immortal", "createdb --owner immortal immortal"])
        primary.type(on_primary)
        for name in ("b", "c"):
            databases[name].type([line.replace("db_b", f"db_{name}") for line in on_standby])
        streaming = "psql -Atc \"SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'\""
        wait_for(lambda: primary.asks(streaming).strip() == "2", lambda: primary.asks(streaming), WAIT_S)
        first, second = (Machine(folder / name, places) for name in ("one", "two"))
        machines += [first, second]
        first.type(on_first)
        until("it runs", [first], "ready")
        second.type(on_second)
        until("the second one follows", [second], "following ")
        answers(first, "1")
        doctor = first.asks("immortal doctor shop")
        assert "the server's disk is lost: nothing" in doctor, doctor
        wait_for(
            lambda: '"ready":true' in first.asks("immortal status shop --json").replace(" ", ""), first.said, WAIT_S
        )
        first.lose()  # and the zone's database with it
        primary.type(['pg_ctl stop -m immediate -D "$PGDATA"'])
        received = "psql -Atc \"SELECT pg_last_wal_receive_lsn() - '0/0'\""
        newest = max((databases["b"], databases["c"]), key=lambda one: int(one.asks(received)))
        newest.type(promotion)
        answers(second, "2")
    finally:
        for machine in machines:
            machine.lose()
        for database in databases.values():
            postmaster = database.folder / "data" / "postmaster.pid"
            if postmaster.exists():
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(postmaster.read_text().splitlines()[0]), signal.SIGQUIT)
