"""`immortal serve`: instances over HTTP, with kills of both in between."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import Run, immortal

SHOP = '''
from dataclasses import dataclass
from datetime import date

import immortal
from immortal import Immortal, Personal, impulse, query, rpc


@dataclass
class Item:
    name: str
    count: int = 1


class SoldOut(Exception):
    pass


class Shop(Immortal):
    sold: dict[str, int]

    def __init__(self) -> None:
        self.sold = {}

    @rpc(raises=[SoldOut])
    def order(self, item: Item, day: date) -> dict[str, int]:
        """Take an order.

        It is delivered later.
        """
        if item.count > 100:
            raise SoldOut(item.name)
        self.sold[f"{item.name} {day}"] = self.sold.get(f"{item.name} {day}", 0) + item.count
        return self.sold

    @rpc
    async def approve(self, number: int) -> str:
        return await immortal.event(f"approved {number}", str)

    @rpc
    def decide(self, number: int, by: str) -> None:
        immortal.signal(f"approved {number}", by)

    @rpc
    def post(self, address: Personal[str]) -> int:
        return len(address.value or "")

    @rpc
    def fail(self) -> None:
        raise RuntimeError("the secret is 1234")

    @query
    def total(self, least: int = 0, front: str = "") -> int:
        return sum(count for name, count in self.sold.items() if count >= least and name.startswith(front))

    @impulse
    def hidden(self) -> None:
        pass


class Cart(Immortal, keyed=int):
    items: dict[str, int]

    def __init__(self) -> None:
        self.items = {}

    @rpc
    def add(self, item: str, n: int = 1) -> int:
        self.items[item] = self.items.get(item, 0) + n
        return self.items[item]

    @rpc
    async def wait(self) -> str:
        return f"{immortal.key()} {await immortal.event('go', str)}"

    @rpc
    def go(self, text: str) -> None:
        immortal.signal("go", text)

    @query
    def all(self) -> dict[str, int]:
        return self.items
'''
TEA = {"item": {"name": "tea", "count": 2}, "day": "2026-11-28"}

Answer = tuple[int, Any, dict[str, str]]


class Gateway:
    """A running `immortal serve`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.run = Run(folder, "--port", "0", *options, command="serve")
        url = self.run.line("serves").split()[0]
        self.port = int(url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=40)
        try:
            given = {"Content-Type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), given)
            response = connection.getresponse()
            data = response.read()
            return response.status, json.loads(data), {k.lower(): v for k, v in response.getheaders()}
        finally:
            connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gateway")
    (made / "shop.py").write_text(SHOP)
    return made


@pytest.fixture(scope="module")
def shop(folder: Path) -> Iterator[Run]:
    immortal(folder, "register", "shop", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "shop", "shop:Shop", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()


@pytest.fixture(scope="module")
def gateway(folder: Path, shop: Run) -> Iterator[Gateway]:
    made = Gateway(folder)
    try:
        yield made
    finally:
        made.run.kill()


def total(gateway: Gateway) -> int:
    status, body, _ = gateway.ask("GET", "/shop/total")
    assert status == 200
    return int(body)


def test_calls_and_queries(gateway: Gateway) -> None:
    before = total(gateway)
    assert gateway.ask("POST", "/shop/order", TEA)[:2] == (200, {"tea 2026-11-28": before + 2})
    assert gateway.ask("POST", "/shop/order", [{"name": "rum"}, "2026-01-02"])[0] == 200
    assert gateway.ask("GET", "/shop/total?least=1&front=rum")[:2] == (200, 1)
    assert gateway.ask("POST", "/shop/total", {"front": "rum"})[:2] == (200, 1)


def test_a_personal_value(folder: Path, gateway: Gateway) -> None:
    pytest.importorskip("cryptography")
    assert gateway.ask("POST", "/shop/post", {"address": {"subject": "ann", "value": "plugh"}})[:2] == (200, 5)
    shown = immortal(folder, "log", "show", "shop")
    assert "personal: 'ann'" in shown
    assert "plugh" not in shown


def test_a_call_with_a_key_is_made_once_whatever_is_killed(folder: Path, shop: Run, gateway: Gateway) -> None:
    before = total(gateway)
    first = gateway.ask("POST", "/shop/order", TEA, Idempotency_Key="order 1")
    starts, ready = shop.count("app_pid="), shop.count("ready")
    found = re.search(r"app_pid=(\d+)", shop.line("app_pid=", starts))
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    shop.line("ready", ready + 1)
    other = Gateway(folder, "shop=shop:Shop")
    try:
        again = other.ask("POST", "/shop/order", TEA, Idempotency_Key="order 1")
    finally:
        other.run.kill()
    assert first[0] == again[0] == 200
    assert first[1] == again[1]
    assert total(gateway) == before + 2
    assert gateway.ask("POST", "/shop/order", TEA | {"day": "2026-11-29"}, Idempotency_Key="order 1")[0] == 422


def test_a_call_that_nobody_waits_for_is_found_again(folder: Path, gateway: Gateway) -> None:
    status, body, headers = gateway.ask("POST", "/shop/approve?wait=0", {"number": 1})
    where = headers["location"]
    assert (status, body["status"]) == (202, "waiting")
    other = Gateway(folder)
    try:
        assert other.ask("GET", where)[:2] == (200, {"id": body["id"], "status": "waiting"})
        assert other.ask("GET", f"{where}/result?wait=0.1")[0] == 202
        assert other.ask("POST", "/shop/decide", [1, "ann"])[0] == 200
        assert other.ask("GET", f"{where}/result", Prefer="wait=30")[:2] == (200, "ann")
        assert other.ask("GET", where)[1]["status"] == "done"
    finally:
        other.run.kill()


def test_a_call_is_cancelled(gateway: Gateway) -> None:
    _, _, headers = gateway.ask("POST", "/shop/approve", {"number": 2}, Prefer="respond-async")
    status, body, _ = gateway.ask("DELETE", headers["location"])
    assert (status, body["cancelled"]) == (200, True)
    assert gateway.ask("GET", f"{headers['location']}/result")[:1] == (500,)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "name", "words"),
    [
        ("POST", "/shop/order", {"item": {"name": "x", "count": 101}, "day": "2026-11-28"}, 409, "SoldOut", ""),
        ("POST", "/shop/order", {"item": {"name": 5}, "day": "2026-11-28"}, 422, "arguments", "item: Expected `str`"),
        ("POST", "/shop/order", {"item": {"name": "x"}, "day": "soon"}, 422, "arguments", "day: Invalid"),
        ("POST", "/shop/order", {"item": {"name": "x"}}, 422, "arguments", "'day'"),
        ("POST", "/shop/order", {**TEA, "other": 1}, 422, "arguments", "'other'"),
        ("POST", "/shop/order", [1, 2, 3], 422, "arguments", "argument 1"),
        ("POST", "/shop/post", ["Main Street"], 422, "arguments", 'Expected {"subject": the person\'s ID'),
        ("POST", "/shop/post", [{"subject": "", "value": 1}], 422, "arguments", "the ID of a person was expected"),
        ("POST", "/shop/order", "x", 400, "json", "an object, by name"),
        ("POST", "/shop/nothing", None, 404, "no-handler", "approve, decide, fail, order, post, total"),
        ("POST", "/shop/hidden", None, 404, "no-handler", ""),
        ("POST", "/other/order", None, 404, "no-instance", "shop"),
        ("GET", "/shop/order", None, 405, "method", "POST"),
        ("GET", "/shop/total?least=many", None, 422, "arguments", "least: Expected `int`"),
        ("GET", "/shop/calls/order", None, 404, "no-call", "id"),
        ("GET", "/shop/calls/order:nothing", None, 404, "", ""),
        ("POST", "/shop/order?wait=never", TEA, 400, "wait", "0 to 300"),
        ("GET", "/", None, 404, "request", ""),
        ("POST", "/shop/fail", None, 500, "failed", ""),
    ],
)
def test_what_is_wrong_is_a_problem(
    gateway: Gateway, method: str, path: str, body: Any, status: int, name: str, words: str
) -> None:
    answer = gateway.ask(method, path, body)
    assert (answer[0], "1234" in str(answer[1])) == (status, False), answer
    if name:
        assert answer[2]["content-type"] == "application/problem+json"
        assert answer[1]["type"] == f"/problems/{name}"
    assert words in answer[1].get("detail", "") + answer[1].get("title", "")


