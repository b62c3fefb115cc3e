"""Order from the shop over HTTP while its processes are killed one after another; then compare.

    python examples/http/load.py [--seconds S] [--kills N] [--web-kills N] [--connections N] [--seed S]
                                 [--failing PERCENT] [--killing PERCENT]

The app and its coordinator run under `immortal run --restart` and are killed in turns. The web server is killed as
well, and restarted here. Each order has an Idempotency-Key and is sent until it is answered. At the end each order must
be in the shop once, with the receipt that the answer named, and no other order: neither those whose handler raised, nor
those whose handler ended its process. The clients of these must have got that error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
from shop import STOCK

from immortal.client import connect
from immortal.coordinator.instances.registry import HOME_VARIABLE, Registry

sys.path.append(str(Path(__file__).resolve().parents[1]))
from supervised import Instance, RunError, conclude

HERE = Path(__file__).parent
NAME = "shop"
ANSWER_TIMEOUT_S = 30.0  # of one HTTP request: above that of a call in web.py
GIVE_UP_S = 60.0  # for one order, from its first request
START_S = 30.0
POLL_S = 0.02
BOOK = "book"
FAILING = ("vase", "firework")  # the handler raises, or ends its process


@dataclass
class Figures:
    """Figures of a run. ``answered``: the receipt of each order."""

    answered: dict[str, int] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)  # orders that were answered with a failure, by item
    repeated: int = 0  # requests that were sent again
    slowest_s: float = 0.0
    kills: list[str] = field(default_factory=list)


class Web:
    """Web server on a socket that stays open here, so that requests wait while it is restarted."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        # uvicorn takes a passed descriptor for a Unix socket and does not set this: answers would be 40 ms late.
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._environment = environment
        self._log = log.open("w")
        self.start()

    def start(self) -> None:
        descriptor = self.listener.fileno()
        command = [sys.executable, "-m", "uvicorn", "web:app", "--fd", str(descriptor), "--log-level", "warning"]
        self.process = subprocess.Popen(
            [*command, "--no-access-log"],
            cwd=HERE,
            env=self._environment,
            stderr=self._log,
            pass_fds=[descriptor],
            process_group=0,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        self._log.close()


async def order(session: aiohttp.ClientSession, url: str, number: str, item: str, figures: Figures) -> None:
    """Place one order, with requests until one is answered. Raises RunError."""
    began_s = time.monotonic()
    headers = {"Idempotency-Key": f"order-{number}"}
    while True:
        try:
            async with session.post(url, json={"order": number, "item": item}, headers=headers) as response:
                answer = await response.json()
                has_failed = item in FAILING and answer.get("type") == "/problems/failed"
                if response.status == 201 or has_failed:
                    if response.status == 201:
                        figures.answered[number] = answer["receipt"]
                    else:
                        figures.failed[item] += 1
                    figures.slowest_s = max(figures.slowest_s, time.monotonic() - began_s)
                    return
                if response.status not in (503, 504):
                    raise RunError(f"order {number}: HTTP status {response.status}: {answer}")
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            pass  # killed during the request: it is unknown if the order was placed, and need not be known
        if time.monotonic() - began_s > GIVE_UP_S:
            raise RunError(f"order {number} had no answer within {GIVE_UP_S:g} s")
        figures.repeated += 1
        await asyncio.sleep(POLL_S)


async def until(condition: object, what: str) -> None:
    """Wait until ``condition`` holds. Raises RunError after START_S."""
    deadline_s = time.monotonic() + START_S
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline_s:
            raise RunError(f"{what} did not come about within {START_S:g} s")
        await asyncio.sleep(POLL_S)


async def kill_all(shop: Instance, web: Web, figures: Figures, roles: list[str], seconds: float) -> None:
    """Kill one process after the other, evenly over the time, each when the last kill is recovered from."""
    for role in roles:
        await asyncio.sleep(seconds / (len(roles) + 1))
        await until(lambda: shop.ready == shop.starts, "a recovery")
        if role == "web server":
            web.kill()
        else:
            starts = shop.starts
            while not shop.kill(role):
                await asyncio.sleep(POLL_S)
            await until(lambda starts=starts: shop.ready > starts, f"a recovery after the kill of the {role}")
        figures.kills.append(role)


async def load(shop: Instance, web: Web, options: argparse.Namespace, roles: list[str]) -> tuple[Figures, float]:
    """Order until the time is over and all kills are done; return the figures and the seconds."""
    figures = Figures()
    await until(lambda: shop.ready, "the first start of the shop")
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=options.connections)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        url = f"{web.url}/orders"
        await order(session, url, "first", BOOK, figures)
        numbers = iter(range(1 << 62))
        source = random.Random(options.seed)
        shares = [100 - options.failing - options.killing, options.failing, options.killing]
        began_s = time.monotonic()
        killing = asyncio.create_task(kill_all(shop, web, figures, roles, options.seconds))

        async def orders() -> None:
            while time.monotonic() - began_s < options.seconds or not killing.done():
                (item,) = source.choices([BOOK, *FAILING], shares)
                await order(session, url, str(next(numbers)), item, figures)

        await asyncio.gather(killing, *(orders() for _ in range(options.connections)))
        return figures, time.monotonic() - began_s


