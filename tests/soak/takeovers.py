"""Faults of machines and of the database, each from its beginning until callers are answered again."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.soak.fleet import LOOK_S, Fleet, Lease
from tests.soak.machines import Placed
from tests.soak.outcomes import Fault

HELD_S = 2.0  # a fault of the database lasts so long: longer than a lease


@dataclass
class Outcome:
    """Of one fault: which instances have gone elsewhere, and after what time clients were answered again."""

    what: str
    moved: list[str] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)


class Moment:
    """Where all were, and what the writers had said, before a fault."""

    def __init__(self, fleet: Fleet) -> None:
        self.writers = {name: fleet.holder(name) for name in fleet.followed}
        self._said = {name: one.lost_count() for name, one in self.writers.items()}
        self.at_ns = time.monotonic_ns()

    def moved(self, leases: dict[str, Lease]) -> list[str]:
        return [name for name, one in self.writers.items() if name in leases and leases[name].endpoint != one.peer]

    def has_said(self, name: str) -> bool:
        """That another one has its log, or that there is no room for it."""
        return self.writers[name].lost_count() > self._said[name]


class Faults:
    """Each method is a fault, from its beginning to its end, and says what has become of it: see outcomes.py."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet, self._rng = fleet, rng
        self.kinds: dict[Fault, Callable[[], Outcome]] = {
            Fault.KILL: self._kill,
            Fault.MACHINE: self._kill_machine,
            Fault.STOP: self._stop,
            Fault.TERM: self._hand_over,
            Fault.PROMOTE: self._promote,
            Fault.PROMOTE_AND_KILL: self._promote_and_kill,
            Fault.PROMOTE_BEHIND: self._promote_behind,
            Fault.CRASH: self._crash,
            Fault.BACKENDS: self._kill_backends,
            Fault.CONNECTIONS: self._exhaust,
            Fault.STANDBYS: self._stop_standbys,
        }
        if fleet.network is not None:
            self.kinds[Fault.CUT] = self._cut
            self.kinds[Fault.DISK] = self._fill

    def _taken_over(self, placed: list[Placed], since_ns: int, what: str) -> Outcome:
        """Waits until each is elsewhere, and its clients are answered."""
        fleet, outcome = self._fleet, Outcome(what)
        waiting = {one.name: one for one in placed}

        def is_elsewhere() -> bool:
            leases = fleet.leases()
            return all(name in leases and leases[name].endpoint not in ("", one.peer) for name, one in waiting.items())

        fleet.until(is_elsewhere, lambda: f"{', '.join(waiting)} are taken over after {what}: {fleet.leases()}")
        taken_ns = time.monotonic_ns()
        outcome.moved = list(waiting)
        outcome.waits_ms = fleet.waits_ms(waiting, since_ns, taken_ns)
        return outcome

    def _one(self) -> Placed:
        return self._fleet.holder(self._rng.choice(self._fleet.followed))

    def _kill(self) -> Outcome:
        victim = self._one()
        now_ns = time.monotonic_ns()
        victim.kill()
        outcome = self._taken_over([victim], now_ns, f"kill -9 of {victim.name} on {victim.machine.name}")
        victim.start()
        return outcome

    def _held_on(self, machine: str) -> list[Placed]:
        return [one for name in self._fleet.followed if (one := self._fleet.holder(name)).machine.name == machine]

    def _kill_machine(self) -> Outcome:
        machine = self._one().machine.name
        held = self._held_on(machine)
        now_ns = time.monotonic_ns()
        there = [one for (_, at), one in self._fleet.placed.items() if at == machine]
        for one in there:
            one.kill()
        outcome = self._taken_over(held, now_ns, f"kill -9 of all on {machine}")
        for one in there:
            one.start()
        return outcome

    def _stop(self) -> Outcome:
        """Longer than its lease: who wakes up is fenced, and says so."""
        victim, before = self._one(), Moment(self._fleet)
        victim.signal(signal.SIGSTOP)
        try:
            outcome = self._taken_over([victim], before.at_ns, f"SIGSTOP of {victim.name} on {victim.machine.name}")
        finally:
            victim.signal(signal.SIGCONT)
        self._say_so([victim.name], before)
        return outcome

    def _say_so(self, names: Iterable[str], before: Moment) -> None:
        self._fleet.until(
            lambda: all(map(before.has_said, names)), lambda: f"of {names} each says that another one has its log"
        )

    def _hand_over(self) -> Outcome:
        victim = self._one()
        now_ns = time.monotonic_ns()
        victim.terminate()
        outcome = self._taken_over([victim], now_ns, f"SIGTERM of {victim.name} on {victim.machine.name}")
        victim.wait()
        victim.start()
        return outcome

    def _cut(self) -> Outcome:
        network = self._fleet.network
        assert network is not None
        machine = self._one().machine.name
        held = self._held_on(machine)
        before = Moment(self._fleet)
        network.pull(machine)
        try:
            outcome = self._taken_over(held, before.at_ns, f"{machine} cut off")
        finally:
            network.plug(machine)
        self._say_so([one.name for one in held], before)
        return outcome

    # --- of the database ---------------------------------------------------------------------------------------------

    def _of_database(self, what: str, before: Moment, over_ns: int | None = None, killed: str = "") -> Outcome:
        """Clients are answered again; who has gone elsewhere meanwhile, and knows it if it lives.

        ``over_ns``: when the fault was over, where that is not now.
        """
        fleet, over_ns = self._fleet, over_ns or time.monotonic_ns()
        banks = {client.instance for client in fleet.clients}
        waits_ms = fleet.waits_ms(banks, before.at_ns, over_ns)
        fleet.until_all_is_well()
        moved = before.moved(fleet.leases())
        self._say_so([name for name in moved if name != killed], before)
        return Outcome(what, moved, waits_ms)

    def _promote(self) -> Outcome:
        cluster, before = self._fleet.cluster, Moment(self._fleet)
        old = cluster.primary.name
        cluster.fail_over()
        return self._of_database(f"{cluster.primary.name} promoted in place of {old}", before)

    def _promote_and_kill(self) -> Outcome:
        cluster, victim, before = self._fleet.cluster, self._one(), Moment(self._fleet)
        old = cluster.primary.name
        victim.kill()
        cluster.fail_over()
        over_ns = time.monotonic_ns()
        what = f"{cluster.primary.name} promoted in place of {old}, kill -9 of {victim.name} on {victim.machine.name}"
        self._taken_over([victim], before.at_ns, what)
        victim.start()
        return self._of_database(what, before, over_ns, killed=victim.name)

    def _promote_behind(self) -> Outcome:
        """Nobody goes on from there: all say so, and go on once one is promoted that has all."""
        fleet, cluster, before = self._fleet, self._fleet.cluster, Moment(self._fleet)
        old, said = cluster.primary.name, fleet.said_lost_counts()

        def until_more_is_done() -> None:
            heads = fleet.heads()
            fleet.until(
                lambda: all(head > heads[name] for name, head in fleet.heads().items()), lambda: "all have appended"
            )

        whole = cluster.promote_one_behind(until_more_is_done)
        behind = cluster.primary.name
        fleet.until(
            lambda: all(count > said[name] for name, count in fleet.said_lost_counts().items()),
            lambda: f"all say that {behind} lacks what was acknowledged: {fleet.said_lost_counts()}, before: {said}",
        )
        cluster.promote_instead(whole)
        what = f"{behind} promoted in place of {old}, which lacks the last commits; then {cluster.primary.name}"
        return self._of_database(what, before)

    def _crash(self) -> Outcome:
        cluster, before = self._fleet.cluster, Moment(self._fleet)
        cluster.restart(cluster.primary)
        return self._of_database(f"crash of {cluster.primary.name}", before)

    def _kill_backends(self) -> Outcome:
        """Those of one instance on its machine, again and again; of all where machines have no addresses."""
        victim, before = self._one(), Moment(self._fleet)
        query = _break_connections(victim)
        if self._fleet.network is not None:
            query += f" AND client_addr = '{victim.machine.address}'"
        killed = 0
        for _ in _while_held():
            killed += sum(count for (count,) in self._fleet.ask(query))
        return self._of_database(f"{killed} backends of {victim.name} on {victim.machine.name} killed", before)

    def _exhaust(self) -> Outcome:
        """All connections are taken, and those of one instance broken."""
        fleet, victim = self._fleet, self._one()
        url = re.sub(r"@[^/]*", f"@{fleet.cluster.primary.place}", fleet.home)
        taken: list[psycopg.Connection[Any]] = []

        def take_all() -> None:
            with contextlib.suppress(psycopg.Error):
                while True:
                    taken.append(psycopg.connect(url, application_name="soak"))

        try:
            take_all()
            before = Moment(fleet)
            for _ in _while_held():
                fleet.ask(_break_connections(victim))
                take_all()
        finally:
            for connection in taken:
                connection.close()
        what = f"{len(taken)} connections, the last there were, taken, and those of {victim.name} broken"
        return self._of_database(what, before)

    def _stop_standbys(self) -> Outcome:
        """Both: no commit is acknowledged meanwhile."""
        cluster, before = self._fleet.cluster, Moment(self._fleet)
        stopped = cluster.standbys
        for server in stopped:
            server.send(signal.SIGSTOP)
        try:
            for _ in _while_held():
                pass
        finally:
            for server in stopped:
                server.send(signal.SIGCONT)
        return self._of_database("both standbys of the database stopped", before)

    def _fill(self) -> Outcome:
        cluster, before = self._fleet.cluster, Moment(self._fleet)
        server = cluster.primary
        try:
            for _ in _while_held():
                server.fill()
        finally:
            server.make_room()
        over_ns = time.monotonic_ns()
        ended = "" if server.runs else ", which ended it"
        cluster.until_whole()
        return self._of_database(f"the disk of {server.name} full{ended}", before, over_ns)


def _while_held() -> Iterable[None]:
    until_s = time.monotonic() + HELD_S
    while time.monotonic() < until_s:
        yield
        time.sleep(LOOK_S)


def _break_connections(placed: Placed) -> str:
    """Those of its instance, wherever."""
    return (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        f" WHERE application_name = 'immortal {placed.name}'"
    )
