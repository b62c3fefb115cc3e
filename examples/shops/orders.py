"""The same orders for both shops, and the goods that are left at the end.

cd examples/shops
immortal up && python orders.py; immortal down
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from many import COUNT, place_of

from immortal.client import connect

TENANTS = ("ann", "bob", "cid", "gus", "kim", "max")
LENDER, BORROWER = "ann", "bob"


def main() -> None:
    with ExitStack() as stack:
        names = ["shop", *(f"shops-{number}" for number in range(1, COUNT + 1))]
        shops: dict[str, Any] = {name: stack.enter_context(connect(name)) for name in names}
        for tenant in TENANTS:
            for shop in (shops["shop"], shops[place_of(tenant)]):
                shop.deliver(tenant, "tea", 10)
                shop.order(tenant, "tea", 4)
        for shop in (shops["shop"], shops[place_of(LENDER)]):
            shop.lend(LENDER, BORROWER, "tea", 5)
        totals = {name: shop.total("tea") for name, shop in shops.items()}
        print("one instance:", totals.pop("shop"))
        print("three instances:", " + ".join(map(str, totals.values())), "=", sum(totals.values()))


if __name__ == "__main__":
    main()
