"""Measures work on large logs: the page, time travel, queries.

    .venv/bin/python -m scripts.benchmarks.large_logs page [--messages N] [--checkpoint-every N] [--keep FOLDER]
    .venv/bin/python -m scripts.benchmarks.large_logs sql [--messages N] [--keep FOLDER]
    .venv/bin/python -m scripts.benchmarks.large_logs fleet [--instances N]

``page``: one instance whose log has N impulses, 500 in a record; `immortal web` is asked for pages of it as a browser
asks. ``sql``: the logs of a made-up fleet of four services, and `immortal sql` as a process: the first query, which
writes the columns, then a count by method. ``fleet``: N instances that run, each in one process with its app, and the
page of all of them. Each figure is the median of several, with the lowest and the highest; the load average is said.
With ``--keep`` the logs stay there, and are used again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.service.process import die_with_parent
from immortal.pipeline.synthetic_logs import Fleet, write_fleet
from tests.helpers.browser import WebServer, csrf_of
from tests.helpers.cli import HOME
from tests.helpers.recorded import Instances, load_module

IN_A_RECORD = 500
TIMES = 9
NAME = "accounts"
SOURCE = """
from immortal import Immortal, impulse


class Accounts(Immortal):
    count: int
    balances: dict[str, int]

    def __init__(self) -> None:
        self.count = 0
        self.balances = {}

    @impulse
    def add(self, who: str, amount: int) -> None:
        self.count += 1
        self.balances[who] = self.balances.get(who, 0) + amount
"""
_ONE = """
import sys

from immortal import Immortal, rpc
from immortal.embedded import start


class Idle(Immortal):
    calls: int

    def __init__(self) -> None:
        self.calls = 0

    @rpc
    def call(self) -> None:
        self.calls += 1


with start(Idle, sys.argv[2], home=sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("page", "sql", "fleet"))
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--checkpoint-every", type=int, default=25_000, help="messages")
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="a folder for the logs, which stay there")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if options.what == "page":
            page(folder, options.messages, options.checkpoint_every)
        elif options.what == "sql":
            sql(folder, options.messages)
        else:
            fleet(folder, options.instances)
    print(f"load average: {' '.join(f'{one:.1f}' for one in os.getloadavg())}")


def measured(what: str, action: Callable[[], object], times: int = TIMES) -> None:
    taken_ms = []
    for _ in range(times):
        begun_s = time.perf_counter()
        action()
        taken_ms.append(1e3 * (time.perf_counter() - begun_s))
    print(f"{what}: {statistics.median(taken_ms):,.0f} ms ({min(taken_ms):,.0f} to {max(taken_ms):,.0f})", flush=True)


# --- one large log ----------------------------------------------------------------------------------------------------


