"""Five order books and three traders, each an instance with two processes; kill -9 of any of them; all books end alike.

python trading.py --orders 1000 --kills 6
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOKS = ("b1", "b2", "b3", "b4", "b5")
TRADERS = ("t1", "t2", "t3")
STALLED_S = 60.0  # nothing has moved for so long
STOP_S = 60.0
POLL_S = 0.05


class RunError(Exception):
    """The run could not go on, or the books differ."""


@dataclass
class Instance:
    """A supervisor (`immortal run`) with its two processes."""

    name: str
    home: Path
    environment: Mapping[str, str]
    seen: int = 0
    pids: list[int] = field(default_factory=list)
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        app = "orderbook:Book" if self.name in BOOKS else "orderbook:Trader"
        self.process = subprocess.Popen(
            [*immortal(self.home), "run", self.name, app, "--restart", "--log-format", "json"],
            cwd=Path(__file__).parent,
            env={**self.environment, "ORDERBOOK_TRADER": self.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        threading.Thread(target=self._read_output, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_output(self) -> None:
        for line in self.process.stdout or ():
            if found := re.fullmatch(r"orders: (\d+)\n", line):
                self.seen = max(self.seen, int(found[1]))

    def _read_log(self) -> None:
        with (self.home.parent / f"{self.name}.log").open("a") as log:
            for line in self.process.stderr or ():
                log.write(line)
                log.flush()
                if found := re.search(r'"message": "started", "coordinator_pid": (\d+), "app_pid": (\d+)', line):
                    self.pids = [int(found[1]), int(found[2])]

    def kill(self, source: random.Random) -> bool:
        """Kill the app or the coordinator; return False where neither runs just now."""
        if not self.pids:
            return False
        pid = source.choice(self.pids)
        self.pids = []
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def stop(self) -> None:
        self.process.terminate()
        if self.process.wait(STOP_S) != 0:
            raise RunError(f"{self.name} ended with status {self.process.returncode}: see its log")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its two processes die with it
            self.process.wait()


def immortal(home: Path) -> list[str]:
    return [sys.executable, "-m", "immortal", "--home", str(home)]


def run(folder: Path, orders: int, kills: int, source: random.Random) -> float:
    """Seconds until all books have all orders. Raises RunError."""
    home = folder / "registry"
    names = (*BOOKS, *TRADERS)
    environment = {**os.environ, "ORDERBOOK_ORDERS": str(orders)}
    for name in names:
        register = [*immortal(home), "register", name, "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all"]
        subprocess.run(register, check=True, stdout=subprocess.DEVNULL)
    instances = {name: Instance(name, home, environment) for name in names}
    started = []
    try:
        began_s = time.monotonic()
        for instance in instances.values():
            instance.start()
            started.append(instance)
        _until_done(instances, 3 * orders, kills, source)
        elapsed_s = time.monotonic() - began_s
        for instance in instances.values():
            instance.stop()
        return elapsed_s
    finally:
        for instance in started:
            instance.end()


def _until_done(instances: Mapping[str, Instance], orders: int, kills: int, source: random.Random) -> None:
    books = [instances[name] for name in BOOKS]
    moments = sorted(source.randrange(orders * 9 // 10) for _ in range(kills))
    moved_s, before = time.monotonic(), -1
    while min(book.seen for book in books) < orders or moments:
        seen = min(book.seen for book in books)
        if moments and seen >= moments[0] and source.choice(list(instances.values())).kill(source):
            moments.pop(0)
        for instance in instances.values():
            if instance.process.poll() is not None:
                raise RunError(f"{instance.name} ended with status {instance.process.returncode}")
        if sum(book.seen for book in books) > before:
            moved_s, before = time.monotonic(), sum(book.seen for book in books)
        elif time.monotonic() - moved_s > STALLED_S:
            raise RunError(f"nothing has moved for {STALLED_S:.0f} s: {[book.seen for book in books]}")
        time.sleep(POLL_S)


def state_of(home: Path, name: str) -> Any:
    """At the end of its log. Raises RunError."""
    command = [*immortal(home), "replay", name, "--state", "--json"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RunError(f"{name} can't be replayed: {result.stderr.strip()}")
    return json.loads(result.stdout)["state"]["state"]


def check(states: Mapping[str, Any], orders: int) -> None:
    """Raises RunError."""
    first = states[BOOKS[0]]
    for name, state in states.items():
        if state != first:
            raise RunError(f"the book {name} differs from {BOOKS[0]}")
    if first["by_trader"] != dict.fromkeys(TRADERS, orders) or first["orders"] != 3 * orders:
        raise RunError(f"the orders are {first['by_trader']}, {orders} of each were expected")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--orders", type=int, default=1000, metavar="N", help="of each of three traders (default 1000)")
    parser.add_argument(
        "--kills", type=int, default=6, metavar="N", help="kill -9 of apps and coordinators (default 6)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new one, where the logs stay")
    options = parser.parse_args()
    if options.keep is None:
        folder = Path(tempfile.mkdtemp(prefix="immortal-orderbook-"))
    else:
        options.keep.mkdir(parents=True)
        folder = options.keep.absolute()
    try:
        elapsed_s = run(folder, options.orders, options.kills, random.Random(options.seed))
        states = {name: state_of(folder / "registry", name) for name in BOOKS}
        check(states, options.orders)
    except RunError as error:
        print(f"FAILED: {error}\nlogs and registry are kept in {folder}")
        return 1
    if options.keep is None:
        shutil.rmtree(folder)
    book = states[BOOKS[0]]
    print(f"{3 * options.orders:,} orders to 5 books in {elapsed_s:.1f} s, {options.kills} kills")
    print(f"five books alike: {book['traded']:,} traded, checksum {book['checksum']:08x}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
