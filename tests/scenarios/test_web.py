"""`immortal web` in a real browser, by what a person does there. What instances say is hostile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from immortal.client import connect
from immortal.coordinator.core.interfaces import Transaction
from immortal.log import create_log
from immortal.protocol.batch import encode_batch
from immortal.protocol.messages import encode_incoming_rpc
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from tests.helpers.browser import CHROMIUM, Browser, WebServer, browser, csrf_of
from tests.helpers.cli import DEADLINE_S, HOME, Run, immortal

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e'\"&"
LARGE = "<b>" + "x" * (1 << 20)

SERVICE = """
from datetime import timedelta
from pathlib import Path
from typing import Any

import immortal
from immortal import Immortal, Retry, every, impulse, peer, query, rpc

LONG = timedelta(hours=9)


def post() -> None:
    if not Path("open").exists():
        raise ConnectionError("<b>closed</b>")


class Ledger(Immortal):
    total: int
    lines: dict[str, int]

    def __init__(self) -> None:
        self.total = 0
        self.lines = {}

    @rpc
    def book(self, title: str, amount: int) -> None:
        self.total += amount
        self.lines[title[:80]] = self.lines.get(title[:80], 0) + amount

    @every("2h")
    def close_books(self) -> None:
        pass


class Desk(Immortal):
    ledger = peer(Ledger, "ledger")
    titles: dict[str, int]
    count: int

    def __init__(self) -> None:
        self.titles = {}
        self.count = 0

    @rpc
    def add(self, title: str, amount: int) -> int:
        self.count += 1
        self.titles[title[:80]] = self.titles.get(title[:80], 0) + amount
        self.ledger.book.fork(title, amount)
        return self.count

    @query
    def amount(self, title: str) -> dict[str, int]:
        return {title: self.titles.get(title, 0)}

    @rpc
    def begin(self, who: str) -> None:
        self.ask.fork(who)

    @rpc
    async def ask(self, who: str) -> Any:
        return await immortal.event(f"approval of {who}")

    @rpc
    def send(self, what: str) -> None:
        self.sends.fork()
        for _ in range(2):
            self.refuse.fork(what)

    @rpc
    async def sends(self) -> None:
        await immortal.effect.options(retry=Retry(first_wait=LONG, max_wait=LONG))(post)

    @rpc
    def refuse(self, what: str) -> None:
        raise ValueError(what)
"""


def write_raw_log(folder: Path) -> None:
    """The log of "raw", with messages that no SDK would write: what an app in another language may be sent."""
    add = next(number for (to, number), name in method_names_of(folder).items() if not to and name == "Desk.add")
    messages = [
        encode_incoming_rpc(add, 1, b"\x92\xa4\xff\xfe<b\x05"),  # a text that is no UTF-8
        encode_incoming_rpc(add, 1, b"\x92\xbf"),  # cut off
        encode_incoming_rpc(12345, 1, b"<script>alert(4)</script>\x1b]0;title\x07\x00\xff"),
        encode_incoming_rpc(add, 1, b"\x91" * 3000),  # too deep
    ]
    content = encode_batch(b"".join(messages), len(messages)) + b"".join(messages)
    record = encode_record(7, 0, content)
    source = BatchSource(BatchKind.STREAM, NASTY, 1, len(messages), 1_700_000_000_000_000_000)
    trailer = encode_trailer(Trailer(1_700_000_000_000_000_000, [source]), decode_header(record).check)
    store = create_log(folder / HOME / "raw" / "log", "raw", committer_id=7)
    store.commit(Transaction(records=[(0, record + trailer)], epoch=1, extensions=frozenset()))
    store.close()


def method_names_of(folder: Path) -> dict[tuple[str, int], str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", "-m", "immortal.appsdk.running.inspection", "methods", "desk:Desk"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return {(to, number): name for to, number, name, _ in json.loads(done.stdout)}


class Fleet:
    """Two services that run, one of which waits for somebody, one never started, one with a strange log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "desk.py").write_text(SERVICE)
        for name in ("desk", "ledger", "spare"):
            immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*", "--app", f"desk:{name.capitalize()}")
        immortal(folder, "register", "raw", "--peer", "tcp://127.0.0.1:*", "--app", "desk:Desk")
        write_raw_log(folder)
        self.runs = [Run(folder, name) for name in ("desk", "ledger")]
        for run in self.runs:
            run.line("ready")
        with connect("desk", home=folder / HOME) as desk:
            for number in range(1, 121):
                desk.add(f"book {number % 7}", number)
            desk.add(NASTY, 1)
            desk.add(LARGE, 1)
            desk.begin(NASTY)

    def stop(self) -> None:
        for run in self.runs:
            run.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[WebServer]:
    made = WebServer(fleet.folder)
    yield made
    assert made.stop() == 0
    assert made.said == []


@pytest.fixture(scope="module")
def shown(server: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(server, tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_went_wrong(shown: Browser) -> Iterator[None]:
    shown.errors.clear()
    yield
    assert shown.errors == []
    assert shown.hosts == {shown.server.url.partition("//")[2]}


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


def looks_right(shown: Browser, name: str) -> None:
    """On a desk and on a telephone, by day and by night; and for who listens to it."""
    page = shown.page
    shown.picture(name)
    assert shown.findings() == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="dark")
    try:
        shown.picture(f"{name}-phone")
        assert not shown.is_too_wide()
        assert shown.findings() == []
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 800})