def page(folder: Path, messages: int, checkpoint_every: int) -> None:
    make_log(folder, messages, checkpoint_every)
    server = WebServer(folder)
    try:
        last = messages // IN_A_RECORD
        middle = last // 2 + 7  # not just behind a checkpoint
        at = f"at={middle}:{IN_A_RECORD // 2}"
        place = f"/i/{NAME}"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        token = csrf_of(get(connection, server, f"{place}/travel?{at}"))

        def ask(path: str, form: str = "") -> str:
            return get(connection, server, place + path, f"csrf={token}&{form}" if form else "")

        print(f"{messages:,} messages in {last:,} records, a checkpoint behind each {checkpoint_every:,}")
        measured("the newest 100 messages", lambda: ask("/messages?limit=100"))
        measured("100 messages from the middle", lambda: ask(f"/messages?limit=100&{at}"))
        whole = re.search(r'data-first="(\d+)" data-last="(\d+)"', ask("/timeline"))
        assert whole is not None
        span = f"origin={whole[1]}&from=0&to={int(whole[2]) - int(whole[1])}"
        measured("the timeline of all of it", lambda: ask(f"/timeline.json?lanes={NAME}&{span}"))
        places = iter(range(last // 5, last, last // 25))
        measured("going to a moment", lambda: ask(f"/travel?at={next(places)}:100"))
        steps = iter(range(TIMES))
        measured("one message further", lambda: ask(f"/travel?at={middle}:{next(steps)}"))
        changed = f"/travel/changed?{at}&path={quote(_path('old'))}"
        measured("when did a value change? one of the first record", lambda: ask(changed))
        recent = f"/travel/changed?{at}&path={quote(_path('p7'))}"
        measured("when did a value change? one that changes all the time", lambda: ask(recent))
        wanted = min(messages, middle * IN_A_RECORD + 50_000)
        find = f"{at}&handler=&way=next&expression={quote(f'self.count == {wanted}')}"
        measured("the moment 50,000 messages on where an expression holds", lambda: ask("/travel/find", find), 3)
    finally:
        server.stop()


def _path(who: str) -> str:
    return f"balances[{who!r}]"


def make_log(folder: Path, messages: int, checkpoint_every: int) -> None:
    if (folder / HOME).exists():
        return
    (folder / "made_accounts.py").write_text(SOURCE)
    module = load_module(folder, "made_accounts")
    registry = Registry(folder / HOME)
    registry.register(NAME, "tcp://127.0.0.1:*", app="made_accounts:Accounts", keep_checkpoints="all")
    instances = Instances(registry.home)
    instance = instances.start(NAME, module.Accounts)
    begun_s = time.perf_counter()
    for first in range(0, messages, IN_A_RECORD):
        calls = [("add", (f"p{number % 100}", number)) for number in range(first, first + IN_A_RECORD)]
        if first == 0:
            calls[0] = ("add", ("old", 1))  # written once
        instance.impulses(calls)
        if (first + IN_A_RECORD) % checkpoint_every == 0:
            instance.checkpoint()
    instances.close()
    print(f"the log was made in {time.perf_counter() - begun_s:.0f} s", flush=True)


def get(connection: http.client.HTTPConnection, server: WebServer, path: str, form: str = "") -> str:
    headers = {"Authorization": f"Bearer {server.token}"}
    if form:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    connection.request("POST" if form else "GET", path, form or None, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    if answer.status >= 400:
        raise RuntimeError(f"{path}: {answer.status} {text[:2000]}")
    return text


# --- queries ----------------------------------------------------------------------------------------------------------


def sql(folder: Path, messages: int) -> None:
    home = folder / HOME
    if not home.exists():
        begun_s = time.perf_counter()
        made = Fleet(4, messages)
        write_fleet(home, made)
        registry = Registry(home)
        for name in made.names:
            registry.register(name, "tcp://127.0.0.1:*")
        print(f"the logs were made in {time.perf_counter() - begun_s:.0f} s", flush=True)
    command = [sys.executable, "-P", "-m", "immortal", "--home", str(home), "sql"]

    def ask(query: str) -> str:
        return subprocess.run([*command, query, "--csv"], cwd=folder, check=True, capture_output=True, text=True).stdout

    count = "select method_id, count(*) as calls from messages where rpc_kind = 'call' group by method_id order by 1"
    measured("the first query, which writes the columns", lambda: ask("select count(*) from messages"), 1)
    measured("count by method, the command from start to end", lambda: ask(count), 5)
    print(ask(count).strip())


# --- many instances ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(folder: Path, names: Sequence[str]) -> Iterator[None]:
    registry = Registry(folder / HOME)
    with contextlib.ExitStack() as stack:
        processes = []
        for name in names:
            registry.register(name, "tcp://127.0.0.1:*")
            process = subprocess.Popen(
                [sys.executable, "-c", _ONE, str(registry.home), name],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
            if len(processes) % 4 == 0:
                _ready(processes[-4:])
        _ready(processes[len(processes) // 4 * 4 :])
        yield


def _ready(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("an instance did not start")


def fleet(folder: Path, instances: int) -> None:
    begun_s = time.perf_counter()
    with running(folder, [f"service-{number:03}" for number in range(instances)]):
        print(f"{instances} instances started in {time.perf_counter() - begun_s:.0f} s", flush=True)
        server = WebServer(folder)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            measured("the first page", lambda: get(connection, server, "/"), 1)
            measured("the page of all", lambda: get(connection, server, "/"), 30)
            found = get(connection, server, "/").count("normal")
            print(f"{found} of {instances} are shown as at work")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
