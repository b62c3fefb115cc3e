"""Measures how long callers wait while an instance whose log is in PostgreSQL moves to another machine.

    python -m scripts.benchmarks.failover --how migrate --runs 50 --state-mib 100

Two `immortal run --restart` run one instance, each with a home of its own, as on two machines. With ``--address own``
each has its own address, with ``shared`` one address moves along, as a virtual one does. Another instance and an
outside client call it all the time, one call after the other. ``migrate`` is the command, ``stop`` a SIGTERM of the
active one, ``kill`` a SIGKILL of its supervisor, coordinator and app. For a kill each machine is a PID namespace (which
needs root), so that nobody sees that the processes are gone. ``upgrade`` starts the other one with the next version of
the app, and migrates once it follows: a rolling upgrade, back and forth between two versions. The result is the longest
time between two answers around each move. A killed instance takes no checkpoint here: its log grows, and with it the
replay of the next follower. Two hundred kills are done fifty at a time, each time with a new log, and are added to the
file.

    python -m scripts.benchmarks.failover --how kill --runs 50 --state-mib 1024 --address own --json kill.json
    python -m scripts.benchmarks.failover --how migrate --runs 200 --state-mib 1024 --address own --json migrate.json
    python -m scripts.benchmarks.failover --report kill.json migrate.json

The last command writes takeovers.md here, which the next ``scripts/bench --report`` takes in.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from immortal.bench.workload import percentile
from immortal.client import connect, start
from immortal.coordinator.instances.registry import free_port
from scripts.benchmarks.machine import ROOT, describe, load_average, prepare_environment
from scripts.benchmarks.report import render
from scripts.benchmarks.rivals.servers import postgres

HOW = {
    "kill": "kill -9 of the machine",
    "migrate": "`immortal migrate`",
    "stop": "SIGTERM",
    "upgrade": "a rolling upgrade",
}


# Two machines, and the instance that moves between them.


WAIT_S = 120.0
SETTLED_S = 1.0  # of calls before and after each move
APPS = "scripts.benchmarks.apps"


class Machine:
    """Machine: a home, and the `immortal run` there."""

    def __init__(self, home: Path, *, alone: bool) -> None:
        self.home = home
        self._alone = alone
        self._command = [sys.executable, "-m", "immortal", "--home", str(home)]
        self.process: subprocess.Popen[bytes] | None = None

    def immortal(self, *arguments: str) -> str:
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def start(self, name: str, app: str, **environment: str) -> None:
        command = [*self._command, "run", name, f"{APPS}:{app}", "--restart"]
        if self._alone:
            named = ["sh", "-c", f'hostname {self.home.name}; exec "$@"', "sh", *command]
            command = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *named]
        with open(self.home / f"{name}.lines", "ab") as lines:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=lines, stderr=lines, env={**os.environ, **environment}
            )

    def end(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            self.process.wait(WAIT_S)


class Answers:
    """Arrival times of a client's answers."""

    def __init__(self, endpoints: list[str], home: Path) -> None:
        self.times_ns: list[int] = []
        self.error: BaseException | None = None
        self._endpoints, self._home = endpoints, home
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with connect("keeper", home=self._home, endpoints=self._endpoints) as keeper:
                while not self._ended:
                    keeper.add()
                    self.times_ns.append(time.monotonic_ns())
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._ended = True
        self._thread.join(WAIT_S)


def longest_ms(times_ns: list[int], since_ns: int, until_ns: int) -> float:
    """Return the longest time in ms between two answers of a period, with the last answer before it."""
    first = max((number for number, at in enumerate(times_ns) if at <= since_ns), default=0)
    times = [at for at in times_ns[first:] if at <= until_ns]
    return max((after - before for before, after in itertools.pairwise(times)), default=0) / 1e6


