"""Five order books and three traders, each an instance with two processes; kill -9 of any of them; all books end alike.

python trading.py --orders 1000 --kills 6
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, RunError, console

BOOKS = ("b1", "b2", "b3", "b4", "b5")
TRADERS = ("t1", "t2", "t3")
STALLED_S = 60.0  # without progress for so long, the run fails
POLL_S = 0.05
FOLDER = Path(__file__).parent
ROLES = (APP, COORDINATOR)


class Instance(supervised.Instance):
    """Instance of a book or a trader. ``seen``: number of orders that a book has printed."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str]) -> None:
        self.seen = 0
        app = "orderbook:Book" if name in BOOKS else "orderbook:Trader"
        super().__init__(name, app, home, FOLDER, {**environment, "ORDERBOOK_TRADER": name}, self._note)

    def _note(self, line: str) -> None:
        if found := re.fullmatch(r"orders: (\d+)\n", line):
            self.seen = max(self.seen, int(found[1]))


def run(folder: Path, orders: int, kills: int, source: random.Random) -> float:
    """Run until all books have all orders; return the seconds. Raises RunError."""
    home = folder / REGISTRY_NAME
    names = (*BOOKS, *TRADERS)
    environment = {**os.environ, "ORDERBOOK_ORDERS": str(orders)}
    for name in names:
        supervised.register(home, name, *supervised.KEEP_ALL)
    instances: dict[str, Instance] = {}
    try:
        began_s = time.monotonic()
        for name in names:
            instances[name] = Instance(name, home, environment)
        _until_done(instances, 3 * orders, kills, source)
        elapsed_s = time.monotonic() - began_s
        for instance in instances.values():
            instance.stop()
        return elapsed_s
    finally:
        for instance in instances.values():
            instance.end()


def _until_done(instances: Mapping[str, Instance], orders: int, kills: int, source: random.Random) -> None:
    books = [instances[name] for name in BOOKS]
    moments = sorted(source.randrange(orders * 9 // 10) for _ in range(kills))
    moved_s, before = time.monotonic(), -1
    while min(book.seen for book in books) < orders or moments:
        seen = min(book.seen for book in books)
        if moments and seen >= moments[0] and source.choice(list(instances.values())).kill(source.choice(ROLES)):
            moments.pop(0)
        for instance in instances.values():
            instance.check()
        if sum(book.seen for book in books) > before:
            moved_s, before = time.monotonic(), sum(book.seen for book in books)
        elif time.monotonic() - moved_s > STALLED_S:
            raise RunError(f"nothing has moved for {STALLED_S:.0f} s: {[book.seen for book in books]}")
        time.sleep(POLL_S)


def check(states: Mapping[str, Any], orders: int) -> None:
    """Check that all books are equal and have all orders. Raises RunError."""
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

    def work(folder: Path) -> tuple[list[str], str]:
        elapsed_s = run(folder, options.orders, options.kills, random.Random(options.seed))
        states = {name: supervised.final_state(folder / REGISTRY_NAME, name, FOLDER) for name in BOOKS}
        check(states, options.orders)
        book = states[BOOKS[0]]
        console.print(f"{3 * options.orders:,} orders to 5 books in {elapsed_s:.1f} s, {options.kills} kills")
        return [], f"five books alike: {book['traded']:,} traded, checksum {book['checksum']:08x}"

    return supervised.conclude(work, options.keep)


if __name__ == "__main__":
    sys.exit(main())