def test_the_fleet(shown: Browser) -> None:
    page = shown.go("/")
    rows = page.locator("tbody tr")
    assert rows.count() == 4
    assert rows.nth(0).locator("td").nth(0).inner_text() == "running"
    assert rows.nth(3).locator("td").nth(0).inner_text() == "not started yet"
    looks_right(shown, "fleet")
    page.get_by_role("link", name="running").click()
    until(lambda: page.locator("tbody tr").count() == 2)
    page.get_by_role("searchbox").fill("LED")
    page.get_by_role("searchbox").press("Enter")
    until(lambda: page.locator("tbody th").all_inner_texts() == ["ledger"])
    page.locator("tbody a").click()
    page.get_by_role("heading", level=1, name="ledger").wait_for()


def test_the_fleet_is_live(shown: Browser, fleet: Fleet) -> None:
    page = shown.go("/?q=desk")
    records = page.locator("tbody td[data-label=Records]")
    before = records.inner_text()
    with connect("desk", home=fleet.folder / HOME) as desk:
        desk.add("live", 1)
    until(lambda: records.inner_text() != before)
    immortal(fleet.folder, "register", "desk2", "--peer", "tcp://127.0.0.1:*")
    until(lambda: page.locator("tbody tr").count() == 2)
    immortal(fleet.folder, "unregister", "desk2")
    until(lambda: page.locator("tbody tr").count() == 1)


def test_the_map_leads_to_who_waits(shown: Browser, fleet: Fleet) -> None:
    shown.go("/").get_by_role("link", name="Map").click()
    page = shown.page
    page.wait_for_url("**/map")
    page.locator(".map .line", has_text="desk to ledger").wait_for(state="attached")
    row = page.locator("tbody tr", has_text="ledger")
    until(lambda: row.locator("td[data-label='Per second']").inner_text() == "0")
    with connect("desk", home=fleet.folder / HOME) as desk:
        desk.add("live", 1)
    until(lambda: row.locator("td[data-label='Per second']").inner_text() != "0")
    looks_right(shown, "map")
    page.locator("#map-desk-waits").press("Enter")
    page.locator(".call", has_text="ask(").wait_for()


def test_an_instance_and_who_waits_in_it(shown: Browser) -> None:
    page = shown.go("/i/desk")
    waiting = page.locator("h2:has-text('Waiting handlers') ~ table >> nth=0 >> tbody tr")
    assert waiting.locator("td[data-label=Handler]").inner_text().startswith("Desk.ask('<script>")
    assert "approval of <script>" in waiting.locator("td[data-label='Waits for']").inner_text()
    assert "desk.py:" in waiting.locator("td[data-label=At]").inner_text()
    streams = page.locator("h2:has-text('Streams') + table tbody tr")
    assert "ledger" in streams.all_inner_texts()[-1]
    clients = page.locator("h2:has-text('Clients') + table tbody tr")
    assert clients.locator("td[data-label=Requests]").all_inner_texts()[-1] == "123"
    looks_right(shown, "instance")
    waiting.get_by_role("link").click()
    page.locator(".call", has_text="ask(").wait_for()
    assert "\\x1b[31m" in page.locator(".call").inner_text()
    looks_right(shown, "handler")


def test_executions_are_looked_for(shown: Browser, fleet: Fleet) -> None:
    immortal(fleet.folder, "executions", "desk", "signal", "approval of x", "--handler", "ask", "--dry-run")
    page = shown.go("/i/desk/executions")
    page.get_by_label("Handler").fill("ask")
    page.get_by_label("State").select_option("waiting")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**handler=ask*")
    assert page.locator("tbody tr").count() == 1
    assert "Desk.ask('<script>" in page.locator("td[data-label=Execution]").inner_text()
    looks_right(shown, "executions")
    page.locator("tbody a").click()
    page.get_by_role("link", name="The state then").wait_for()
    assert "event approval of" in page.locator("tbody").inner_text()
    looks_right(shown, "execution")
    shown.go("/i/desk/executions?where=nonsense")
    assert "such as order=17" in page.locator(".note").inner_text()


def test_what_runs_by_itself(shown: Browser, fleet: Fleet) -> None:
    assert "every 2h" in immortal(fleet.folder, "handlers", "ledger")
    page = shown.go("/i/ledger")
    row = page.locator("h2:has-text('Schedules') + table tbody tr")
    assert row.locator("th").inner_text() == "Ledger.close_books"
    assert row.locator("td[data-label=Schedule]").inner_text() == "every 2h"
    assert row.locator("td[data-label='Next run']").inner_text().startswith("in ")
    looks_right(shown, "schedules")


