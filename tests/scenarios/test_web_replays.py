"""`immortal web` in a real browser: a what-if for the fleet, and why a value is what it is. Names are hostile."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from msgspec.json import encode

from immortal.coordinator.instances.registry import Registry
from immortal.replay.fleet import player
from immortal.web.orders import FleetOrder, run_fleet_order
from tests.helpers.browser import CHROMIUM, Browser, WebServer, browser, csrf_of
from tests.helpers.cli import HOME
from tests.helpers.recorded import Instances, load_module

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")

NASTY = "<script>alert(1)</script>\x1b[31m\u202e'\"&"

SHOP = """
from immortal import Immortal, impulse, peer, rpc


class Till(Immortal):
    sold: dict[str, int]

    def __init__(self) -> None:
        self.sold = {}

    @rpc
    def sell(self, item: str, count: int) -> None:
        self.sold[item] = self.sold.get(item, 0) + count


class Shop(Immortal):
    till = peer(Till, "till")
    last: str = ""

    @impulse
    def order(self, item: str, count: int) -> None:
        self.last = item
        self.till.sell.fork(item, count)
"""
CHECKS = """
def small(fleet: dict[str, object]) -> bool:
    return all(count < 12 for count in fleet["till"].sold.values())


def odd(fleet: dict[str, object]) -> None:
    assert not fleet["till"].sold, "\\udc80"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the logs of a shop and its till: four orders."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "kiosk.py").write_text(SHOP)
    (folder / "kiosk_v2.py").write_text(SHOP.replace("fork(item, count)", "fork(item, 2 * count)"))
    (folder / "kiosk_checks.py").write_text(CHECKS)
    (folder / "kiosk_slow.py").write_text("import threading\nthreading.Event().wait()\n")
    module, registry = load_module(folder, "kiosk"), Registry(folder / HOME)
    instances = Instances(folder / HOME)
    registry.register("idle", "tcp://127.0.0.1:*", app="kiosk:Till")
    for name, cls in (("till", module.Till), ("shop", module.Shop)):
        registry.register(name, "tcp://127.0.0.1:*", app=f"kiosk:{cls.__name__}")
        shop = instances.start(name, cls)
    for item, count in (("tea", 1), ("tea", 3), (NASTY, 2), ("tea", 5)):
        shop.impulse("order", item, count)
    instances.close()
    return folder


@pytest.fixture(scope="module")
def shown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    server = WebServer(folder)
    with browser(server, tmp_path_factory.mktemp("browser")) as made:
        yield made
    assert server.stop() == 0
    assert server.said == []


@pytest.fixture(autouse=True)
def nothing_went_wrong(shown: Browser) -> Iterator[None]:
    shown.errors.clear()
    yield
    assert shown.errors == []
    assert shown.hosts == {shown.server.url.partition("//")[2]}


def looks_right(shown: Browser, name: str) -> None:
    """On a telephone, on a desk, and on a wide screen; and for who listens to it."""
    for width in (390, 1280, 2560):
        shown.page.set_viewport_size({"width": width, "height": 800})
        shown.picture(f"{name}-{width}")
        assert not shown.is_too_wide()
    shown.page.set_viewport_size({"width": 1280, "height": 800})
    assert shown.findings() == []


def fleet_form(shown: Browser, changes: str) -> Page:
    page = shown.go("/what-if")
    page.get_by_label("Changed services").fill(changes)
    return page


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    page.wait_for_url("**/what-if/*")


