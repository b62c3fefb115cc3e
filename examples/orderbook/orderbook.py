"""An order book in five equal copies: three traders send orders to five instances, as ordered multicasts.

Each book matches the orders as they arrive, so another order of two of them would make other trades. The books have no
leader, and no single place that all orders pass: only their order is the same everywhere.
"""

from __future__ import annotations

import os
from heapq import heappop, heappush
from zlib import crc32

import immortal
from immortal import Immortal, initial, peer, rpc

ORDERS = int(os.environ.get("ORDERBOOK_ORDERS", "1000"))  # of each trader
NAME = os.environ.get("ORDERBOOK_TRADER", "trader")
ORDERS_PER_TURN = 20
SEEN_EACH = 500  # a book prints how many orders it has seen


class Book(Immortal):
    """Order book. ``bids``, ``asks``: (price, order's number, quantity left), best first; bids have negative prices."""

    bids: list[tuple[int, int, int]]
    asks: list[tuple[int, int, int]]
    orders: int
    traded: int
    checksum: int
    by_trader: dict[str, int]

    def __init__(self) -> None:
        self.bids = []
        self.asks = []
        self.orders = self.traded = self.checksum = 0
        self.by_trader = {}

    @rpc
    def place(self, trader: str, number: int, price: int, quantity: int) -> int:
        """Buy (``quantity`` above 0) or sell (below 0); return the quantity that was traded at once."""
        if number != self.by_trader.get(trader, 0) + 1:
            raise ValueError(f"order {number} of {trader} came after {self.by_trader.get(trader, 0)}")
        self.by_trader[trader] = number
        self.orders += 1
        buys, left = quantity > 0, abs(quantity)
        own, others = (self.bids, self.asks) if buys else (self.asks, self.bids)
        limit = price if buys else -price
        while left and others and others[0][0] <= limit:
            best_price, best_number, best_left = heappop(others)
            done = min(left, best_left)
            left -= done
            self.traded += done
            self.checksum = crc32(f"{best_number} {self.orders} {best_price} {done}".encode(), self.checksum)
            if best_left > done:
                heappush(others, (best_price, best_number, best_left - done))
        if left:
            heappush(own, (-limit, self.orders, left))
        self.checksum = crc32(f"{trader} {number}".encode(), self.checksum)
        if self.orders % SEEN_EACH == 0 or self.orders == 3 * ORDERS:
            print(f"orders: {self.orders}", flush=True)
        return abs(quantity) - left


class Trader(Immortal):
    b1 = peer(Book, "b1")
    b2 = peer(Book, "b2")
    b3 = peer(Book, "b3")
    b4 = peer(Book, "b4")
    b5 = peer(Book, "b5")
    placed: int
    filled: int

    def __init__(self) -> None:
        self.placed = self.filled = 0

    @initial
    def begin(self) -> None:
        self.trade.fork()

    @rpc
    def trade(self) -> None:
        books = immortal.multicast([self.b1, self.b2, self.b3, self.b4, self.b5])
        for _ in range(min(ORDERS_PER_TURN, ORDERS - self.placed)):
            self.placed += 1
            quantity = immortal.random.choice((1, -1)) * immortal.random.randint(1, 9)
            books.place.fork(NAME, self.placed, immortal.random.randint(90, 110), quantity)
        if self.placed < ORDERS:
            self.trade.fork()

    @rpc
    async def buy(self, price: int, quantity: int) -> tuple[int, ...]:
        """Return the quantities that all five books have traded at once: five equal numbers."""
        number = await immortal.step(self.next_number)
        books = immortal.multicast([self.b1, self.b2, self.b3, self.b4, self.b5])
        return await books.place.all(NAME, number, price, quantity)

    @rpc
    def next_number(self) -> int:
        self.placed += 1
        return self.placed