def test_messages_by_pages(shown: Browser) -> None:
    page = shown.go("/i/desk/messages?limit=20")
    rows = page.locator("tbody tr")
    assert rows.count() == 20
    assert "Desk.ask" in page.locator("tbody").inner_text()
    looks_right(shown, "messages")
    newest = rows.first.locator("th").inner_text()
    page.get_by_role("link", name="Older", exact=True).first.click()
    page.wait_for_url("**before=*")
    older = page.locator("tbody th").all_inner_texts()
    page.get_by_role("link", name="Newer", exact=True).first.click()
    page.wait_for_url("**at=*")
    assert page.locator("tbody th").first.inner_text() == newest
    page.get_by_role("link", name="Oldest", exact=True).first.click()
    page.wait_for_url("**at=0*")
    assert page.locator("tbody th").first.inner_text() == "0:0"
    assert newest not in older


def test_messages_that_are_looked_for(shown: Browser) -> None:
    page = shown.go("/i/desk/messages")
    page.get_by_label("Method").fill("add")
    page.get_by_label("Arguments match").fill(r'"book 3", 1\d\b')
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**re=*")
    found = page.locator("tbody td[data-label=Message]").all_inner_texts()
    assert [one.partition(" as call")[0] for one in found] == ["Desk.add('book 3', 10)", "Desk.add('book 3', 17)"]
    shown.go("/i/desk/messages?size=1000000")
    assert page.locator("tbody tr").count() == 1
    shown.go("/i/desk/messages?latency=100000000")
    assert "No message matches" in page.locator("tbody").inner_text()
    for wrong, why in (
        ("re=(", "is not a regular expression"),
        ("at=x", "a record's number"),
        ("size=-1", "a whole number"),
    ):
        status, text, _ = shown.server.ask(f"/i/desk/messages?{wrong}")
        assert (status, why in text.replace("&#39;", "'")) == (400 if "size" in wrong else 422, True)
    assert [shown.server.ask(f"/i/desk/messages?at={at}")[0] for at in ("2h", "2026-01-31", "3:0")] == [200] * 3


def test_an_expression_that_takes_for_ever_is_ended(shown: Browser) -> None:
    status, text, _ = shown.server.ask("/i/desk/messages?re=(x%2B)%2B%24z")
    assert status == 422
    assert "takes too long" in text


def test_a_message(shown: Browser) -> None:
    page = shown.go("/i/desk/messages?re=script&method=add")
    page.locator("tbody a").click()
    page.wait_for_url("**/m/**")
    assert "<script>alert(1)</script>" in page.locator("pre").first.inner_text()
    assert page.evaluate("window.length") == 0
    assert "instance.add('<script>" in page.locator("#client").inner_text()
    assert "immortal call desk add '\"<script>" in page.locator("#command").inner_text()
    assert 'assert_replays("tests/desk.log", Desk)' in page.locator("#test").inner_text()
    looks_right(shown, "message")
    page.get_by_role("link", name="Next record").click()
    page.wait_for_url("**/m/**")
    assert "1.0 MiB" in page.locator(".facts").inner_text()
    assert len(page.content()) < 100_000
    with page.expect_download() as download:
        page.get_by_role("link", name="all of them as a file").click()
    assert Path(download.value.path()).stat().st_size > 1 << 20
    page = shown.go("/i/ledger/messages?method=book&limit=1&at=1")
    page.locator("tbody a").click()
    page.wait_for_url("**/m/**")
    page.locator(".facts").get_by_role("link", name="desk").click()
    page.wait_for_url("**/i/desk")


def test_a_timeline(shown: Browser) -> None:
    page = shown.go("/i/desk/timeline")
    canvas = page.locator("canvas")
    page.wait_for_function("() => !document.getElementById('timeline').hasAttribute('aria-busy')")
    page.wait_for_load_state("networkidle")
    looks_right(shown, "timeline")
    shown_range = page.locator("#range")
    before = shown_range.inner_text()
    page.get_by_role("button", name="Zoom in").click()
    until(lambda: shown_range.inner_text() != before)
    closer = shown_range.inner_text()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    until(lambda: shown_range.inner_text() != closer)
    page.get_by_role("button", name="All").click()
    until(lambda: shown_range.inner_text() == before)
    box = canvas.bounding_box()
    assert box is not None
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 300, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 50, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    until(lambda: shown_range.inner_text() != before)
    page.get_by_role("link", name="As a list").click()
    page.wait_for_url("**/messages?at=*")
    assert page.locator("tbody tr").count() > 1


def test_no_tab_of_a_narrow_page_is_cut(shown: Browser) -> None:
    usual = shown.page.viewport_size
    shown.page.set_viewport_size({"width": 390, "height": 800})
    try:
        tabs = shown.go("/i/desk/what-if").locator(".tabs a")
        boxes = [tabs.nth(number).bounding_box() for number in range(tabs.count())]
        assert max(box["x"] + box["width"] for box in boxes if box is not None) <= 390
        assert tabs.locator("xpath=self::*[@aria-current]").inner_text() == "What if"
    finally:
        if usual is not None:
            shown.page.set_viewport_size(usual)


