"""Three banks and a teller on two machines, with their logs in one PostgreSQL of three servers, and clients of theirs.

Each instance has a follower on the other machine; clients call the banks all the time, and the teller moves money.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from immortal.client import connect
from immortal.coordinator.instances.registry import Registry, free_port
from tests.helpers.postgres import VERSION_MIN, binaries
from tests.helpers.postgres_cluster import Cluster
from tests.soak.histories import IMPATIENT_S, Client, Operation, problems_of
from tests.soak.machines import EXAMPLE, Machine, Network, Placed
from tests.soak.service import SoakError, wait_for
from tests.soak.workloads import final_state, module_of

MACHINES = ("a", "b")
ROLE = "service"  # of the coordinators: no superuser, so that it gets no connection that is kept for those
IDENTITY = "till"
LEASE_S = 1
SMALL = ["north", "teller"]  # who has a follower in a small run; the other two banks are where they are
DISK_MIB = 128  # of each server of the database
WAIT_S = 120.0
TRANSFERS_PER_S = 20
LOOK_S = 0.02


@dataclass
class Lease:
    endpoint: str
    holder: str


class Fleet:
    """All that runs. A context manager."""

    def __init__(self, folder: Path, rng: random.Random, *, isolated: bool, small: bool) -> None:
        self.folder = folder
        self._books = module_of("run", EXAMPLE)
        self._bank_seed = rng.randrange(1000)
        self._stack = contextlib.ExitStack()
        self._isolated = isolated
        self.names = list(self._books.APPS)
        self.followed = SMALL if small else self.names
        self.network: Network | None = None
        self.clients: list[Client] = []
        self.placed: dict[tuple[str, str], Placed] = {}
        self._orders = folder / "orders"
        self._orders.write_text("0")
        self._since_s = time.monotonic()
        self._transfers = 0
        self._is_ended = threading.Event()

    def __enter__(self) -> Fleet:
        try:
            self._begin()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ended.set()
        for client in self.clients:
            client.tell_to_end()
        for placed in self.placed.values():
            placed.end()
        self._stack.close()

    def _begin(self) -> None:
        programs = binaries()
        if programs is None:
            raise SoakError(f"there is no PostgreSQL {VERSION_MIN} or newer: 'apt-get install postgresql'")
        if self._isolated:
            self.network = self._stack.enter_context(Network(list(MACHINES)))
        address = self.network.address if self.network else "127.0.0.1"
        hosts = self.network.hosts if self.network else []
        size_mib = DISK_MIB if self._isolated else None
        self.cluster = self._stack.enter_context(Cluster(programs, address, hosts, size_mib))
        self.home = self.cluster.url(ROLE)
        self.cluster.primary.execute(f"CREATE ROLE immortal_writer; CREATE ROLE {ROLE} LOGIN IN ROLE immortal_writer")
        environment = {"SOAK_ORDERS": str(self._orders), "BANK_SEED": str(self._bank_seed)}
        self.machines = {name: Machine(name, self.folder, self.home, self.network, environment) for name in MACHINES}
        first = self.machines[MACHINES[0]]
        owner = Machine("owner", self.folder, self.cluster.url(), None, environment)
        for name in self.names:
            app = "tests.soak.ha_apps:" + ("SteadyTeller" if name == self._books.TELLER else "CountingBank")
            for machine in list(self.machines.values())[: 2 if name in self.followed else 1]:
                peer = f"tcp://{machine.address}:{free_port((address,), set())}"
                self.placed[name, machine.name] = Placed(name, app, machine, peer)
            peer = self.placed[name, first.name].peer
            log = ["--log", self.home]
            owner.immortal("register", name, "--peer", peer, "--lease-s", str(LEASE_S), *log)
        till = Machine(IDENTITY, self.folder, self.home, None, environment)
        till.immortal("keys", IDENTITY, "--make", "--client")
        os.environ["IMMORTAL_LOCAL"] = str(till.folder)
        for placed in self.placed.values():
            placed.start()
        self.until_all_is_well()
        for bank in (name for name in self.names if name != self._books.TELLER):
            seed = f"{self._bank_seed}-{bank}"
            self.clients.append(Client(bank, self.home, IDENTITY, seed))
            self.clients.append(Client(bank, self.home, IDENTITY, f"{seed}-impatient", IMPATIENT_S))
        self._since_s = time.monotonic()
        threading.Thread(target=self._order, daemon=True).start()

    def _order(self) -> None:
        while not self._is_ended.wait(0.1):
            self._transfers = int((time.monotonic() - self._since_s) * TRANSFERS_PER_S)
            self._write_orders()

    def _write_orders(self) -> None:
        temporary = self._orders.with_suffix(".new")
        temporary.write_text(str(self._transfers))
        temporary.replace(self._orders)

    # --- what is known -----------------------------------------------------------------------------------------------

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Of the primary; nothing while it does not answer."""
        with contextlib.suppress(psycopg.Error):
            return self.cluster.primary.execute(query)
        return []

    def leases(self) -> dict[str, Lease]:
        rows = self.ask("SELECT instance, endpoint, holder FROM immortal.leases WHERE until > clock_timestamp()")
        return {instance: Lease(endpoint, holder) for instance, endpoint, holder in rows}

    def holder(self, name: str) -> Placed:
        """Where ``name`` is. On a busy machine a lease may have run out for a moment."""
        found: list[Placed] = []

        def is_known() -> bool:
            lease = self.leases().get(name)
            found[:] = [one for one in self._of(name) if lease is not None and one.peer == lease.endpoint]
            return bool(found)

        self.until(is_known, lambda: f"somebody has {name}: {self.ask('SELECT * FROM immortal.leases')}")
        return found[0]

    def heads(self) -> dict[str, tuple[int, int]]:
        """How far each log is: its epoch, and how many appends were done in it."""
        rows = self.ask("SELECT instance, epoch, appends_count FROM immortal.heads")
        return {instance: (epoch, count) for instance, epoch, count in rows}

    def said_lost_counts(self) -> dict[str, int]:
        """How often the places of each instance have said that the database lacks what was acknowledged."""
        return {name: sum(one.said_lost_count() for one in self._of(name)) for name in self.names}

    def follower(self, name: str) -> Placed:
        holder = self.holder(name)
        return next(one for one in self._of(name) if one is not holder)

    def _of(self, name: str) -> list[Placed]:
        return [placed for (of, _), placed in self.placed.items() if of == name]

    def until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        def holds() -> bool:
            for placed in self.placed.values():
                placed.keep_up()
            for client in self.clients:
                if client.error is not None:
                    raise SoakError(f"a client of {client.instance} failed: {client.error!r}")
            done = condition()
            if not done:
                time.sleep(LOOK_S)
            return done

        def said() -> str:
            lines = [f"  {one.name} on {one.machine.name}:\n{one.tail()}" for one in self.placed.values()]
            return "\n".join([what(), *lines, self.cluster.primary.tail()])

        wait_for(holds, said, WAIT_S)

    def until_all_is_well(self) -> None:
        """Each instance is somewhere, its follower, if it has one, has caught up; all servers of the database run."""
        self.cluster.rebuild()
        self.cluster.until_whole()
        query = (
            "SELECT l.instance FROM immortal.leases l JOIN immortal.standbys s USING (instance)"
            " WHERE l.until > clock_timestamp() AND s.is_ready AND s.name <> l.holder"
            " AND s.seen > clock_timestamp() - interval '1.5 s' AND s.endpoint <> l.endpoint"
        )
        self.until(
            lambda: (
                {name for (name,) in self.ask(query)} >= set(self.followed) and self.leases().keys() >= set(self.names)
            ),
            lambda: f"all have a follower: {self.ask('SELECT * FROM immortal.leases')} {self.ask(query)}",
        )
        now_ns = time.monotonic_ns()
        self.until(
            lambda: all(client.first_answer_ns(now_ns, asked_since=True) for client in self.clients),
            lambda: f"all clients are answered: {self.unanswered(now_ns)}",
        )

    def unanswered(self, since_ns: int) -> list[str]:
        return [one.instance for one in self.clients if not one.first_answer_ns(since_ns, asked_since=True)]

    def waits_ms(self, names: Iterable[str], since_ns: int, from_ns: int) -> list[float]:
        """Of the clients of ``names``: from ``since_ns`` until the first answer behind ``from_ns``."""
        clients = [client for client in self.clients if client.instance in names and client.is_patient]
        self.until(
            lambda: all(client.first_answer_ns(from_ns) for client in clients),
            lambda: f"clients of {', '.join(names)} are answered",
        )
        return [((client.first_answer_ns(from_ns) or 0) - since_ns) / 1e6 for client in clients]

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> str:
        """All transfers are settled, all stops cleanly; what was compared, in words. Raises SoakError."""
        self._is_ended.set()
        operations = self._end_clients()
        teller = self._books.TELLER
        self._settle(teller)
        holders = [self.holder(name) for name in self.names]
        stop_all([self.follower(name) for name in self.followed])  # a follower would take over
        self.until(
            lambda: not any(placed.knows_standbys() for placed in holders),
            lambda: "all holders see that nobody follows them",
        )
        stop_all(holders)
        registry = Registry(self.home)
        states = {}
        for name in self.names:
            log = str(registry.load(name).log)
            states[name] = msgspec.json.decode(msgspec.json.encode(final_state(name, log)))
        problems = self._books.problems_of(states, self._transfers, self._bank_seed)
        if problems:
            raise SoakError(f"the books are wrong: {problems[:10]}")
        counted = 0
        for name in operations:
            final = states[name]["counted"]
            counted += final
            if found := problems_of(operations[name], final):
                raise SoakError(f"what the clients of {name} saw is not linearizable: {found[:10]}")
        calls = [one for each in operations.values() for one in each]
        unknown = sum(one.number is None for one in calls)
        return (
            f"{self._transfers:,} transfers: the books are right; {len(calls):,} calls of clients, {counted:,} counted,"
            f" {unknown:,} of them of unknown outcome: linearizable"
        )

    def _end_clients(self) -> dict[str, list[Operation]]:
        operations: dict[str, list[Operation]] = {}
        for client in self.clients:
            client.end()
            if client.error is not None:
                raise SoakError(f"a client of {client.instance} failed: {client.error!r}")
            operations.setdefault(client.instance, []).extend(client.operations)
        return operations

    def _settle(self, teller: str) -> None:
        self._write_orders()
        with connect(teller, home=self.home, identity=IDENTITY, timeout=WAIT_S) as proxy:
            self.until(
                lambda: proxy.settled() == self._transfers,
                lambda: f"{self._transfers} transfers are settled: {proxy.settled()} are",
            )


def stop_all(some: list[Placed]) -> None:
    for placed in some:
        placed.terminate()
    for placed in some:
        placed.wait()
