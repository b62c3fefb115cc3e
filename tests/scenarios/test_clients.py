"""Clients, real instances and processes: the guide's programs as they stand there, and what crashes do to calls."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from immortal.client import (
    CallCancelled,
    CallConflict,
    CallRaised,
    CallRefused,
    CallTimeout,
    ClientClosed,
    NotConnectable,
    OutcomeUnknown,
    connect,
    handle,
    start,
    with_key,
    with_timeout,
    with_traceparent,
)
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.clients import client_of

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "clients.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))
DEADLINE_S = 30.0

LEDGER = """
import os
import sys
from datetime import timedelta

import immortal
from immortal import Immortal, query, rpc


class Ledger(Immortal):
    entries: list[str]

    def __init__(self) -> None:
        self.entries = []

    @rpc
    def add(self, entry: str) -> int:
        self.entries.append(entry)
        return len(self.entries)

    @rpc
    def all(self) -> list[str]:
        return self.entries

    @rpc
    async def later(self, entry: str, ms: int) -> int:
        await immortal.sleep(timedelta(milliseconds=ms))
        return await immortal.step(self.add, entry)

    @rpc
    def process_id(self) -> int:
        return os.getpid()

    @query
    def count(self, above: str = "") -> int:
        return sum(entry > above for entry in self.entries)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "ledger.py").write_text(LEDGER)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    return tmp_path


