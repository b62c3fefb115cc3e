"""The programs of the guide to effects run, their effects for real."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from immortal import store_file
from immortal.appsdk.effects.runner import LocalEffectRunner
from immortal.appsdk.effects.stored_files import STORE_VARIABLE
from immortal.testing import Environment
from tests.helpers.sdk import WAIT_S
from tests.helpers.waiting import WaitingInstances

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "effects.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = {}
    for name, source in PROGRAMS.items():
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        made[name] = module
    assert sorted(made) == ["films", "lookout", "payments"]
    return made


@pytest.fixture
def runner() -> Iterator[LocalEffectRunner]:
    made = LocalEffectRunner(8, print, lambda: 0)
    yield made
    made.stop()


def until(instances: WaitingInstances, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
        instances.settle()


class Bank(HTTPServer):
    """Refuses customers without a name, and is broken now and then."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BankRequest)
        self.receipts: dict[str, str] = {}  # by idempotency key
        self.keys: list[str] = []  # as they came


class BankRequest(BaseHTTPRequestHandler):
    server: Bank

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        self.server.keys.append(key)
        if not asked["customer"]:
            self._answer(402, {})
        elif asked["customer"] == "ann" and self.server.keys.count(key) == 1:
            self._answer(500, {})
        else:
            receipt = self.server.receipts.setdefault(key, f"receipt {len(self.server.receipts) + 1}")
            self._answer(200, {"receipt": receipt})

    def _answer(self, status: int, answer: dict[str, str]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's)
        pass


def test_payments(programs: dict[str, Any], runner: LocalEffectRunner, tmp_path: Path) -> None:
    bank = Bank()
    serving = threading.Thread(target=bank.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    programs["payments"].BANK = f"http://127.0.0.1:{bank.server_port}"
    one = WaitingInstances(tmp_path, {"shop": programs["payments"].Shop}, runner)
    try:
        for number, customer in enumerate(["ann", "bob", ""]):
            one["shop"].impulse("order", number, customer, 500)
        until(one, lambda: len(one.app("shop").orders) == 3)
        orders = one.app("shop").orders
        assert (orders[0].partition(" ")[0], orders[1].partition(" ")[0], orders[2]) == ("paid,", "paid,", "refused")
        one.crash("shop")
        assert one.app("shop").orders == orders
        assert (len(bank.receipts), len(set(bank.keys)), len(bank.keys)) == (2, 3, 4)
    finally:
        bank.shutdown()
        serving.join()
        bank.server_close()
        one.close()


def test_lookout(programs: dict[str, Any], runner: LocalEffectRunner, tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"lookout": programs["lookout"].Lookout}, runner)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        ports = [server.getsockname()[1], closed.getsockname()[1]]
        one["lookout"].impulse("look", "127.0.0.1", ports)
        until(one, lambda: len(one.app("lookout").up) == 2)
    assert one.app("lookout").up == dict(zip(ports, [True, False], strict=True))
    one.close()


def test_a_file_goes_to_the_vault(programs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    (tmp_path / "film").write_text("one\ntwo\n")
    films = programs["films"]
    with Environment() as env:
        vault = env.start(films.Vault, "vault", effects={films.lines_of: films.lines_of})
        camera = env.start(films.Camera, "camera", effects={store_file: store_file})
        camera.call(films.Camera.take, tmp_path / "film")
        assert vault.state.lines == {store_file(tmp_path / "film"): 2}
