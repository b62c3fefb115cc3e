"""`immortal what-if` for code whose handlers wait: answers go to the calls that they were answers to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.instances.registry import Registry
from tests.helpers.recorded import load_module, write_module
from tests.helpers.waiting import EffectsByHand, WaitingInstances
from tests.scenarios.test_what_if_cli import what_if

SHOP = """
import asyncio
from datetime import timedelta

import immortal
from immortal import Immortal, impulse, peer, rpc


def rate(order: str) -> int:
    return 0


class Stock(Immortal):
    tokens: dict[str, int]

    def __init__(self) -> None:
        self.tokens = {}

    @rpc
    def reserve(self, order: str) -> str:
        return f"reserved {order}"

    @rpc
    def release(self, order: str) -> str:
        return f"released {order}"

    @rpc
    def packed(self, order: str, token: int) -> None:
        self.tokens[order] = token


class Pay(Immortal):
    @rpc
    def charge(self, order: str, amount: int) -> str:
        return f"charged {order} {amount}"


class Orders(Immortal):
    stock = peer(Stock, "stock")
    pay = peer(Pay, "pay")
    done: dict[str, list[str]]

    def __init__(self) -> None:
        self.done = {}

    @impulse
    async def place(self, order: str, amount: int) -> None:
        said = [await self.stock.reserve(order)]
        said += [await self.pay.charge(order, amount), str(await immortal.effect(rate, order))]
        await immortal.sleep(timedelta(hours=amount))
        said += [await self.checked(order), await self.stock.release(order)]
        self.stock.packed.fork(order, immortal.random.randrange(1_000_000))
        await immortal.step(self.note, order, said)

    @rpc
    async def checked(self, order: str) -> str:
        await immortal.sleep(timedelta(hours=1))
        return f"checked {order}"

    @rpc
    def note(self, order: str, said: list[str]) -> None:
        self.done[order] = said
"""

ORDERS = [f"o-{number}" for number in range(6)]
CHARGE = "await self.pay.charge(order, amount)"


class Shop:
    """What the instance ``orders`` has done, in a registry of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = write_module(folder, SHOP)
        module = load_module(folder, self.name)
        effects = EffectsByHand()
        classes = {"orders": module.Orders, "stock": module.Stock, "pay": module.Pay}
        instances = WaitingInstances(folder / "logs", classes, effects)
        orders = instances["orders"]
        orders.impulses([("place", (order, 1 + number % 3)) for number, order in enumerate(ORDERS[:4])])
        orders.checkpoint()
        orders.impulses([("place", (order, 2)) for order in ORDERS[4:]])
        for number, request in enumerate(reversed(effects.waiting)):
            request.returned(number)
            instances.settle()
        orders.checkpoint()
        instances.pass_all_time()
        self.done = dict(orders.app.done)
        self.tokens = dict(instances.app("stock").tokens)
        instances.close()
        registry = Registry(folder / "home")
        registry.register("orders", "tcp://127.0.0.1:*", log=folder / "logs" / "orders" / "log")
        registry.remember_app("orders", f"{self.name}:Orders")

    def values(self, *changes: tuple[str, str], first: int = 1, status: int = 3) -> dict[str, Any]:
        """What `what-if` says of the code with these changes."""
        return json.loads(self.text(*changes, "--json", "--limit", 100, "--from", first, status=status))

    def text(self, *arguments: object, status: int = 3) -> str:
        source = SHOP
        for change in arguments:
            if isinstance(change, tuple):
                assert change[0] in source
                source = source.replace(*change)
        app = f"{write_module(self.folder, source)}:Orders"
        options = [argument for argument in arguments if not isinstance(argument, tuple)]
        return what_if(self.folder, "orders", "--app", app, *options, status=status)[0]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_the_same_code_makes_no_difference(shop: Shop, first: int) -> None:
    assert sorted(shop.done) == ORDERS
    values = shop.values(first=first, status=0)
    assert (values["first"], values["state"], values["unanswered"]) == ([], [], [])


UPGRADED = """
from datetime import timedelta

import {old}

import immortal
from immortal import impulse, upgrades


@upgrades({old}.Orders)
class Orders({old}.Orders, version=2):
    @impulse
    async def place(self, order: str, amount: int) -> None:
        {first}await self.stock.reserve(order)
        await self.pay.charge(order, amount)
        await immortal.effect({old}.rate, order)
        await immortal.sleep(timedelta(hours=amount))
"""


def test_an_upgrade_is_tried_on_what_waits_now_too(shop: Shop) -> None:
    """At the oldest checkpoint nobody waited, so nothing was found; the upgrade itself was then refused."""
    wrong = UPGRADED.format(old=shop.name, first="await immortal.sleep(timedelta(hours=1))\n        ")
    new = f"{write_module(shop.folder, wrong)}:Orders"
    said = what_if(shop.folder, "orders", "--app", new, "--upgrade", status=3)[0].splitlines()
    assert said[-1].startswith("different: the new code can't take over the newest state, with what waits now; ")
    assert any(line.startswith("  from checkpoint 3 on, the newest: the upgrade failed") for line in said)
    right = f"{write_module(shop.folder, UPGRADED.format(old=shop.name, first=''))}:Orders"
    values = json.loads(what_if(shop.folder, "orders", "--app", right, "--upgrade", "--json", status=3)[0])
    assert values["upgrade_now_error"] == ""


