"""Five order books and three traders, each an instance with two processes; kill -9 of any of them; all books end alike.

python trading.py --orders 1000 --kills 6
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, RunError, console

BOOKS = ("b1", "b2", "b3", "b4", "b5")
TRADERS = ("t1", "t2", "t3")
FOLDER = Path(__file__).parent
APPS = dict.fromkeys(BOOKS, "orderbook:Book") | dict.fromkeys(TRADERS, "orderbook:Trader")
ROLES = (APP, COORDINATOR)


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
        home, total = folder / REGISTRY_NAME, 3 * options.orders
        kills = supervised.draw_kills(options.kills, total, APPS, ROLES, random.Random(options.seed))
        environment = {**os.environ, "ORDERBOOK_ORDERS": str(options.orders)}
        for name in APPS:
            supervised.register(home, name, *supervised.KEEP_ALL)

        def start(name: str) -> supervised.Instance:
            own = {**environment, "ORDERBOOK_TRADER": name}
            return supervised.Instance(name, APPS[name], home, FOLDER, own, "orders")

        elapsed_s = supervised.run(APPS, start, "orders", BOOKS, total, kills)
        states = {name: supervised.final_state(home, name, FOLDER) for name in BOOKS}
        check(states, options.orders)
        book = states[BOOKS[0]]
        console.print(f"{3 * options.orders:,} orders to 5 books in {elapsed_s:.1f} s, {options.kills} kills")
        return [], f"five books alike: {book['traded']:,} traded, checksum {book['checksum']:08x}"

    return supervised.conclude(work, options.keep)


if __name__ == "__main__":
    sys.exit(main())
