"""The same shop with `count = 3`: each tenant is in one of three instances, by its name.

Three processes work and recover independently. A handler for two tenants can need two instances: it is a handler that
waits, and others see the state between its steps.
"""

from __future__ import annotations

import hashlib

import one

import immortal
from immortal import peer, rpc

COUNT = 3  # as in immortal.toml: another number would look for tenants in the wrong instances


def place_of(tenant: str) -> str:
    """Return the instance of a tenant, the same on each machine and for ever: so not by hash()."""
    return f"shops-{1 + hashlib.sha256(tenant.encode()).digest()[0] % COUNT}"


class Shop(one.Shop):
    first = peer("many:Shop", "shops-1")
    second = peer("many:Shop", "shops-2")
    third = peer("many:Shop", "shops-3")

    @rpc
    async def lend(self, lender: str, borrower: str, item: str, count: int) -> bool:
        """Lend goods; called at the lender's instance. In between nobody has them; they arrive despite any crash."""
        if not await immortal.step(self.order, lender, item, count):
            return False
        shops = {"shops-1": self.first, "shops-2": self.second, "shops-3": self.third}
        await shops[place_of(borrower)].deliver(borrower, item, count)
        return True
