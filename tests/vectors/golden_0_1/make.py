"""Make the golden logs anew: ``python -m tests.vectors.golden_0_1.make``. Takes two minutes.

Services of real processes do a bit of everything, and are killed in the middle of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from immortal.client import CallRefused, ClientError, connect, start, with_key
from immortal.patterns import clone, harmony, queue
from immortal.patterns.queue import Worker
from tests.helpers.cli import wait_until
from tests.helpers.golden import (
    FILES,
    FOLDER,
    HOME,
    STARTED,
    Fleet,
    apps_found,
    classes,
    dead_letters,
    finish,
    square,
    state_at_end,
    unpack,
    work,
)

LEFT_OUT = ("output.log", ".sock", "coordinator.json", "supervisor.json", "secret", ".project", "lock", "shown")
ROOT = Path(__file__).parents[3]
GIVEN = {"decide-1": (1,), "turn-a": ("a",), "turn-b": ("b",), "trade": ("late",)}
AWAY = ("asks", "trade")  # begun once a member is away


class Making:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / HOME
        for file in FILES:
            shutil.copy(FOLDER / file, folder)
        self.classes: dict[str, Any] = {}

    def immortal(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "coordinator", "--home", HOME, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GOLDEN_LOGS_ARE_MADE": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, timeout=100, capture_output=True, text=True, check=False
        )
        print("immortal", *arguments, done.stdout[-300:], done.stderr[-2000:], sep=" ", flush=True)
        assert done.returncode == 0
        return done.stdout

    def client(self, name: str, **given: Any) -> Any:
        return connect(self.classes[name], name, home=self.home, timeout=60, **given)

    def checkpoint(self, *names: str) -> None:
        for name in names:
            self.immortal("checkpoint", name)

    def make(self) -> None:
        self.immortal("up")
        self.classes = classes(self.home)
        for name in ("reader", "web"):
            self.immortal("keys", name, "--make", "--client")
        self.stores()
        self.patterns()
        self.tellers()
        self.upgrades()
        self.orders_and_those_who_are_away()

    def kill(self) -> None:
        keeper = json.loads(self.immortal("ps", "--json"))["keeper"]["pid"]
        os.kill(keeper, signal.SIGKILL)
        time.sleep(3)

    def stores(self) -> None:
        with self.client("store") as store, self.client("teller") as teller:
            with_key(store, "again").note("written once")
            wait_until(lambda: all(times > 1 for times in store.query.schedules()))
            teller.stock("ball", Decimal("2.50"))
            teller.stock("yacht", Decimal(2000))
            with suppress(ClientError):
                teller.fail()
            wait_until(lambda: len(teller.query.all_notes().get("failures", ())) == 4)
            with suppress(ClientError):
                store.die()
            with suppress(ClientError), connect("store", home=self.home) as nameless:
                nameless.nothing(1)
            with suppress(ClientError), connect("store", home=self.home) as nameless:
                nameless.note(1, 2, 3)
            self.checkpoint("store")
            teller.stock("doll", Decimal(1))
            for identity in ("reader", "web"):
                with self.client("store", identity=identity) as caller:
                    caller.total()
                    assert caller.query.item("ball").name == "ball"
                    with suppress(KeyError):
                        caller.item("nothing")
                    with suppress(CallRefused):
                        caller.fail("not allowed")
                        raise AssertionError("it was allowed")
        with self.client("own") as own:
            own.add(5)
            self.checkpoint("own")
            own.add(6)

    def patterns(self) -> None:
        with queue.connect("jobs", home=self.home) as jobs, self.client("jobs") as raw:
            first = Worker("jobs", {"square": square}, home=self.home, worker_id="first")
            jobs.submit("square", [12], dedup="twelve", key="k")
            with at_work(first):
                jobs.task(1).result(30)
            jobs.limit("square", running=1)
            jobs.submit("square", [2], timeout=2, retry_delay=0)
            raw.ready("dies", "session", ["square"], 3600.0, None)
            jobs.submit("square", [3], tries=1)
            jobs.submit("square", [4], delay=45)
            self.checkpoint("jobs")
            jobs.submit("square", [5], priority=7)
        with harmony.connect("cluster", home=self.home) as outer, self.client("cluster") as cluster:
            batch = outer.batch("squares", "square", collector="results")
            for task in range(6):
                batch.put(task)
            batch.flush()
            work(cluster, "first", 2)
            self.checkpoint("cluster", "results")
            cluster.work("first", {"square": 2}, None, None)
        with clone.connect("prices", Any, home=self.home) as prices, self.client("prices") as table:
            prices.update({"a/1": 1, "a/2": [1.5, "x"], "b": None})
            prices.put("gone", 1, ttl=45)
            self.checkpoint("prices")
            prices.delete("a/1")
            table.entitle("alice", ["a"])

    def tellers(self) -> None:
        with self.client("teller") as teller:
            for customer in ("ann", "eve", "mallory"):
                teller.pays(customer)
            for number in (2, 3):
                start(teller.decide, number)
                teller.signals(number, number == 2)
            self.begin(teller, *(key for key in STARTED if key not in AWAY))
            start(teller.polls, 1)
            for value in range(3):
                teller.signals_poll(value)
            start(teller.polls, 10)
            teller.signals_nobody()
            start(teller.is_cancelled)
            rows = json.loads(self.immortal("handlers", "teller", "--json"))
            rows = rows if isinstance(rows, list) else rows["handlers"]
            (number,) = [row["id"] for row in rows if "is_cancelled" in row["handler"]]
            self.immortal("handlers", "teller", "cancel", str(number), "--reason", "out of stock")
            self.checkpoint("teller")
            teller.trade("early")
            teller.stock("car", Decimal(3))

    def begin(self, teller: Any, *keys: str) -> None:
        for key in keys:
            start(getattr(with_key(teller, key), STARTED[key]), *GIVEN.get(key, ()))

    def upgrades(self) -> None:
        for name in ("upgraded", "upgrading"):
            with self.client(name) as counter:
                counter.count("a b a")
                start(with_key(counter, "late").waits, "late")
                self.checkpoint(name)
                counter.count("b c")
        self.immortal("upgrade", "upgraded", "golden_upgrade:Counter", "--to", "2")
        self.immortal("restart", "upgraded")
        with self.client("upgraded") as counter:
            counter.count("c d")
        self.immortal("upgrade", "upgrading", "golden_upgrade:Counter", "--to", "2")

    def orders_and_those_who_are_away(self) -> None:
        with self.client("exchange") as exchange, self.client("broker") as broker, self.client("teller") as teller:
            exchange.open("shared", 10)
            exchange.open("plain", 20)
            exchange.open("short", 5)
            wait_until(lambda: "short" in broker.query.show())
            broker.signals("short", 1)
            wait_until(lambda: any("nobody works on short" in one for one in exchange.query.all_trades()))
            self.checkpoint("broker", "exchange")
            self.immortal("stop", "b-3")
            start(teller.trade, "third is away")
            self.immortal("group", "expel", "prices", "b-3", "--yes")
            self.checkpoint("b-1")
            start(teller.trade, "third is expelled")
            self.immortal("stop", "b-2")
            self.begin(teller, *AWAY)
            start(teller.trade, "second is away")
            start(exchange.close, "shared")


@contextmanager
def at_work(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="golden"))
    making = Making(folder)
    with apps_found():
        try:
            making.make()
        finally:
            making.kill()
        kept = [
            path
            for path in sorted(making.home.rglob("*"))
            if (path.is_file() or path.is_dir()) and not any(word in path.name for word in LEFT_OUT)
        ]
        with tarfile.open(FOLDER / "home.tar.xz", "w:xz", preset=9) as packed:
            for path in kept:
                packed.add(path, path.relative_to(folder), recursive=False, filter=anonymous)
        shutil.rmtree(folder)
        time.sleep(70)  # so that all that was due is due
        note()


def note() -> None:
    """Note what this code makes of the logs."""
    folder = Path(tempfile.mkdtemp(prefix="golden"))
    home = unpack(folder)
    os.environ["IMMORTAL_HOME"] = str(home)
    with apps_found():
        noted: dict[str, Any] = {"states": {name: state_at_end(home, name, cls) for name, cls in classes(home).items()}}
        noted["dead letters"] = dead_letters(home)
        with Fleet(home) as fleet:
            noted["finished"] = finish(fleet, noted["states"])
    (FOLDER / "noted.json").write_text(json.dumps(noted, indent=1, sort_keys=True, default=str) + "\n")
    shutil.rmtree(folder)


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
