"""One instance for all tenants: its state has an entry for each tenant.

A handler sees the data of all tenants, so one handler can work for several of them. They share one log, one process and
its recovery: a tenant with many calls delays the others.
"""

from __future__ import annotations

from immortal import Immortal, query, rpc


class Shop(Immortal):
    left: dict[str, dict[str, int]]  # tenant -> item -> how many

    def __init__(self) -> None:
        self.left = {}

    @rpc
    def deliver(self, tenant: str, item: str, count: int) -> int:
        items = self.left.setdefault(tenant, {})
        items[item] = items.get(item, 0) + count
        return items[item]

    @rpc
    def order(self, tenant: str, item: str, count: int) -> bool:
        items = self.left.get(tenant, {})
        if items.get(item, 0) < count:
            return False
        items[item] -= count
        return True

    @rpc
    def lend(self, lender: str, borrower: str, item: str, count: int) -> bool:
        """Move goods from one tenant to another, completely or not at all."""
        if not self.order(lender, item, count):
            return False
        self.deliver(borrower, item, count)
        return True

    @query
    def total(self, item: str) -> int:
        return sum(items.get(item, 0) for items in self.left.values())
