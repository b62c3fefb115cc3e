"""The golden logs: how to open them, and how to bring all that waits in them to its end."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.patterns.harmony.batch import Response
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.running.runner import load
from immortal.appsdk.state.tree import to_json
from immortal.appsdk.testing.replay_check import LocalReplay, problems_of
from immortal.client import connect, handle, with_key
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.registry import Registry, free_port
from immortal.coordinator.log.open import open_reader
from immortal.embedded import start
from immortal.patterns import clone, harmony, queue
from immortal.replay.plan import ReplayPlan
from immortal.replay.result import Sink
from tests.helpers import commands
from tests.helpers.cli import wait_until
from tests.helpers.logged import kept_logging

FOLDER = Path(__file__).parents[1] / "vectors" / "golden_0_1"
HOME = "home"
FILES = ("golden_apps.py", "golden_upgrade.py", "immortal.toml")
STARTED = {  # calls that wait in the logs of the teller, by their keys
    "sleeps": "sleeps",
    "decide-1": "decide",
    "gathers": "gathers",
    "slow": "pays_slowly",
    "flaky": "pays_flakily",
    "turn-a": "one_at_a_time",
    "turn-b": "one_at_a_time",
    "trade": "trade_and_wait",
    "asks": "asks_b2",
}
WAIT_S = 40.0


def unpack(folder: Path) -> Path:
    """Unpack a project of the golden logs' apps; return its home, with ports that are free here."""
    for name in FILES:
        shutil.copy(FOLDER / name, folder)
    with tarfile.open(FOLDER / "home.tar.xz") as packed:
        packed.extractall(folder, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
    taken: set[int] = set()
    for settings in (folder / HOME).glob("*.toml"):
        port = free_port(["127.0.0.1"], taken)
        taken.add(port)
        settings.write_text(re.sub(r"tcp://127\.0\.0\.1:\d+", f"tcp://127.0.0.1:{port}", settings.read_text()))
    return folder / HOME


def classes(home: Path) -> dict[str, Any]:
    """Return the class that each instance runs at its next start, as its files name it."""
    found = {}
    for settings in map(Registry(home).load, Registry(home).names()):
        upgrade = upgrade_mark.read(settings.folder)
        found[settings.name] = load((upgrade and upgrade.app) or settings.app or "")
    return found


@contextmanager
def apps_found() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def problems(home: Path, name: str, cls: type) -> list[str]:
    """Return where a replay of the whole log of ``name`` differs from the log."""
    with open_reader(home / name / "log") as source:
        source.trusts_pickle = True
        return list(problems_of(source, definition_of(cls)))


def state_at_end(home: Path, name: str, cls: type) -> Any:
    """Return the state from the last checkpoint and the records after it, without the names of modules."""
    definition = definition_of(cls)
    with open_reader(home / name / "log") as source:
        source.trusts_pickle = True
        replay = LocalReplay(source, ReplayPlan(), definition, Sink())
        assert replay.run().failure is None
    return _without_modules(to_json(inspect_state(definition, replay.blob).state))


def _without_modules(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_modules(one) for one in state]
    if not isinstance(state, dict):
        return state
    named = ("$type", "$global")
    return {key: one.rpartition(".")[2] if key in named else _without_modules(one) for key, one in state.items()}


def dead_letters(home: Path) -> Any:
    done = commands.run(home.parent, "dead-letters", "store", "--json", home=home.name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Fleet:
    """All instances of a home in this process, and clients of each."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.apps = classes(home)
        self._stack = ExitStack()
        self._stack.enter_context(kept_logging())
        for name, cls in self.apps.items():
            self._stack.enter_context(start(cls, name, home=home, log_level="error"))

    def client(self, name: str, **given: Any) -> Any:
        return self._stack.enter_context(connect(self.apps[name], name, home=self.home, timeout=WAIT_S, **given))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def finish(fleet: Fleet, states: dict[str, Any]) -> dict[str, Any]:
    """Bring all that waits in the golden logs to its end; return the results. ``states``: those of the logs' ends."""
    found: dict[str, Any] = {}
    store, teller, exchange, broker = (fleet.client(name) for name in ("store", "teller", "exchange", "broker"))
    teller.signals(1, True)
    teller.signals_parts(5)
    found["signal that was kept"] = teller.takes_signal()
    teller.signals_poll(3)
    teller.signals_turn("a")
    teller.signals_turn("b")
    found["started"] = {
        key: handle(teller, f"{method}:{key}").result(timeout=WAIT_S) for key, method in STARTED.items()
    }
    broker.signals("plain", 2)
    wait_until(lambda: "plain" not in broker.query.show().split("]")[0])
    found["broker"] = broker.query.show()
    wait_until(lambda: any("nobody works on plain" in one for one in exchange.query.all_trades()))
    found["trades"] = sorted(exchange.query.all_trades())
    books = {name: fleet.client(name) for name in ("b-1", "b-2", "b-3")}
    wait_until(lambda: "an order is destroyed" in books["b-2"].query.all_orders())
    wait_until(lambda: "expelled from prices" in books["b-3"].query.all_orders())
    found["books"] = {name: sorted(book.query.all_orders()) for name, book in books.items()}
    wait_until(lambda: "polls" in teller.query.all_notes())
    found["notes"] = teller.query.all_notes()
    before = states["store"]["times"], states["store"]["times_by_the_clock"]
    wait_until(lambda: all(now > then for now, then in zip(store.query.schedules(), before, strict=True)))
    found["events"] = store.query.all_events()
    ball = store.item("ball")
    found["item"] = [ball.name, ball.kind.name, str(ball.price), ball.place.shelf, ball.worth.cents]
    with_key(store, "again").note("written once")
    found["repeated request"] = store.query.all_events() == found["events"]
    found["upgrades"] = {}
    for name in ("upgraded", "upgrading"):
        client = fleet.client(name)
        client.signals("late")
        handle(client, "waits:late").result(timeout=WAIT_S)
        words, _, drawn = client.query.show().rpartition(" ")
        found["upgrades"][name] = [words, drawn if name == "upgraded" else "drawn now"]
    found["own"] = fleet.client("own").add(1)
    found["queue"] = _finish_queue(fleet)
    found["harmony"] = _finish_batch(fleet)
    with clone.connect("prices", Any, home=fleet.home) as prices:
        wait_until(lambda: "gone" not in prices)
        prices.put("late", 1)
        found["table"] = dict(prices)
        found["entitled"] = repr(fleet.client("prices").query.entitled())
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain


def square(number: int) -> int:
    if number == 3:
        raise ValueError("not that one")
    return number * number


def _finish_queue(fleet: Fleet) -> list[Any]:
    worker = queue.Worker("jobs", {"square": square}, home=fleet.home, worker_id="later")
    thread = threading.Thread(target=worker.run)
    thread.start()
    with queue.connect("jobs", home=fleet.home) as jobs:
        ended: list[Any] = [
            jobs.task(number).result(WAIT_S) for number in (2, 4, 5)
        ]  # the first had ended: it was kept for a day
        try:
            jobs.task(3).result(WAIT_S)
        except queue.TaskFailed as error:
            ended.append(str(error))
    worker.stop()
    thread.join()
    return ended


def _finish_batch(fleet: Fleet) -> list[Any]:
    cluster = fleet.client("cluster")
    cluster.leave("first", died=True)
    with harmony.connect("cluster", home=fleet.home) as outer:
        batch = outer.batch("squares", "square", collector="results")
        batch.send(range(10))
        work(cluster, "second", 100)
        return [[one.number, one.value, one.error] for one in islice(batch.results(timeout=WAIT_S), 10)]


def work(cluster: Any, worker: str, runs: int) -> None:
    """Do ``runs`` runs of up to two tasks, or all that there are."""
    response, life = None, None
    for _ in range(runs):
        run = cluster.work(worker, {"square": 2}, response, life)
        if run is None:
            return
        numbers = msgspec.msgpack.decode(run.tasks)
        failures = {run.first + place: "ValueError: no" for place, one in enumerate(numbers) if one == 3}
        values = [None if one == 3 else one * one for one in numbers]
        response, life = Response(run.batch, run.first, run.count, msgspec.msgpack.encode(values), failures), run.life
    cluster.work(worker, {"square": 2}, response, life)