def test_a_form_of_another_site_is_refused(gateway: Gateway) -> None:
    status, body, _ = gateway.ask("POST", "/shop/order", TEA, Content_Type="text/plain")
    assert (status, body["type"]) == (415, "/problems/media-type")


def test_a_token_is_asked_for(folder: Path, shop: Run) -> None:
    token = folder / "token"
    token.touch(0o600)
    token.write_text("a token of many characters")
    made = Gateway(folder, "--token-file", str(token))
    try:
        assert made.ask("GET", "/shop/total")[0] == 401
        assert made.ask("GET", "/shop/total", Authorization="Bearer another one")[0] == 401
        assert made.ask("GET", "/shop/total", Authorization=f"Bearer {token.read_text()}")[0] == 200
    finally:
        made.run.kill()


def test_keys_of_two_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path
    (folder / "shop.py").write_text(SHOP)
    runs = []
    for number in (1, 2):
        immortal(folder, "register", f"carts-{number}", "--peer", "tcp://127.0.0.1:*")
        monkeypatch.setenv("IMMORTAL_SHARD", f"{number}/2")
        runs.append(Run(folder, f"carts-{number}", "shop:Cart"))
    try:
        for run in runs:
            run.line("ready")
        made = Gateway(folder, "carts")
        runs.append(made.run)
        headers = {"Idempotency_Key": "one"}
        for key in range(6):
            for _ in range(2):  # the second one is the first one's request again, and of this key alone
                assert made.ask("POST", f"/carts/{key}/add", {"item": "tea", "n": key}, **headers)[:2] == (200, key)
            assert made.ask("GET", f"/carts/{key}/all")[:2] == (200, {"tea": key})
        started = made.ask("POST", "/carts/3/wait?wait=0", {})
        where = started[2]["location"]
        assert where.startswith("/carts/3/calls/wait:")
        assert made.ask("GET", where)[1]["status"] == "waiting"
        assert made.ask("POST", "/carts/4/go", ["for another"])[0] == 200
        assert made.ask("POST", "/carts/3/go", ["now"])[0] == 200
        assert made.ask("GET", f"{where}/result")[:2] == (200, "3 now")
        for key in ("tea", "1%2F2", "1/2"):
            assert made.ask("POST", f"/carts/{key}/add", {"item": "tea"})[0] == 422
        assert made.ask("POST", "/carts/add", {"item": "tea"})[1]["detail"] == "/carts/KEY/HANDLER was expected"
        path = made.ask("GET", "/openapi.json")[1]["paths"]["/carts/{key}/add"]
        assert path["parameters"][0]["schema"] == {"type": "integer"}
        schema = path["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert list(schema["properties"]) == ["item", "n"]
    finally:
        for run in runs:
            run.kill()


def test_the_description(folder: Path, gateway: Gateway) -> None:
    served = gateway.ask("GET", "/openapi.json")[1]
    assert json.loads(immortal(folder, "openapi")) == served
    order = served["paths"]["/shop/order"]["post"]
    assert order["summary"] == "Take an order."
    arguments = order["requestBody"]["content"]["application/json"]["schema"]
    assert arguments["required"] == ["item", "day"]
    assert arguments["properties"]["item"] == {"$ref": "#/components/schemas/Item"}
    assert served["components"]["schemas"]["Item"]["properties"]["count"] == {"type": "integer", "default": 1}
    assert [one["name"] for one in served["paths"]["/shop/total"]["get"]["parameters"]] == ["least", "front"]
    assert "/shop/hidden" not in served["paths"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nobody"], "no instance 'nobody'"),
        (["shop=shop:Nothing"], "has no 'Nothing'"),
        (["--host", "0.0.0.0"], "--tls-cert, --tls-key and --token-file are needed"),
        (["--tls-cert", os.devnull], "go together"),
    ],
)
def test_what_serve_refuses(folder: Path, shop: Run, options: list[str], words: str) -> None:
    status = 2 if options[0].startswith("--") else 1
    assert words in immortal(folder, "serve", "--port", "0", *options, status=status)