def test_a_click_on_the_timeline_opens_a_message(shown: Browser) -> None:
    page = shown.go("/i/ledger/timeline?lanes=ledger&method=book")
    page.wait_for_load_state("networkidle")
    box = page.locator("canvas").bounding_box()
    assert box is not None
    for x in range(108, 1200, 4):
        page.mouse.move(box["x"] + x, box["y"] + 26 + 74 * 0.55)
        if "Ledger.book" in page.locator("#what").inner_text():
            break
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/i/ledger/m/**")


def at(shown: Browser, expression: str) -> str:
    """The moment of the desk where that holds first, by what a person does."""
    page = shown.go("/i/desk/travel?at=1:0")
    page.get_by_label("Python expression").first.fill(expression)
    page.get_by_role("button", name="Next", exact=True).click()
    page.wait_for_url(lambda url: not url.endswith("at=1:0"))
    return page.get_by_role("textbox", name="Record").input_value()


def test_a_moment_and_the_ones_around_it(shown: Browser) -> None:
    place = at(shown, "self.titles.get('book 3') == 13")
    page = shown.page
    changes = page.locator(".changes").inner_text()
    assert "titles['book 3']" in changes
    assert page.locator(".changes ins").all_inner_texts() == ["13", "10"]
    looks_right(shown, "travel")
    url = page.url
    page.get_by_role("link", name="Next message").click()
    page.wait_for_url(lambda now: now != url)  # once it is loaded: before that no script hears the key
    assert "book 4" in page.locator(".changes").inner_text()
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**at={place.partition(':')[0]}*")
    assert "book 3" in page.locator(".changes").inner_text()
    page.locator("#scrub").fill("2")
    page.wait_for_url("**at=2")
    assert "Record 2, message 0" in page.locator(".turns").inner_text()


def test_when_a_value_changed_and_how(shown: Browser) -> None:
    at(shown, "self.titles.get('book 5') == 12 + 5")
    page = shown.page
    page.locator("#next").click()
    page.get_by_role("button", name="When did titles['book 5'] change?").click(force=True)
    answer = page.locator("#answer")
    answer.get_by_role("link").wait_for()
    assert answer.locator("del").inner_text() == "5"
    assert answer.locator("ins").inner_text() == "17"
    page.get_by_role("button", name="Watch count").click(force=True)
    page.locator("#answer svg").wait_for()
    assert "count" in page.locator("#answer figcaption").inner_text()
    looks_right(shown, "travel-watch")
    page.locator("#answer th a").first.click()
    page.wait_for_url("**/travel?at=*")


def test_expressions_and_notes(shown: Browser) -> None:
    page = shown.go("/i/desk/travel?at=3:0")
    page.get_by_label("Python expression").nth(1).fill("[self.count, '<script>alert(3)</script>']")
    page.get_by_role("button", name="Evaluate").click()
    page.locator("#answer .tree").wait_for()
    assert "<script>alert(3)</script>" in page.locator("#answer").inner_text()
    page.get_by_label("Python expression").nth(1).fill("1 / 0")
    page.get_by_role("button", name="Evaluate").click()
    page.locator("#answer", has_text="ZeroDivisionError").wait_for()
    page.get_by_label("Python expression").nth(1).fill("import os")
    page.get_by_role("button", name="Evaluate").click()
    page.locator("#answer", has_text="is no Python expression").wait_for()
    page.get_by_label("Python expression").nth(0).fill("self.count == -1")
    page.get_by_role("button", name="Next", exact=True).click()
    page.locator("#answer", has_text="No such moment").wait_for()
    page.get_by_label("About this moment").fill(NASTY)
    page.get_by_role("button", name="Add note").click()
    page.locator(".notes").wait_for()
    assert "<script>alert(1)</script>" in page.locator(".notes").inner_text()


def test_the_token_is_typed_once_for_what_forms_do(shown: Browser) -> None:
    page = shown.go("/i/desk/travel?at=3:0")
    page.evaluate("sessionStorage.clear()")
    page.reload()
    looks_right(shown, "travel-token")
    page.get_by_label("Python expression").nth(1).fill("6 * 7")
    evaluate = page.locator("form", has=page.get_by_role("button", name="Evaluate"))
    for typed, answer in (("wrong", "the token is wrong"), (shown.server.token, "42")):
        evaluate.get_by_label("Token").fill(typed)
        page.get_by_role("button", name="Evaluate").click()
        page.locator("#answer", has_text=answer).wait_for()
        assert page.get_by_label("Token").first.is_visible() == (typed == "wrong")
    shown.errors.clear()  # the browser notes the status
    page.get_by_label("Python expression").nth(0).fill("self.count == 2")
    page.get_by_role("button", name="Before", exact=True).click()
    page.wait_for_url(lambda url: not url.endswith("at=3:0"))
    page = shown.go("/sql")
    page.get_by_label("Query").fill("select 6 * 7 as n")
    page.get_by_role("button", name="Run").click()
    page.locator("#found td").get_by_text("42", exact=True).wait_for()
    page.evaluate("sessionStorage.setItem('token', JSON.stringify(['wrong', Date.now() + 60000]))")
    shown.go("/i/ledger/what-if")
    assert page.get_by_label("Token").is_hidden()
    page.get_by_label("The new class").fill("desk:Ledger")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("the token is wrong").wait_for()
    shown.errors.clear()
    page = shown.go("/i/ledger/what-if")
    assert page.get_by_label("Token").is_visible()
    shown.log_in(shown.server)