def differences(values: dict[str, Any]) -> set[tuple[str, str]]:
    """(kind, the call without its number)"""
    return {(each["kind"], (each["old"] or each["new"]).partition(" as call ")[0]) for each in values["first"]}


# Its random number is another one, since it is drawn after another number of waits.


@pytest.mark.parametrize(("first", "order"), [(1, "o-1"), (2, "o-4")])
def test_a_call_left_out_for_one_order_makes_a_difference_for_that_order_only(
    shop: Shop, first: int, order: str
) -> None:
    values = shop.values((CHARGE, f'"nothing" if order == "{order}" else {CHARGE}'), first=first)
    found = differences(values)
    assert ("missing", f"Pay.charge('{order}', 2)") in found
    assert {call.partition("(")[0] for kind, call in found if kind == "changed"} <= {"Stock.packed"}
    assert all(f"('{order}', " in call for _, call in found)
    assert len(values["first"]) == 2
    assert values["unanswered"] == []
    assert values["state"] == [{"path": f"done['{order}'][1]", "old": f"charged {order} 2", "new": "nothing"}]


def test_another_call_for_one_order_waits_for_what_the_log_does_not_have(shop: Shop) -> None:
    another = (CHARGE, 'await self.pay.charge(order, 99 if order == "o-1" else amount)')
    values = shop.values(another)
    assert differences(values) == {
        ("changed", "Pay.charge('o-1', 2)"),
        ("missing", "Orders.checked('o-1')"),
        ("missing", "Stock.release('o-1')"),
        ("missing", f"Stock.packed('o-1', {shop.tokens['o-1']})"),
    }
    waits_for = "call pay.charge"
    assert values["unanswered"] == [{"handler": "place", "arguments": ["o-1", 2], "waits_for": waits_for}]
    assert {each["path"] for each in values["state"]} == {"done['o-1']", "$waiting"}
    said = shop.text(another).splitlines()
    assert f'place("o-1", 2) waits for an answer that the log does not have: {waits_for}' in said
    head = next(
        number for number, line in enumerate(said) if line.startswith("Orders.place('o-1', 2), which began at ")
    )
    assert all("o-1" in line or "to call " in line for line in said[head + 1 : head + 4]), "calls of one execution"
    assert said[head + 1].startswith("  record ")
    assert any(line.strip() == '$waiting: was absent; would be [place("o-1", 2)]' for line in said)
    assert said[-1] == f"different: 4 calls and the state; {values['equal']:,} calls are the same"


def test_calls_that_are_made_in_another_order_get_their_own_answers(shop: Shop) -> None:
    values = shop.values(
        (
            "said = [await self.stock.reserve(order)]",
            "released, said = await asyncio.gather(self.stock.release(order), self.rest(order, amount))",
        ),
        (
            "        said += [await self.pay",
            "        self.stock.packed.fork(order, 0)\n"
            "        await immortal.step(self.note, order, [*said, released])\n\n"
            "    async def rest(self, order: str, amount: int) -> list[str]:\n"
            "        paid, reserved = await asyncio.gather(\n"
            "            self.pay.charge(order, amount), self.stock.reserve(order)\n"
            "        )\n"
            "        said = [reserved, paid, str(await immortal.effect(rate, order))]\n"
            "        await immortal.sleep(timedelta(hours=amount))\n"
            "        return [*said, await self.checked(order)]\n\n"
            "    async def unused(self, order: str, amount: int, said: list[str]) -> None:\n"
            "        said += [await self.pay",
        ),
    )
    assert values["differences"]["changed"] >= 0
    assert values["state"] == values["unanswered"] == []  # they have all heard the same


def test_an_effect_that_the_log_does_not_have(shop: Shop) -> None:
    values = shop.values(("immortal.effect(rate, order)", 'immortal.effect(rate, order + "x" * (order == "o-3"))'))
    assert {call.partition("('")[2].partition("'")[0] for _, call in differences(values)} == {"o-3"}
    assert [each["waits_for"].partition(" (")[0] for each in values["unanswered"]] == ["effect rate"]


def test_a_timer_more_shifts_no_number(shop: Shop) -> None:
    sleep = "        await immortal.sleep(timedelta(hours=amount))\n"
    more = '        if order == "o-0":\n            await immortal.sleep(timedelta(seconds=1))\n'
    values = shop.values((sleep, more + sleep))
    assert {call.partition("('")[2].partition("'")[0] for _, call in differences(values)} == {"o-0"}
    assert values["unanswered"] == []
