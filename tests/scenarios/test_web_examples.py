"""The page with the logs of the bank and of the demo, in a real browser: to a cause, and through time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from tests.helpers.browser import CHROMIUM, Browser, WebServer, browser
from tests.helpers.cli import HOME

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium"),
    pytest.mark.timeout(300),  # the whole example runs first
]

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSFERS = 20
RUN_S = 200.0


def run(folder: Path, example: str, program: str, *options: str) -> None:
    """The example's logs, and its modules, in ``folder``."""
    command = [sys.executable, str(EXAMPLES / example / program), *options, "--keep", str(folder / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.move(folder / "kept" / "registry", folder / HOME)
    for module in (EXAMPLES / example).glob("*.py"):
        shutil.copy(module, folder)


@contextmanager
def page_of(folder: Path, browser_folder: Path) -> Iterator[Browser]:
    server = WebServer(folder)
    try:
        with browser(server, browser_folder) as shown:
            yield shown
            assert shown.errors == []
            assert shown.hosts == {server.url.partition("//")[2]}
    finally:
        assert server.stop() == 0
        assert server.said == []


def looks_right(shown: Browser, name: str) -> None:
    shown.picture(name)
    assert shown.findings() == []
    assert not shown.is_too_wide()


def go_to(shown: Browser, name: str, expression: str) -> None:
    """The first moment where that holds."""
    page = shown.go(f"/i/{name}/travel?at=1:0")
    page.get_by_label("Python expression").first.fill(expression)
    page.get_by_role("button", name="Next", exact=True).click()
    page.wait_for_url(lambda url: not url.endswith("at=1:0"))


def ask(shown: Browser, query: str) -> list[str]:
    """The first row of a query of the page of SQL."""
    page = shown.go("/sql")
    page.get_by_label("Query").fill(query)
    page.get_by_role("button", name="Run").click()
    row = page.locator("#found tbody tr").first
    row.wait_for()
    return row.locator("td").all_inner_texts()


def test_the_demo(tmp_path: Path) -> None:
    """The first test: the browser of the others stays open, and a process has one at a time."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 200)
    run(tmp_path, "wordcount", "demo.py", str(text), "--crashes", "0", "--seed", "4")
    with page_of(tmp_path, tmp_path / "browser") as shown:
        assert ask(shown, "select key, value from counter.words order by value desc") == ["the", "400"]
        go_to(shown, "counter", "self.words.get('cat') == 17")
        page = shown.page
        page.get_by_role("button", name="When did words['cat'] change?").click(force=True)
        answer = page.locator("#answer")
        answer.get_by_role("link").wait_for()
        assert (answer.locator("del").inner_text(), answer.locator("ins").inner_text()) == ("16", "17")
        page.get_by_role("button", name="Watch words['the']").click(force=True)
        page.locator("#answer h3", has_text="Changes").wait_for()
        looks_right(shown, "demo-travel")
        page = shown.go("/i/reader/timeline?lanes=reader,counter")
        page.wait_for_function("() => !document.getElementById('timeline').hasAttribute('aria-busy')")
        looks_right(shown, "demo-timeline")
        page = shown.go("/i/counter/messages?limit=20&at=0")
        page.locator("tbody a", has_text="1:").first.click()
        page.get_by_role("heading", name="Caused by").wait_for()
        assert "Counter.count('the cat sat on the mat')" in page.locator(".call").inner_text()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bank")
    run(folder, "bank", "run.py", "--transfers", str(TRANSFERS), "--kills", "0", "--seed", "7")
    return folder


@pytest.fixture(scope="module")
def bank(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with page_of(logs, tmp_path_factory.mktemp("browser")) as shown:
        yield shown


def test_the_banks_and_what_they_have_together(bank: Browser) -> None:
    page = bank.go("/")
    names = page.locator("tbody th").all_inner_texts()  # of a row that is replaced just now, as they are in the source
    assert [name.strip() for name in names] == ["north", "south", "teller", "west"]
    looks_right(bank, "bank-fleet")
    names = ("north", "south", "west")
    entries = " union all ".join(f"select count(*) as n from {name}.entries" for name in names)
    balances = " union all ".join(f"select value from {name}.balances" for name in names)
    money, booked = ask(bank, f"select (select sum(value) from ({balances})), (select sum(n) from ({entries}))")
    assert (int(money), int(booked) > TRANSFERS) == (300_000, True)


def test_from_a_debit_to_the_transfer_that_asked_for_it(bank: Browser) -> None:
    page = bank.go("/i/north/messages?method=debit")
    page.locator("tbody a").last.click()
    page.get_by_role("heading", name="Caused by").wait_for()
    looks_right(bank, "bank-message")
    assert "balances[" in page.locator(".changes").inner_text()
    page.locator("h3:has-text('Caused by') + p a").click()
    page.wait_for_url("**/i/teller/m/**")
    page.get_by_role("heading", name="What followed").wait_for()
    assert "Bank.debit" in page.locator("main").inner_text()
    page.get_by_role("link", name="In the timeline").click()
    page.wait_for_url("**/i/teller/timeline?around=*")
    page.wait_for_function("() => !document.getElementById('timeline').hasAttribute('aria-busy')")
    page.evaluate("""() => {
        window.ticks = [];
        const draw = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            if (y === 11) window.ticks.push(text);
            draw.call(this, text, x, y);
        };
    }""")
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function("() => window.ticks.length > 3")
    ticks = page.evaluate("window.ticks.slice(0, 4)")
    assert len(set(ticks)) == 4, ticks
    looks_right(bank, "bank-timeline")


def test_a_bank_through_time_and_with_a_fee(bank: Browser) -> None:
    go_to(bank, "north", "self.entries")
    assert "entries[" in bank.page.locator(".changes").inner_text()
    looks_right(bank, "bank-travel")
    page = bank.go("/i/north/what-if")
    page.get_by_label("The new class").fill("fees:Bank")
    page.get_by_role("button", name="Run").click()
    page.wait_for_url("**/what-if/*")
    page.locator(".note strong", has_text="different: ").wait_for()
    looks_right(bank, "bank-what-if")