def differences(figures: Figures, orders: dict[str, list[int]], stock: dict[str, int]) -> list[str]:
    """List the differences between the answers and the orders in the shop."""
    found = []
    for number, receipt in figures.answered.items():
        receipts = orders.get(number, [])
        if receipts != [receipt]:
            found.append(f"order {number} was answered with receipt {receipt}, the shop has {receipts}")
    found += [f"order {number} is in the shop and was never answered" for number in orders.keys() - figures.answered]
    receipts = sorted(receipt for one in orders.values() for receipt in one)
    if receipts != list(range(1, len(receipts) + 1)):
        found.append("the receipts are not numbered one by one")
    left = dict.fromkeys([BOOK, *FAILING], STOCK) | {BOOK: STOCK - len(figures.answered)}
    if stock != left:
        found.append(f"the stock is {stock}, it should be {left}")
    return found


def run(options: argparse.Namespace, folder: Path) -> tuple[list[str], str]:
    """Run the load and the kills; return the differences, and a verdict if there are none. Raises RunError."""
    source = random.Random(options.seed)
    roles = [("app", "coordinator")[(index + options.seed) % 2] for index in range(options.kills)]
    roles += ["web server"] * options.web_kills
    source.shuffle(roles)
    home = folder / "registry"
    Registry(home).register(NAME, "tcp://127.0.0.1:*")
    environment = {**os.environ, HOME_VARIABLE: str(home)}
    with ExitStack() as stack:
        shop = Instance(NAME, "shop:Shop", home, HERE, environment)
        stack.callback(shop.end)
        web = Web(environment, folder / "web.log")
        stack.callback(web.end)
        figures, took_s = asyncio.run(load(shop, web, options, roles))
        with connect(NAME, home=home) as instance:
            orders: dict[str, list[int]] = instance.all_orders()
            stock: dict[str, int] = instance.all_stock()
        shop.stop()
    count = len(figures.answered)
    print(
        f"{count:,} orders in {took_s:.1f} s: {count / took_s:,.0f} requests/s over {options.connections} connections"
    )
    print(f"kill -9 of {', '.join(figures.kills) or 'nobody'}")
    if options.failing or options.killing:
        raised, killed = (figures.failed[item] for item in FAILING)
        print(f"besides, {raised:,} orders whose handler raised and {killed:,} that ended their process were told so")
    print(f"{figures.repeated:,} requests were sent again; the slowest order took {figures.slowest_s:.2f} s")
    return differences(figures, orders, stock), "each order was taken once, none was lost"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long at least (default 20)")
    parser.add_argument("--kills", type=int, default=4, help="of the app and its coordinator, by turns (default 4)")
    parser.add_argument("--web-kills", type=int, default=1, help="of the web server (default 1)")
    parser.add_argument("--connections", type=int, default=64, help="orders at a time (default 64)")
    parser.add_argument("--failing", type=float, default=0.0, help="percent of orders whose handler raises (default 0)")
    parser.add_argument(
        "--killing", type=float, default=0.0, help="percent of orders whose handler ends its process (default 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the kills (default 0)")
    options = parser.parse_args()
    if options.seconds <= 0 or options.connections < 1 or min(options.kills, options.web_kills) < 0:
        parser.error("--seconds and --connections are positive, --kills and --web-kills are not negative")
    if min(options.failing, options.killing) < 0 or options.failing + options.killing >= 100:
        parser.error("--failing and --killing are percents, less than 100 together")
    return conclude(partial(run, options), None)


if __name__ == "__main__":
    sys.exit(main())