@pytest.fixture
def ledger(folder: Path) -> Iterator[Run]:
    immortal(folder, "register", "ledger", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "ledger", "ledger:Ledger", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()


def pids(run: Run, starts: int = 1) -> tuple[int, int]:
    """Of the coordinator and the app, of that start."""
    found = re.search(r"coordinator_pid=(\d+) app_pid=(\d+)", run.line("app_pid=", starts))
    assert found is not None
    return int(found[1]), int(found[2])


def test_the_programs_of_the_guide(folder: Path) -> None:
    assert sorted(PROGRAMS) == ["counter", "keyed", "later", "many", "plain", "script", "shop", "started", "typed"]
    immortal(folder, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "counter", "counter:Counter", "--restart")
    try:
        run.line("ready")

        def python(*arguments: str) -> str:
            command = [sys.executable, *arguments]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
            assert "Traceback" not in result.stderr, result.stderr
            return result.stdout + result.stderr

        for name in ("plain", "typed", "many"):
            assert python(f"{name}.py") == OUTPUTS[name]
        session = GUIDE.partition("$ python script.py crash\n")[2].partition("```")[0].splitlines()
        assert session == ["crashed", "$ python script.py", "107 108 110", "$ python script.py", "107 108 110"]
        assert python("script.py", "crash") == "crashed\n"
        assert python("script.py") == python("script.py") == "107 108 110\n"
        assert python("keyed.py") == OUTPUTS["keyed"]
        commands = re.findall(r"\$ immortal (call .*)\n(.*)\n", GUIDE)
        assert len(commands) == 3
        for command, output in commands:
            assert immortal(folder, *shlex.split(command)) == f"{output}\n"
        assert "clients" in immortal(folder, "status")
        assert run.stop() == 0
        immortal(folder, "log", "verify", "counter")
    finally:
        run.kill()


def test_the_programs_of_the_guide_that_have_handles(folder: Path) -> None:
    """The instance and each client are other processes each time."""
    immortal(folder, "register", "shop", "--peer", "tcp://127.0.0.1:*")
    for name in ("started", "later", "later"):
        run = Run(folder, "shop", "shop:Shop")
        try:
            run.line("ready")
            command = [sys.executable, f"{name}.py"]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
            assert result.stdout + result.stderr == OUTPUTS[name]
        finally:
            run.kill()


def test_a_call_is_started_once_whatever_crashes(ledger: Run) -> None:
    with connect("ledger") as client:
        first = start(with_key(client, "k").later, "waits", 1_000_000)
        for times, index in ((1, 0), (2, 1)):
            os.kill(pids(ledger, times)[index], signal.SIGKILL)
            ledger.line("ready", times + 1)
            assert first.status() == "waiting"
    with connect("ledger") as client:
        again = start(with_key(client, "k").later, "waits", 1_000_000)
        assert (again.id, again.status()) == (first.id, "waiting") == ("later:k", "waiting")
        with pytest.raises(CallTimeout):
            again.result(0.1)
        assert again.cancel("enough")
    os.kill(pids(ledger, 3)[1], signal.SIGKILL)
    with connect("ledger") as client:
        known = handle(client, first.id)
        assert known.cancel(), "the answer of the first time"
        with pytest.raises(CallCancelled, match="enough"):
            known.result(DEADLINE_S)
        assert known.status() == "done"
        assert client.all() == []


async def _with_asyncio() -> None:
    async with connect("ledger") as client:
        one = await start(client.later, "one", 10)
        two = await start(client.later, "two", 100_000)
        assert await two.status() == "waiting"
        waits = asyncio.create_task(two.result())
        assert await one.result(DEADLINE_S) == 1
        assert await two.cancel("so")
        with pytest.raises(CallCancelled, match="so"):
            await waits
        assert await two.status() == "done"
        nobody = handle(client, "later:nobody")
        assert await nobody.status() == "unknown"
        for ask in (nobody.result, nobody.cancel):
            with pytest.raises(OutcomeUnknown, match="never sent"):
                await ask()
        with pytest.raises(CallRefused, match="has no handler 'nothing'"):
            await start(client.nothing)


def test_handles_with_asyncio(ledger: Run) -> None:
    asyncio.run(_with_asyncio())


def test_what_is_no_handle(ledger: Run) -> None:
    with connect("ledger") as client:
        for wrong in ("", "later", "later:", ":k", "1:k", 5):
            with pytest.raises(TypeError, match="the id of a Handle was expected"):
                handle(client, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a method of what 'with connect"):
            start(print, 5)


def test_a_crash_in_the_middle_is_a_slow_call(ledger: Run) -> None:
    with connect("ledger") as client:
        assert client.add("first") == 1
        for start, index in ((1, 0), (2, 1)):
            results: list[int] = []
            thread = threading.Thread(target=lambda: results.append(client.later("waiting", 200)))  # noqa: B023
            thread.start()
            os.kill(pids(ledger, start)[index], signal.SIGKILL)
            ledger.line("ready", start + 1)
            thread.join(DEADLINE_S)
            assert results == [start + 1]
        assert client.all() == ["first", "waiting", "waiting"]


def test_a_client_that_is_killed_leaves_each_request_done_once(folder: Path, ledger: Run) -> None:
    script = (
        "from immortal.client import connect\n"
        "with connect('ledger', client_id='script') as ledger:\n"
        "    for number in range(300):\n"
        "        ledger.add(f'entry {number}')\n"
        "        print(number, flush=True)\n"
    )
    (folder / "adding.py").write_text(script)
    for upto in (5, 50, 120, None):
        process = subprocess.Popen([sys.executable, "adding.py"], cwd=folder, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if upto is not None and int(line) >= upto:
                process.kill()
                break
        process.stdout.close()
        process.wait(DEADLINE_S)
    with connect("ledger") as client:
        assert client.all() == [f"entry {number}" for number in range(300)]


def test_many_threads_and_one_client(ledger: Run) -> None:
    with connect("ledger") as client:
        results: list[int] = []

        def work(thread: int) -> None:
            for number in range(20):
                results.append(client.add(f"{thread}.{number}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(results) == list(range(1, 161))


def test_a_call_that_does_not_come_back_in_time(ledger: Run) -> None:
    with connect("ledger") as client:
        assert client.all() == []  # it is connected: what takes its time now is the call
        with pytest.raises(CallTimeout, match="may have been done or may still be") as raised:
            with_timeout(client, 0.05).later("late", 400)
        assert raised.value.sent
        assert raised.value.number > 0
        assert raised.value.again(DEADLINE_S) == 1
        assert client.all() == ["late"]


def test_a_request_that_was_never_sent_is_never_done(folder: Path) -> None:
    immortal(folder, "register", "ledger", "--peer", "tcp://127.0.0.1:*")
    with connect("ledger", timeout=0.2) as client:
        with pytest.raises(CallTimeout, match="was never sent, and will not be") as raised:
            client.add("no")
        assert not raised.value.sent
        run = Run(folder, "ledger", "ledger:Ledger")
        try:
            run.line("ready")
            assert with_timeout(client, DEADLINE_S).add("yes") == 1
        finally:
            run.kill()


STOPPED = "'ledger' does not run: 'immortal run ledger' starts it"


def test_a_stopped_instance_says_so_long_before_the_timeout(folder: Path, ledger: Run) -> None:
    with connect("ledger", timeout=None) as client:
        assert client.add("up") == 1
    immortal(folder, "stop", "ledger")
    with connect("ledger", timeout=None) as client, pytest.raises(NotConnectable, match=STOPPED):
        client.add("no")
    with connect("ledger", timeout=None) as client, pytest.raises(NotConnectable, match=STOPPED):
        with_key(client, "k").add("no")
    assert immortal(folder, "call", "ledger", "add", "no", "--timeout", "600", status=1) == f"error: {STOPPED}\n"

    async def main() -> None:
        async with connect("ledger", timeout=None) as client:
            with pytest.raises(NotConnectable, match=STOPPED):
                await client.add("no")
            run = Run(folder, "ledger")
            try:
                run.line("ready")
                assert await client.all() == ["up"]  # it is not given up
            finally:
                run.kill()

    asyncio.run(main())


def test_a_killed_instance_is_waited_for_and_it_is_said(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        client.add("up")
    ledger.kill()
    reason = "no reply of 'ledger' at tcp://.* 'ledger' was killed, and nobody has started it again"
    with connect("ledger", timeout=2.5) as client, pytest.raises(CallTimeout, match=reason):
        client.add("no")


def test_a_client_that_was_there_before_lives_through_a_stop(folder: Path, ledger: Run) -> None:
    with connect("ledger", timeout=DEADLINE_S) as client:
        assert client.add("before") == 1
        immortal(folder, "stop", "ledger")
        with pytest.raises(CallTimeout, match=STOPPED) as raised:
            with_timeout(client, 6.0).add("meanwhile")
        run = Run(folder, "ledger")
        try:
            assert client.add("after") == 2 + raised.value.sent  # before it was known that nobody was there
        finally:
            run.kill()


def test_an_instance_elsewhere_is_only_known_by_its_endpoint(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        reason = f"at {endpoint} within 1 s: somebody listens there, and does not answer .*immortal status far"
        with connect("far", endpoints=[endpoint], timeout=1) as client, pytest.raises(CallTimeout, match=reason):
            client.total()
    reason = f"at {endpoint} within 1 s: nobody listens there"
    with connect("far", endpoints=[endpoint], timeout=1) as client, pytest.raises(CallTimeout, match=reason):
        client.total()


def test_what_can_not_be_done_says_so(ledger: Run) -> None:
    with connect("ledger") as client:
        with pytest.raises(CallRefused, match=r"no handler 'nothing' \(its handlers: add, all, count, later, process"):
            client.nothing()
        with pytest.raises(CallRefused, match=r"Ledger.add: parameter 'entry': Expected .str., got .int."):
            client.add(5)
        with pytest.raises(TypeError, match="need the class"):
            client.add(entry="x")
        with pytest.raises(TypeError, match="can't be encoded"):
            client.add(object())
        assert client.add("still up") == 1
    with pytest.raises(ClientClosed):
        client.add("closed")


def test_a_call_that_waits_while_its_client_is_closed(ledger: Run) -> None:
    errors: list[BaseException] = []
    with connect("ledger") as client:
        client.add("up")

        def wait() -> None:
            try:
                client.later("late", 60_000)
            except ClientClosed as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: control.query(folder_of(ledger), "status")["clients"]["open_requests"] == 1)
    thread.join(DEADLINE_S)
    assert len(errors) == 1


def test_forks_are_done_once_and_the_block_waits_for_them(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        for number in range(200):
            client.add.fork(str(number))
        with_key(client, "k").add.fork("keyed")
        client.later.fork("late", 300)
        os.kill(pids(ledger)[1], signal.SIGKILL)

    async def main() -> list[str]:
        async with connect("ledger") as client:
            client.add.fork("of asyncio")
        async with connect("ledger") as client:
            with_key(client, "k").add.fork("keyed")
            entries: list[str] = await client.all()
            return entries

    entries = asyncio.run(main())
    assert entries == [*map(str, range(200)), "keyed", "late", "of asyncio"]
    with pytest.raises(CallConflict, match=r"key 'k' is Ledger\.add with"), connect("ledger") as client:
        with_key(client, "k").add.fork("another")
    with connect("ledger") as client:
        with pytest.raises(CallConflict, match=r"not a call of Ledger\.all"):
            handle(client, "all:k").result(5)
        assert client.all() == entries


def test_a_fork_that_was_not_done_is_told_as_the_block_ends(ledger: Run) -> None:
    with pytest.raises(CallRefused, match="no handler 'lose'"), connect("ledger") as client:
        client.lose.fork("what")
    with (
        pytest.raises(ClientClosed, match=r"1 calls that were forked to 'ledger' have no reply within 0\.5 s"),
        connect("ledger", timeout=0.5) as client,
    ):
        client.later.fork("late", 60_000)
    with suppress(KeyError), connect("ledger") as client:
        client.lose.fork("what")
        raise KeyError("it goes before")

    async def main() -> None:
        async with connect("ledger") as client:
            client.lose.fork("what")

    with pytest.raises(CallRefused, match="no handler 'lose'"):
        asyncio.run(main())


def folder_of(run: Run) -> Path:
    return Path(os.environ["IMMORTAL_HOME"]) / "ledger"


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_asyncio(ledger: Run) -> None:
    async def main() -> None:
        async with connect("ledger") as client:
            results = await asyncio.gather(*(client.add(str(number)) for number in range(500)))
            assert results == list(range(1, 501))
            with pytest.raises(CallTimeout) as raised:
                await with_timeout(client, 0.05).later("late", 300)
            assert await raised.value.again(DEADLINE_S) == 501
            waiting = asyncio.create_task(client.later("cancelled", 200))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            keyed = [with_key(client, "k").add("keyed") for _ in range(5)]
            assert len(set(await asyncio.gather(*keyed))) == 1
            assert (await client.all()).count("keyed") == 1
        with pytest.raises(ClientClosed):
            await client.add("closed")

    asyncio.run(main())


def test_queries_by_name(ledger: Run) -> None:
    with connect("ledger") as client:
        client.add("a")
        client.add("b")
        assert client.query.count("a") == 1
        assert with_timeout(client, 20).query.count("") == 2
        with pytest.raises(CallRefused, match=r"'add' of 'ledger' is no query \(its queries: count\)"):
            client.query.add("c")
        with pytest.raises(CallRefused, match=r"'ledger' has no query 'nothing' \(its queries: count\)"):
            client.query.nothing()
        with pytest.raises(CallRefused, match="has no handler 'query'"):
            client.query()
        assert client.count("") == 2


def test_queries_with_the_class(ledger: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    service = importlib.import_module("ledger").Ledger
    monkeypatch.delitem(sys.modules, "ledger")
    with connect(service, "ledger") as client:
        client.add("a")
        assert client.query.count(above="") == 1
        with pytest.raises(AttributeError, match=r"Ledger.add is no query \(the queries: count\)"):
            client.query.add("b")
        with pytest.raises(AttributeError, match=r"no query 'nothing' \(its queries: count\)"):
            client.query.nothing()

    async def awaited() -> Any:
        async with connect(service, "ledger") as client:
            return await client.query.count("")

    assert asyncio.run(awaited()) == 1


def test_a_handler_of_ones_own_that_is_called_query(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "asked.py").write_text(
        "from immortal import Immortal, query\n\n\nclass Asked(Immortal):\n"
        "    @query\n    def query(self, what: str) -> str:\n        return what\n"
    )
    service = importlib.import_module("asked").Asked
    monkeypatch.delitem(sys.modules, "asked")
    immortal(folder, "register", "asked", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "asked", "asked:Asked")
    try:
        run.line("ready")
        with connect("asked") as client:
            assert client.query("a") == "a"
            assert client.query.query("b") == "b"
        with connect(service, "asked") as client:
            assert client.query("c") == "c"
    finally:
        run.kill()


def test_the_next_endpoint_is_tried(folder: Path, ledger: Run) -> None:
    peer = re.search(r"peer=(\S+)", ledger.line("coordinator started"))
    assert peer is not None
    immortal(folder, "register", "nobody", "--peer", "tcp://127.0.0.1:*")
    endpoints = [(folder / HOME / "nobody.toml").read_text().split('"')[1], peer[1]]
    with connect("ledger", endpoints=endpoints, timeout=DEADLINE_S) as client:
        assert client.add("found") == 1


def test_heartbeats_when_idle(ledger: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.client.connection.IDLE_POLL_S", 0.05)
    with connect("ledger") as client:
        client.add("up")
        until(lambda: client_of(client).heartbeats >= 3)


def test_without_keys_nobody_comes_in(folder: Path, ledger: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance's own are for its owner; a client of another user has some of its own, if it may call."""
    with connect("ledger") as client:
        client.add("the owner")
    os.rename(folder / HOME / "ledger" / "keys", folder / "taken away")
    with pytest.raises(NotConnectable, match="immortal keys WHO --make --client"), connect("ledger"):
        pass
    with pytest.raises(NotConnectable, match="'web' has no keys"), connect("ledger", identity="web"):
        pass
    assert "made keys" in immortal(folder, "keys", "web", "--make", "--client")
    monkeypatch.setenv("IMMORTAL_IDENTITY", "web")
    with connect("ledger", timeout=DEADLINE_S) as client:
        assert client.all() == ["the owner"]
    settings = folder / HOME / "ledger.toml"
    settings.write_text(f'allow = ["somebody"]\n{settings.read_text()}')
    ledger.line("keys or callers changed", 2)  # the first was of the new client
    with (
        connect("ledger") as client,
        pytest.raises(NotConnectable, match=r"takes no calls of 'web': 'allow' in \S+ledger.toml names somebody"),
    ):
        client.all()
    # Where the settings of the instance can't be read, it says so itself.
    peer = settings.read_text().split('peer = "')[1].split('"')[0]
    server_keys = keys.read_public_keys(folder / HOME / "ledger")
    elsewhere = connect("ledger", endpoints=[peer], server_keys=server_keys, timeout=DEADLINE_S)
    with elsewhere as client, pytest.raises(NotConnectable, match=r"does not let the caller's key in \(.*, of 'web'\)"):
        client.all()
    settings.write_text(settings.read_text().replace('"somebody"', '"web"'))
    with elsewhere as client:  # at once: it is shown again until the instance has looked
        assert client.all() == ["the owner"]


def test_the_instance_is_found_or_it_is_said_why(folder: Path) -> None:
    immortal(folder, "register", "one", "--peer", "tcp://127.0.0.1:*")
    with pytest.raises(NotConnectable, match=r"no instance 'two' in .*: registered are one"), connect("two"):
        pass
    with (
        pytest.raises(NotConnectable, match="is not on this machine and no public key"),
        connect("x", endpoints=["tcp://192.0.2.1:5"]),
    ):
        pass
    with pytest.raises(NotConnectable, match="is no endpoint"), connect("x", endpoints=["here"]):
        pass
    with pytest.raises(TypeError, match="a list of endpoints"):
        connect("x", endpoints="tcp://127.0.0.1:5")
    with pytest.raises(TypeError, match="client_id"):
        connect("x", client_id="")
    assert "there is no instance 'two'" in immortal(folder, "call", "two", "total", status=1)


def test_declared_exceptions_without_the_class(folder: Path) -> None:
    immortal(folder, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "counter", "counter:Counter")
    try:
        run.line("ready")
        with connect("counter") as counter, pytest.raises(CallRaised, match=r"add raised TooMuch\(101\)") as raised:
            counter.add(101)
        assert (raised.value.name, raised.value.arguments) == ("TooMuch", (101,))
        assert "add raised TooMuch(101)" in immortal(folder, "call", "counter", "add", "101", status=1)
        assert f"add raised TooMuch({2**70})" in immortal(folder, "call", "counter", "add", str(2**70), status=1)
        assert "lone surrogate" in immortal(folder, "call", "counter", "add", '"\\ud800"', status=1)
        started = immortal(folder, "call", "counter", "add", "101", "--start", "--key", "k")
        assert started == '"add:k"\n'  # it fails later
    finally:
        run.kill()


def test_a_call_that_is_part_of_a_trace(folder: Path, ledger: Run) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with connect("ledger", traceparent=f"00-{trace}-{parent}-01") as client:
        assert client.add("connected") == 1
        other = f"00-{'5' * 32}-{'6' * 16}-00"
        start(with_key(with_traceparent(client, other), "key").add, "started").result()
        client.add.fork("forked")
    with connect("ledger") as client:
        assert client.all() == ["connected", "started", "forked"]
    immortal(folder, "trace", "export", "ledger", "--otlp", "spans.jsonl")
    parts = [
        part
        for line in (folder / "spans.jsonl").read_text().splitlines()
        for part in json.loads(line)["resourceSpans"]
        if part["resource"]["attributes"][0]["value"]["stringValue"] == "clients"
    ]
    calls = [span for part in parts for span in part["scopeSpans"][0]["spans"] if "parentSpanId" in span]
    assert [(call["name"], call["traceId"], call["parentSpanId"]) for call in calls] == [
        ("call Ledger.add", trace, parent),
        ("call Ledger.add", "5" * 32, "6" * 16),
        ("call Ledger.add", trace, parent),
    ]
    (row,) = immortal(folder, "sql", "select count(*) as n from clients", "--json").splitlines()
    assert json.loads(row) == {"n": 3}
    assert ledger.stop() == 0
    immortal(folder, "log", "verify", "ledger")
