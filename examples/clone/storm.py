"""Copies of a table, while the table and a forwarder are killed and a reader freezes; all are compared.

    python examples/clone/storm.py [--updates N] [--readers N] [--kills N] [--freeze SECONDS] [--seed S]

Half of the readers follow the table, half a forwarder. Table and forwarder are each killed (kill -9) --kills times, and
restarted. One reader is frozen (SIGSTOP) meanwhile. Two writers update the same keys. At the end each copy must equal
the confirmed updates of the writers. Status 1: one does not, a reader saw changes in another order, or one that was not
frozen took a whole copy from the table more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from immortal.client import connect as connect_client
from immortal.patterns.clone import Table, connect

sys.path.append(str(Path(__file__).resolve().parents[1]))
from supervised import POLL_S, SUPERVISOR, Instance, Keeper, register

NAME = "prices"
KEYS = 200
HERE = Path(__file__).parent


class Reader:
    """Process of reader.py."""

    def __init__(self, environment: Mapping[str, str], publishers: Sequence[str]) -> None:
        command = [sys.executable, str(HERE / "reader.py"), NAME, *publishers]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.read_answer()

    def read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a reader has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def query(self, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.read_answer()


class Writers:
    """Two writers. ``confirmed``: changes by number."""

    def __init__(self, home: Path, updates: int, seed: int) -> None:
        self.confirmed: dict[int, tuple[str, int | None]] = {}
        self._threads = [
            threading.Thread(target=self._write, args=(home, updates // 2, random.Random(seed + index)))
            for index in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, home: Path, updates: int, draw: random.Random) -> None:
        with connect(NAME, int, home=home, subtrees=["none"], timeout=120.0) as clone:
            for index in range(updates):
                key = f"key/{draw.randrange(KEYS)}"
                if draw.random() < 0.2:
                    self.confirmed[clone.delete(key)] = (key, None)
                else:
                    self.confirmed[clone.put(key, index)] = (key, index)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def values(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number in sorted(self.confirmed):
            key, value = self.confirmed[number]
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        return found


def storm(folder: Path, options: argparse.Namespace) -> int:
    home = folder / "home"
    register(home, NAME)
    environment = {**os.environ, "IMMORTAL_HOME": str(home), "PYTHONPATH": str(HERE.parents[1])}
    table = Instance(NAME, "immortal.patterns.clone:Table", home, folder, environment)
    places: list[str] = []  # of the forwarder: the same one after a restart

    def forward() -> list[str]:
        command = [sys.executable, "-m", "immortal.patterns.clone", "forward", NAME]
        return [*command, *(["--listen", places[0]] if places else [])]

    forwarder = Keeper(forward, lambda line: places.append(line.split()[-1]), environment=environment)
    readers: list[Reader] = []
    try:
        table.until_ready()
        wait_for(lambda: len(places), 1, "forwarders")
        readers += [Reader(environment, places[: index % 2]) for index in range(options.readers)]
        writers = Writers(home, options.updates, options.seed)
        frozen = readers[-1]
        for kill in range(options.kills):
            wait_for(lambda: len(writers.confirmed), options.updates * (kill + 1) // (options.kills + 2), "updates")
            if kill == 0:
                frozen.process.send_signal(signal.SIGSTOP)
                thawing = threading.Timer(options.freeze, frozen.process.send_signal, [signal.SIGCONT])
                thawing.start()
            table.kill(SUPERVISOR)
            forwarder.kill()
        writers.join()
        if options.kills:
            thawing.join()
        last = max(writers.confirmed)
        found = [reader.query(last) for reader in readers]
        with connect_client(Table, NAME, home=home) as proxy:
            status = proxy.status()
    finally:
        for reader in readers:
            reader.process.kill()
            reader.process.communicate()
        forwarder.end()
        table.end()
    expected = writers.values()
    wrong = sum(one["values"] != expected or not one["same"] or one["backwards"] > 0 for one in found)
    again = sum(one["whole"] > 1 for one in found[:-1:2])
    resumed = sum(one["resumed"] for one in found)
    holes = sum(one["holes"] for one in found)
    print(
        f"{len(writers.confirmed)} updates, {status.number - len(writers.confirmed)} of presence and so on; table and "
        f"forwarder killed {options.kills} times each\n"
        f"{len(found)} copies, {wrong} wrong; {resumed} streams went on where they were, {holes} holes, {again} copies "
        f"of the table taken anew"
    )
    return int(wrong > 0 or again > 0)


def wait_for(count: Callable[[], int], wanted: int, unit: str) -> None:
    deadline_s = time.monotonic() + 120
    while count() < wanted:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{count()} of {wanted} {unit} within 120 s")
        time.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--freeze", type=float, default=8.0, help="Seconds that the last reader is frozen.")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.updates < 2 or options.readers < 1 or options.kills < 0:
        parser.error("at least 2 updates, 1 reader and 0 kills were expected")
    with tempfile.TemporaryDirectory() as folder:
        return storm(Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
