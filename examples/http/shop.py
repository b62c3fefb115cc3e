"""The service behind the web server: a shop that takes each order once.

immortal register shop --peer 'tcp://127.0.0.1:*'
immortal run shop shop:Shop --restart
"""

from __future__ import annotations

import os
import signal

from immortal import Immortal, rpc

STOCK = 1_000_000_000  # of each item, at first


class SoldOut(Exception):  # noqa: N818 (what happened, not what is wrong)
    """Raised when an order asks for more than there is. Arguments: item, how much there is."""


class Shop(Immortal):
    stock: dict[str, int]
    orders: dict[str, list[int]]  # the receipts of each order; more than one means that it was taken twice
    receipts: int

    def __init__(self) -> None:
        self.stock = {"book": STOCK, "vase": STOCK, "firework": STOCK}
        self.orders = {}
        self.receipts = 0

    @rpc(raises=[SoldOut])
    def place(self, order: str, item: str, count: int = 1) -> int:
        """Take the order; return the number of its receipt."""
        there = self.stock.get(item, 0)
        if there < count:
            raise SoldOut(item, there)
        self.stock[item] = there - count
        self.receipts += 1
        self.orders.setdefault(order, []).append(self.receipts)
        if item == "vase":  # two that fail after all has been changed: nothing of the changes stays
            raise RuntimeError("it broke when it was packed")
        if item == "firework":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.receipts

    @rpc
    def fill(self, item: str, count: int) -> int:
        """Put ``count`` more on the shelf; return how much there is then."""
        self.stock[item] = self.stock.get(item, 0) + count
        return self.stock[item]

    @rpc
    def order(self, order: str) -> list[int]:
        return self.orders.get(order, [])

    @rpc
    def all_stock(self) -> dict[str, int]:
        return self.stock

    @rpc
    def all_orders(self) -> dict[str, list[int]]:
        return self.orders