def test_no_address_runs_an_expression(shown: Browser) -> None:
    form = "at=3:0&expression=__import__('os').getpid()"
    for path in ("find", "evaluate"):
        assert shown.server.ask(f"/i/desk/travel/{path}?{form}")[0] == 405
        assert shown.server.ask(f"/i/desk/travel/{path}", "POST", form)[0] == 403
        assert shown.server.ask(f"/i/desk/travel/{path}", "POST", f"{form}&csrf=x")[0] == 403


def test_what_a_message_did_across_services(shown: Browser) -> None:
    page = shown.go("/i/desk/messages?re=book 2&method=add")
    page.locator("tbody a").first.click()
    page.get_by_role("heading", name="What followed").wait_for()
    assert "count" in page.locator(".changes").inner_text()
    looks_right(shown, "message-replayed")
    followed = page.locator("li", has_text="Ledger.book").first
    followed.locator("summary").click()
    followed.get_by_text("It made no message").wait_for()
    page.get_by_role("link", name="In the timeline").click()
    page.wait_for_url("**/timeline?around=*")
    page.wait_for_load_state("networkidle")
    shown_ms = re.search(r", ([0-9.]+) ms$", page.locator("#range").inner_text())
    assert shown_ms is not None
    assert 20 <= float(shown_ms[1]) <= 40  # 20 before it, or less where the log begins later, and 20 behind it
    page.go_back()
    page.get_by_role("heading", name="What followed").wait_for()
    page.locator("li a", has_text="ledger").click()
    page.get_by_role("heading", name="Caused by").wait_for()
    assert "Ledger.book('book 2', 2)" in page.locator(".call").inner_text()
    page.locator("h3:has-text('Caused by') + p a").click()
    page.wait_for_url("**/i/desk/m/**")
    assert "Desk.add('book 2', 2)" in page.locator(".call").inner_text()


def test_a_hostile_state_is_shown_in_part(shown: Browser) -> None:
    page = shown.go("/i/desk/travel")
    assert "<script>alert(1)</script>" in page.locator(".tree").inner_text()
    assert "<b>xxx" in page.locator(".tree").inner_text()
    status, text, _ = shown.server.ask("/i/spare/travel")
    assert (status, "has not been started yet" in text) == (404, True)


def test_what_if_other_code_had_handled_it(shown: Browser, fleet: Fleet) -> None:
    changed = SERVICE.replace("self.ledger.book.fork(title, amount)", "self.ledger.book.fork(title, min(amount, 2))")
    (fleet.folder / "other.py").write_text(changed.replace("self.count += 1", "self.count += 2"))
    page = shown.go("/i/desk/what-if")
    looks_right(shown, "what-if")
    page.get_by_label("The new class").fill("other:Desk")
    page.get_by_role("button", name="Run").click()
    page.wait_for_url("**/what-if/*")
    page.locator(".note.warn strong").wait_for()
    assert "different: " in page.locator(".note.warn strong").inner_text()
    assert "count" in page.locator("h3:has-text('The state at the end') + table").inner_text()
    first = page.locator("h3:has-text('Differences') + table tbody tr").first
    assert first.locator("del").inner_text() != first.locator("ins").inner_text()
    page.reload()
    booked = page.locator("h3:has-text('Differences') + table tr", has_text="'book 3'").first
    assert booked.get_by_role("listitem").all_inner_texts() == ["'book 3'", "3", "'book 3'", "2"]
    assert (booked.locator("del").inner_text(), booked.locator("ins").inner_text()) == ("3", "2")
    looks_right(shown, "what-if-result")
    first.get_by_role("link").click()
    page.wait_for_url("**/travel?at=*")
    shown.go("/i/desk/what-if")
    assert "different: " in page.locator("tbody").inner_text()
    with zipfile.ZipFile(fleet.folder / "desk-2.whl", "w") as wheel:  # under the same name, in another place
        wheel.writestr("desk.py", SERVICE.replace("self.count += 1", "self.count += 3"))
    page.get_by_label("From a folder or wheel").fill("desk-2.whl")
    page.get_by_role("button", name="Run").click()
    page.wait_for_url("**/what-if/*")
    table = page.locator("h3:has-text('The state at the end') + table")
    table.wait_for()
    old, new = table.locator("td").all_inner_texts()
    assert int(new) == 3 * int(old)
    shown.go("/i/desk/what-if")
    page.get_by_label("The new class").fill("nowhere:Desk")
    page.get_by_role("button", name="Run").click()
    page.locator(".note.bad", has_text="nowhere").wait_for()
    status, text, _ = shown.server.ask("/i/desk/what-if/000000000000")
    assert (status, "there is no what-if" in text) == (404, True)
    assert shown.server.ask("/i/desk/what-if/..%2f..%2fdesk")[0] == 404