def test_a_what_if_for_the_fleet(shown: Browser) -> None:
    shown.go("/").get_by_role("link", name="What if").click()
    page = fleet_form(shown, "shop=kiosk_v2:Shop")
    page.get_by_label("Check of the states").fill("kiosk_checks:small")
    page.get_by_label("Orders to try").fill("2")
    looks_right(shown, "what-if-fleet")
    run(page)
    page.locator(".note.warn strong", has_text="Different.").wait_for()
    looks_right(shown, "what-if-fleet-result")
    page.reload()
    services = page.locator("h3:has-text('Services') + div tbody tr").all_inner_texts()
    assert [row.split("\t")[:4] for row in services] == [
        ["shop (changed code)", "5", "0", "4"],
        ["till", "5", "0", "0"],
    ]
    text = page.locator("main").inner_text()
    assert (
        "the smallest prefix of the input that fails the check only with the change has 4 inputs from outside" in text
    )
    assert "shop, record 1, message 0: Shop.order('tea', 1) -> till: was Till.sell('tea', 1); would be" in text
    assert page.locator(".consequences li").count() == 1
    assert "till\tsold['tea']\t9\t18" in text
    assert "<script>alert(1)</script>\\x1b[31m\\u202e" in text
    widths = page.locator("figure img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert len(widths) == 2
    assert all(widths)
    address = page.url
    page.get_by_role("link", name="Try another").click()
    assert page.get_by_label("Changed services").input_value() == "shop=kiosk_v2:Shop"
    page.get_by_role("table").get_by_role("link").first.click()
    page.wait_for_url(address)
    job = address.rpartition("/")[2]
    assert shown.server.ask(f"/i/shop/what-if/{job}")[0] == 404
    assert shown.server.ask(f"/what-if/{job}/0.svg")[0] == 404  # services have no chart
    assert shown.server.ask(f"/what-if/{job}/99.svg")[0] == 404


def test_its_progress_goes_through_all_orders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(player, "seal_process", lambda limit_s: None)  # which holds as long as a process lives
    told: list[tuple[int, int]] = []
    order = FleetOrder("shop=kiosk_v2:Shop", check="kiosk_checks:odd", seeds="3")
    report = run_fleet_order(str(folder / HOME), order, lambda *one: told.append(one))
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((0, 400), (400, 400))  # the record under the check, then three orders
    assert rb"\\udc80" in encode(report)  # half a character, which JSON can't carry


def test_a_what_if_is_cancelled_and_one_can_not_be_run(shown: Browser) -> None:
    run(page := fleet_form(shown, "shop=kiosk_slow:Shop"))
    page.get_by_role("button", name="Cancel").click()
    page.locator(".note", has_text="Cancelled.").wait_for()
    run(page := fleet_form(shown, "shop=kiosk_checks:Shop"))
    page.locator(".note.bad", has_text="kiosk_checks").wait_for()
    page = fleet_form(shown, "shop=kiosk_v2:Shop")
    page.get_by_label("To, a time").fill("2001-01-01")
    run(page)
    page.locator(".note.bad", has_text="no message up to that time: give a later one").wait_for()


@pytest.mark.parametrize(
    ("field", "typed", "problem"),
    [
        ("changes", "<b>&", "'<b>&': a service and its new class, each once, were expected: shop=shop_v2:Shop"),
        ("changes", "shop=a:A shop=b:B", "'shop=b:B': a service and its new class, each once"),
        ("changes", "nobody=kiosk_v2:Shop", "nobody"),
        ("changes", "idle=kiosk_v2:Shop", "'idle' has not been started yet"),
        ("changes", "shop=kiosk_v2", "names no app"),
        ("changes", " ", "a service and its new class were expected, such as shop=shop_v2:Shop"),
        ("code", "<i>nowhere", "<i>nowhere is neither a folder nor a wheel"),
        ("code", "x" * 5000, "File name too long"),
        ("begin", "<u>yesterday", "'<u>yesterday': a record's number, or a time"),
        ("end", "312", "a time was expected, such as 2026-05-01T12:00, not a record's number"),
        ("effects", "ask", "fail or by-key was expected, not 'ask'"),
        ("check", "small", "'small': a function was expected, as module:function"),
        ("seeds", "0", "a number from 1 to 9999 was expected, not '0'"),
    ],
)
def test_what_is_typed_wrong_is_said_and_kept(shown: Browser, field: str, typed: str, problem: str) -> None:
    csrf = csrf_of(shown.server.ask("/what-if")[1])
    good = {"changes": "shop=kiosk_v2:Shop", "check": "kiosk_checks:small", "effects": "fail"}
    status, text, _ = shown.server.ask("/what-if", "POST", urlencode({**good, field: typed, "csrf": csrf}))
    assert status == 200
    assert problem in unescape(text)
    form = text.partition("<form")[2].partition("</form>")[0]
    assert field == "effects" or escape(typed.strip()) in form
    assert field == "check" or "kiosk_checks:small" in form


def test_only_the_token_starts_one(shown: Browser) -> None:
    """The cookie of who looks is enough for the form, and not for a run."""
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in shown.page.context.cookies())
    headers = {"Cookie": cookie}
    status, text, _ = shown.server.ask("/what-if", headers=headers)
    body = urlencode({"csrf": csrf_of(text), "changes": "shop=kiosk_v2:Shop"})
    headers["Content-Type"] = "application/x-www-form-urlencoded"
    assert (status, shown.server.ask("/what-if", "POST", body, headers)[0]) == (200, 403)


def test_why_a_value_is_what_it_is(shown: Browser) -> None:
    page = shown.go("/i/till/travel")
    page.get_by_role("link", name="Why is sold['tea'] what it is?").first.focus()
    page.keyboard.press("Enter")
    steps = page.locator(".why li")
    steps.first.wait_for()
    looks_right(shown, "why")
    assert (page.locator(".note ins").inner_text(), page.locator(".note del").inner_text()) == ("9", "4")
    newest, oldest, *reads = steps.all_inner_texts()
    assert "till 4:0 Till.sell('tea', 5)" in newest
    assert "in Till.sell\nself.sold[item] = self.sold.get(item, 0) + count" in newest
    assert oldest.startswith("sent by shop 4:0 Shop.order('tea', 5)")
    assert "self.till.sell.fork(item, count)" in oldest
    assert oldest.endswith("from outside: an impulse of shop")
    assert reads[0].startswith("reading sold['tea'], set by till 2:0 Till.sell('tea', 3)")
    page.get_by_role("link", name="Smallest set of inputs").click()
    page.locator("#test", has_text="assert service.state.sold['tea'] == 9").wait_for()
    looks_right(shown, "why-minimal")
    inputs = page.locator("ul > li").all_inner_texts()
    assert inputs == [f"till {record}:0 Till.sell('tea', {count})" for record, count in ((1, 1), (2, 3), (4, 5))]
    steps.get_by_role("link", name="shop 4:0").click()
    page.wait_for_url("**/i/shop/travel?at=4:0")


def test_why_of_a_hostile_value_and_of_none(shown: Browser) -> None:
    page = shown.go("/i/till/travel?at=3:0")
    page.locator(".changes").get_by_role("link", name="Why is").focus()
    page.keyboard.press("Enter")
    page.locator(".why").wait_for()
    assert "<script>alert(1)</script>" in page.locator("h2").inner_text()
    page.locator("h2").get_by_role("link").click()
    page.get_by_role("link", name="Why?").wait_for()
    for path, problem in (("nothing", "has no value at nothing"), ("sold", "")):
        status, text, _ = shown.server.ask(f"/i/till/travel/why?at=4:0&path={path}")
        assert (status, problem in unescape(text)) == (422 if problem else 200, True)
    assert shown.server.ask("/i/till/travel/why?path=sold")[0] == 400
