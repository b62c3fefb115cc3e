"""Outbox to PostgreSQL: each order of the state is in a table of your own exactly once.

Use it where others read your orders by SQL. The row's key is the effect's key, the same in each attempt and after each
crash, so a second INSERT changes nothing. The database may be away for days: the handlers wait, and the state is right
meanwhile. Updates go the same way, each as a row of its own, or as an UPDATE whose second run changes nothing.

ORDERS_DATABASE=postgresql://... immortal dev outbox.py
immortal call shop order tea 2
"""

import os

import psycopg

import immortal
from immortal import Immortal, effect_context, rpc

TABLE = "CREATE TABLE IF NOT EXISTS orders (key text PRIMARY KEY, number integer, item text, count integer)"
INSERT = "INSERT INTO orders VALUES (%s, %s, %s, %s) ON CONFLICT (key) DO NOTHING"


def insert(number: int, item: str, count: int) -> None:
    with psycopg.connect(os.environ["ORDERS_DATABASE"], connect_timeout=10) as connection:  # commits at its end
        connection.execute(TABLE)
        connection.execute(INSERT, (effect_context().key, number, item, count))


class Shop(Immortal):
    left: dict[str, int]
    orders: int

    def __init__(self) -> None:
        self.left, self.orders = {"tea": 10}, 0

    @rpc
    async def order(self, item: str, count: int) -> int | None:
        """Return the order's number when it is in the table; None if there is too little."""
        number = await immortal.step(self.take, item, count)
        if number is not None:
            await immortal.effect(insert, number, item, count)
        return number

    def take(self, item: str, count: int) -> int | None:
        if self.left.get(item, 0) < count:
            return None
        self.left[item] -= count
        self.orders += 1
        return self.orders