def test_queries_of_an_instance_that_runs(shown: Browser) -> None:
    page = shown.go("/i/desk")
    page.get_by_role("link", name="Queries").click()
    page.get_by_label("Arguments").fill('["<b>none"]')
    page.get_by_role("button", name="Ask").click()
    assert json.loads(page.locator("#answer").inner_text()) == {"<b>none": 0}
    looks_right(shown, "query")
    for arguments, problem in (("5", "a list of all arguments"), ("[", "is not a JSON"), ("[1]", "Expected `str`")):
        page.get_by_label("Arguments").fill(arguments)
        page.get_by_role("button", name="Ask").click()
        page.get_by_role("alert").get_by_text(problem).wait_for()
    token = csrf_of(shown.server.ask("/i/desk/queries")[1])
    asked = shown.server.ask("/i/desk/queries", "POST", f"csrf={token}&query=add&arguments=[%22a%22,1]")
    assert "is no query (its queries: amount)" in asked[1].replace("&#39;", "'")
    assert shown.server.ask("/i/desk/queries", "POST", "query=amount")[0] == 403
    assert "Its class has no queries" in shown.server.ask("/i/ledger/queries")[1]


def test_sql_over_all_instances(shown: Browser) -> None:
    page = shown.go("/")
    page.get_by_role("link", name="SQL").click()
    looks_right(shown, "sql")

    def ask(query: str, at: str = "", names: str = "") -> None:
        page.get_by_label("Query").fill(query)
        page.get_by_label("As of").fill(at)
        page.get_by_label("Only these instances").fill(names)
        page.get_by_role("button", name="Run").click()

    ask("select d.key, d.value, l.value from desk.titles d join ledger.lines l using (key) where key like 'book%'")
    cells = page.locator("#found tbody tr").first.locator("td")
    cells.first.wait_for()
    key, booked, counted = cells.all_inner_texts()
    assert key.startswith("book ")
    assert int(booked) > 0
    assert booked == counted, "one moment of both"
    page.locator("#cut summary").click()
    assert "desk: " in page.locator("#cut p").inner_text()
    looks_right(shown, "sql-found")
    ask("select key, value from titles_of_nobody", "1", "desk")
    page.get_by_role("alert").get_by_text("there are messages, records").wait_for()
    assert "immortal sql 'select key, value from titles_of_nobody' --instance desk --at 1" in page.content()
    ask("select count(*) as n from desk.titles", "0", "desk")
    page.locator("#found td").get_by_text("0", exact=True).wait_for()
    ask("select arguments_json as \"<i>\" from messages where method = 'add' and kind = 'client'")
    page.locator("#count", has_text="row").wait_for()
    assert "<script>alert(1)</script>" in page.locator("#found").inner_text()
    assert "<i>" in page.locator("#found thead").inner_text()
    assert len(page.content()) < 200_000  # one of them has 1 MiB
    ask("select * from range(1000)")
    page.locator("#count", has_text="500 rows, and there are more").wait_for()
    ask("selec", "x")
    page.get_by_role("alert").get_by_text("a record's number, or a time").wait_for()


def test_a_query_of_the_page_reads_the_tables_and_does_nothing_else(shown: Browser, fleet: Fleet) -> None:
    token = csrf_of(shown.server.ask("/sql")[1])

    def said(query: str) -> str:
        status, text, _ = shown.server.ask("/sql", "POST", f"csrf={token}&query={quote(query)}")
        assert status == 200
        return text.partition('role="alert"')[2].partition("<p")[0].replace("&#39;", "'")

    assert said("select count(*) from messages") == ""
    secret = fleet.folder / "desk.py"
    assert "Permission Error" in said(f"select * from read_text('{secret}')")
    written = fleet.folder / "written.csv"
    assert "one query that only reads" in said(f"copy (select 1) to '{written}'")
    assert not written.exists()
    assert "memory" in said("select string_agg(repeat('x', 1000000) || i, '') from range(2000) t(i)")
    assert shown.server.ask("/sql", "POST", "query=select+1")[0] == 403
    assert "select 1" not in shown.server.ask("/sql?query=select+1")[1]


def test_a_page_that_only_shows(shown: Browser) -> None:
    page = shown.go("/i/desk")
    assert page.get_by_role("link", name="Take a checkpoint").count() == 0
    assert shown.server.ask("/i/desk/do/checkpoint")[0] == 403
    token = csrf_of(shown.server.ask("/i/desk/what-if")[1])
    for path in ("do/checkpoint", "executions/do/cancel"):
        assert shown.server.ask(f"/i/desk/{path}", "POST", f"csrf={token}&ids=1")[0] == 403
    assert "Cancel all found" not in shown.server.ask("/i/desk/executions?state=waiting")[1]