def wait_until(condition: Callable[[], Any], description: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {WAIT_S:g} s: {description}")
        time.sleep(0.01)


class World:
    def __init__(self, folder: Path, url: str, options: argparse.Namespace) -> None:
        import psycopg

        alone = options.how == "kill"
        self._database = psycopg.connect(url, autocommit=True)
        self._options = options
        self._version = 1  # of the app
        homes = [folder / name for name in ("a", "b", "callers")]
        for home in homes:
            home.mkdir()
        self.machines = [Machine(home, alone=alone) for home in homes[:2]]
        self.callers = Machine(homes[2], alone=False)
        self.answers_path = folder / "answers"
        first = self.machines[0]
        lease = ["--lease-s", str(options.lease_s)]
        first.immortal("register", "keeper", "--peer", "tcp://127.0.0.1:*", "--log", url, *lease)
        self.callers.immortal("register", "asker", "--peer", "tcp://127.0.0.1:*")
        settings = (homes[0] / "keeper.toml").read_text()
        port = re.search(r"127\.0\.0\.1:([0-9]+)", settings)
        assert port is not None
        other = port[1] if options.address == "shared" else str(free_port(("127.0.0.1",), {int(port[1])}))
        (homes[1] / "keeper.toml").write_text(settings.replace(port[0], f"127.0.0.1:{other}"))
        for name in ("keys", "public_keys"):
            source, target = homes[0] / "keeper" / name, homes[1] / "keeper" / name
            target.parent.mkdir(mode=0o700, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        self.endpoints = list(dict.fromkeys([f"tcp://{port[0]}", f"tcp://127.0.0.1:{other}"]))
        self._exchange_keys(homes)
        place = self.endpoints[0] if len(self.endpoints) == 1 else f"{url}#keeper"
        with (homes[2] / "asker.toml").open("a") as file:
            file.write(f'\n[peers]\nkeeper = "{place}"\n')

    def _exchange_keys(self, homes: list[Path]) -> None:
        for home in homes[:2]:
            (home / "asker").mkdir(mode=0o700, exist_ok=True)
            shutil.copy(homes[2] / "asker" / "public_keys", home / "asker")
            with contextlib.suppress(FileNotFoundError):
                (home / "asker.toml").write_text((homes[2] / "asker.toml").read_text())
        (homes[2] / "keeper").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(homes[0] / "keeper" / "public_keys", homes[2] / "keeper")

    def holder(self) -> str:
        rows = self._database.execute("SELECT holder FROM immortal.leases WHERE until > clock_timestamp()").fetchall()
        return rows[0][0] if rows else ""

    def has_standby(self) -> bool:
        query = (
            "SELECT FROM immortal.standbys s WHERE is_ready AND seen > clock_timestamp() - interval '1.5 s'"
            " AND NOT EXISTS (SELECT FROM immortal.leases l WHERE l.holder = s.name)"
        )
        return bool(self._database.execute(query).fetchall())

    def begin(self) -> None:
        first, second = self.machines
        first.start("keeper", "Keeper")
        wait_until(lambda: "ready" in (first.home / "keeper.lines").read_text(), "the first one is up")
        if self._options.state_mib:
            with connect("keeper", home=first.home) as keeper:
                for _ in range(0, self._options.state_mib, 16):
                    keeper.grow(min(16, self._options.state_mib))
            if not first._alone:
                first.immortal("checkpoint", "keeper")
        second.start("keeper", "Keeper")
        wait_until(self.has_standby, "the second one has caught up")
        self.callers.start("asker", "Asker", ANSWERS=str(self.answers_path))
        wait_until(lambda: "ready" in (self.callers.home / "asker.lines").read_text(), "the caller is up")
        with connect("asker", home=self.callers.home) as asker:
            start(asker.ask)

    def peer_times_ns(self) -> list[int]:
        return [int(line) for line in self.answers_path.read_text().split()]

    def move(self) -> int:
        """Move the instance, and return the moment. machines[0] is the active machine before and after."""
        if self._options.how == "upgrade":
            self._upgrade_standby(self.machines[1])
        wait_until(self.has_standby, "somebody follows who has caught up")
        time.sleep(SETTLED_S)
        before, (first, _) = self.holder(), self.machines
        moment_ns = time.monotonic_ns()
        if self._options.how in ("migrate", "upgrade"):
            first.immortal("migrate", "keeper")
        else:
            first.end(signal.SIGTERM if self._options.how == "stop" else signal.SIGKILL)
        wait_until(lambda: self.holder() not in ("", before) or self._options.how == "kill", "it was taken over")
        time.sleep(SETTLED_S + (self._options.lease_s if self._options.how == "kill" else 0))
        if self._options.how == "upgrade":
            first.end(signal.SIGTERM)
        elif self._options.how != "migrate":
            first.start("keeper", "Keeper")
        self.machines.reverse()
        return moment_ns

    def _upgrade_standby(self, standby: Machine) -> None:
        """Start a standby with the old code that is upgraded when it takes over."""
        standby.end(signal.SIGTERM)
        wait_until(lambda: not self.has_standby(), "it follows no more")
        self._version = 3 - self._version
        app = "NextKeeper" if self._version == 2 else "FormerKeeper"
        standby.immortal("upgrade", "keeper", f"{APPS}:{app}", "--to", str(self._version))
        standby.start("keeper", app)

    def end(self) -> None:
        for machine in (self.callers, *self.machines):
            machine.end(signal.SIGKILL if machine._alone else signal.SIGTERM)


@contextlib.contextmanager
def created_world(options: argparse.Namespace) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="immortal-failover-") as name:
        Path(name).chmod(0o755)
        with postgres(Path(name)) as url:
            world = World(Path(name), url, options)
            try:
                world.begin()
                yield world
            finally:
                world.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.failover", description=__doc__)
    parser.add_argument("--how", choices=HOW, default="migrate")
    parser.add_argument("--address", choices=("own", "shared"), default="shared")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--state-mib", type=int, default=0)
    parser.add_argument("--lease-s", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there, behind those it has")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="write the section from these")
    options = parser.parse_args()
    about = {name: getattr(options, name) for name in ("how", "address", "state_mib", "lease_s")}
    before = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else None
    if before is not None and any(before[name] != value for name, value in about.items()):
        raise SystemExit(f"{options.json} has times of {before['how']}, {before['state_mib']} MiB: name another file")
    if options.report is not None:
        runs = [json.loads(path.read_text()) for path in options.report]
        (Path(__file__).parent / "takeovers.md").write_text(render("failover.md", runs=runs, how=HOW))
        return
    prepare_environment()
    waits: dict[str, list[float]] = {"peer": [], "client": []}
    load = [load_average()]
    with created_world(options) as world:
        client = Answers(world.endpoints, world.machines[0].home)
        for _ in range(options.runs):
            moment_ns = world.move()
            if client.error is not None:
                raise SystemExit(f"a client's call failed: {client.error!r}")
            now_ns = time.monotonic_ns()
            waits["peer"].append(longest_ms(world.peer_times_ns(), moment_ns, now_ns))
            waits["client"].append(longest_ms(client.times_ns, moment_ns, now_ns))
            print(f"peer {waits['peer'][-1]:.0f} ms, client {waits['client'][-1]:.0f} ms", flush=True)
        client.end()
    for who, waits_ms in waits.items():
        p50, p90, p99 = (percentile(sorted(waits_ms), percent) for percent in (50, 90, 99))
        what = f"{options.how}, address {options.address}, {options.state_mib} MiB, {who}"
        print(f"{what}: p50 {p50:.0f} ms, p90 {p90:.0f}, p99 {p99:.0f}, most {max(waits_ms):.0f}")
    if options.json is not None:
        if before is not None:
            load[0] = before["load"][0]
            waits = {who: before["waits_ms"][who] + waits_ms for who, waits_ms in waits.items()}
        about |= {"machine": describe(options.json.absolute().parent), "load": [*load, load_average()]}
        options.json.write_text(json.dumps({**about, "waits_ms": waits}))


if __name__ == "__main__":
    main()