def test_actions(shown: Browser, fleet: Fleet) -> None:
    """Each is confirmed, done, and in the audit log."""
    server = WebServer(fleet.folder, "--allow-actions")
    page, usual = shown.page, shown.server
    try:
        shown.log_in(server)
        page.goto(f"{server.url}/i/desk")
        page.get_by_role("link", name="Take a checkpoint").click()
        looks_right(shown, "action")
        page.get_by_role("button", name="Take it").click()
        page.get_by_text("a checkpoint is requested").wait_for()
        until(lambda: "after record" in server.ask("/i/desk")[1])
        page.goto(f"{server.url}/i/desk")
        page.locator("h2:has-text('Waiting handlers') ~ table >> nth=0 >> tbody a").click()
        page.get_by_role("link", name="Send this event").click()
        page.get_by_label("Value, as JSON").fill("no json")
        page.get_by_role("button", name="Send it").click()
        page.get_by_text("is not JSON").wait_for()
        shown.errors.clear()  # the browser notes the status
        page.go_back()
        page.get_by_label("Value, as JSON").fill('{"yes": true}')
        page.get_by_role("button", name="Send it").click()
        page.locator(".note.good").wait_for()
        with connect("desk", home=fleet.folder / HOME) as desk:
            desk.begin("nobody")
        page.goto(f"{server.url}/i/desk")
        page.locator("h2:has-text('Waiting handlers') ~ table >> nth=0 >> tbody a").click()
        page.get_by_role("link", name="Cancel this handler").click()
        page.get_by_label("Reason").fill("<b>enough</b>")
        page.get_by_role("button", name="Cancel it").click()
        page.locator(".note.good").wait_for()
        with connect("desk", home=fleet.folder / HOME) as desk:
            desk.begin("ann")
            desk.begin("bob")
        until(lambda: "&#39;bob&#39;" in server.ask("/i/desk/executions?state=waiting")[1])
        page.goto(f"{server.url}/i/desk/executions")
        page.get_by_label("State").select_option("waiting")
        page.get_by_label("Handler").fill("ask")
        page.get_by_role("button", name="Show").click()
        looks_right(shown, "executions-actions")
        page.get_by_role("link", name="Terminate all found").click()
        looks_right(shown, "executions-do")
        assert "'ann'" in page.locator("form.confirm").inner_text()
        page.get_by_role("button", name="Terminate").click()
        page.locator(".note.good", has_text="Desk.ask was terminated").wait_for()
        until(lambda: "&#39;bob&#39;" in server.ask("/i/desk/executions?state=terminated")[1])
        page.goto(f"{server.url}/i/desk/executions?state=terminated&text=bob")
        page.locator("tbody th a").click()
        page.get_by_role("button", name="State before and after").click()
        page.get_by_role("heading", name="After its last").wait_for()
        looks_right(shown, "execution-states")
        page.get_by_role("link", name="Restart").click()
        page.get_by_label("Other arguments").fill('["cat"]')
        page.get_by_role("button", name="Restart").click()
        page.locator(".note.good", has_text="Desk.ask has begun again").wait_for()
        assert server.ask("/i/desk/executions/do/cancel?text=nobody-has-it")[0] == 422
        assert server.ask("/i/desk/executions/do/cancel")[0] == 422
        for wrong, status in (("nothing", 404), ("cancel", 400), ("cancel?task=999999", 200)):
            assert server.ask(f"/i/desk/do/{wrong}")[0] == status
        token = csrf_of(server.ask("/i/desk/do/checkpoint")[1])
        assert server.ask("/i/desk/do/cancel", "POST", f"csrf={token}&task=999999")[0] == 409
        assert server.ask("/i/desk/do/cancel", "POST", f"csrf={token}&task=x")[0] == 409
        assert server.ask("/i/spare/do/checkpoint", "POST", f"csrf={token}")[0] == 409
        assert "forget which log" in server.ask("/i/desk/do/reset-peer?peer=ledger")[1]
        audit = immortal(fleet.folder, "audit", "desk")
        for verb in ("verb=checkpoint", "verb=signal", "verb=cancel", "verb=terminate", "verb=restart"):
            assert verb in audit
        assert "by immortal web" in audit
    finally:
        assert server.stop() == 0
        shown.log_in(usual)
        shown.hosts.clear()
        page.goto(usual.url)


def test_pause_an_effect_now_and_single_dead_letters(shown: Browser, fleet: Fleet) -> None:
    server = WebServer(fleet.folder, "--allow-actions")
    page, usual = shown.page, shown.server
    try:
        shown.log_in(server)
        page.goto(f"{server.url}/i/desk")
        page.get_by_role("link", name="Pause").click()
        page.get_by_role("button", name="Pause it").click()
        page.locator(".note.good", has_text="paused; incoming messages are logged").wait_for()
        page.goto(f"{server.url}/i/desk")
        page.locator(".note.warn", has_text="paused by ").wait_for()
        looks_right(shown, "paused")
        page.get_by_role("link", name="Resume").click()
        page.get_by_role("button", name="Resume it").click()
        page.locator(".note.good", has_text="resumed; it was paused by ").wait_for()

        with connect("desk", home=fleet.folder / HOME) as desk:
            desk.send(NASTY)
        until(lambda: "Desk.sends" in server.ask("/i/desk")[1])
        page.goto(f"{server.url}/i/desk")
        page.locator("tr", has_text="Desk.sends").get_by_role("rowheader").get_by_role("link").click()
        until(lambda: page.reload() is not None and page.get_by_role("link", name="Retry now").count() == 1)
        (fleet.folder / "open").touch()
        page.get_by_role("link", name="Retry now").click()
        page.get_by_role("button", name="Retry now").click()
        page.locator(".note.good", has_text="post, for Desk.sends: the next attempt is made now").wait_for()
        until(lambda: "Desk.sends" not in server.ask("/i/desk")[1])

        until(lambda: server.ask("/i/desk/dead-letters")[1].count("Try again") == 2)
        assert "Failed calls <small>the last 2</small>" in server.ask("/i/desk")[1]
        page.goto(f"{server.url}/i/desk/dead-letters")
        assert "ValueError" in page.locator("tbody").inner_text()
        looks_right(shown, "dead-letters")
        page.get_by_role("link", name="Drop").first.click()
        page.get_by_role("button", name="Drop it permanently").click()
        page.locator(".note.good", has_text="the dead letter is dropped").wait_for()
        until(lambda: server.ask("/i/desk/dead-letters")[1].count("Try again") == 1)
        page.goto(f"{server.url}/i/desk/dead-letters")
        before = page.locator("tbody th").inner_text()
        page.get_by_role("link", name="again").click()
        page.get_by_role("button", name="Retry it").click()
        page.locator(".note.good", has_text="1 dead letter retried").wait_for()
        until(lambda: before not in server.ask("/i/desk/dead-letters")[1])
        record, message = before.split(":")
        token = csrf_of(server.ask("/i/desk/do/checkpoint")[1])
        gone = f"csrf={token}&record={record}&message={message}"
        assert server.ask("/i/desk/do/letter-drop", "POST", gone)[0] == 409
        audit = immortal(fleet.folder, "audit", "desk")
        for verb in ("verb=pause", "verb=resume", "verb=retry-effect", "verb=letters-drop", "verb=letters-retry"):
            assert verb in audit
    finally:
        assert server.stop() == 0
        shown.log_in(usual)
        shown.hosts.clear()
        page.goto(usual.url)


def test_a_timeline_of_what_is_looked_for(shown: Browser) -> None:
    whole = "origin=1&from=0&to=9000000000000000"
    asked = f"/i/desk/timeline.json?lanes=desk,ledger&{whole}"
    pattern = quote('book 3", 10]')
    lanes = json.loads(shown.server.ask(f"{asked}&re={pattern}")[1])["lanes"]
    assert [[one[5] for one in lane["messages"]] for lane in lanes] == [["Desk.add"], ["Ledger.book"]]
    ((_, _, time_us, sent_us, sender, *_),) = lanes[1]["messages"]
    assert (sender, sent_us <= time_us) == (0, True)
    assert all(lane["all"] for lane in lanes), "an empty lane tells a window without messages from an empty log"
    status, text, _ = shown.server.ask(f"{asked}&re=(")
    assert (status, "not a regular expression" in text) == (422, True)
    assert json.loads(shown.server.ask(f"/i/desk/timeline.json?lanes=spare&{whole}")[1])["lanes"][0]["problem"]
    assert shown.server.ask("/i/desk/timeline.json?lanes=desk&from=5&to=5")[0] == 400


def test_messages_that_no_sdk_would_write(shown: Browser) -> None:
    page = shown.go("/i/raw/messages")
    rows = page.locator("tbody tr")
    assert rows.count() == 4
    assert "<script>alert(4)</script>\\x1b]0;title\\x07\\x00\\xff" in rows.nth(2).inner_text()
    assert "<script>alert(1)</script>" in rows.nth(2).inner_text()  # who sent it
    for index in range(4):
        page = shown.go(f"/i/raw/m/0/{index}")
        page.locator("[role=alert]", has_text="there is no checkpoint").or_(
            page.locator("[role=alert]", has_text="no checkpoint to begin at")
        ).wait_for()
        assert shown.server.ask(f"/i/raw/m/0/{index}/arguments.json")[0] == 200
    for path in ("/i/raw", "/i/raw/timeline", "/i/raw/what-if", "/i/raw/messages?re=alert"):
        assert shown.server.ask(path)[0] == 200, path
        shown.go(path)
    assert shown.server.ask("/i/raw/travel")[0] == 200


def test_a_page_in_the_background_gives_its_connection_back(shown: Browser) -> None:
    page = shown.go("/i/desk")
    page.evaluate("""() => {
        window.marked = true;
        const hidden = (value) => {
            Object.defineProperty(document, "hidden", { value, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        };
        hidden(true);
        hidden(false);
    }""")
    page.wait_for_function("() => !window.marked")
    page.get_by_role("heading", name="Streams").wait_for()


def test_it_works_by_the_keyboard_alone(shown: Browser) -> None:
    page = shown.go("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "desk":
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/i/desk")


def test_200_instances_in_300_ms(shown: Browser, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / HOME).mkdir(exist_ok=True)
        (tmp_path / HOME / f"s{number:03}.toml").write_text(f'peer = "tcp://127.0.0.1:{20000 + number}"\n')
    server = WebServer(tmp_path)
    try:
        until(lambda: "s199" in server.ask("/")[1])
        times = []
        for _ in range(3):
            begun_s = time.perf_counter()
            assert server.ask("/")[1].count("<tr") == 201
            times.append(time.perf_counter() - begun_s)
        assert min(times) < 0.3
    finally:
        server.stop()
