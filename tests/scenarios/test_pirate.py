"""Pools whose servers are processes that are killed and stopped; the guide's programs and the example as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from immortal.client import connect as connect_to
from immortal.coordinator.instances.registry import free_port
from immortal.patterns.pirate import GaveUp, Policy, connect, connect_instances
from tests.helpers.cli import HOME, Run, immortal

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "pirate.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))
DEADLINE_S = 30.0
QUICK = Policy(tries=5, try_timeout_s=1.0, heartbeat_s=0.05, silence_s=0.4)
ONE_TRY = Policy(tries=1, try_timeout_s=1.5)  # an instance is asked about a call once a second
FOR_INSTANCES = Policy(tries=5, try_timeout_s=1.5, heartbeat_s=0.1, silence_s=1.0)
SLOWLY = """
    @rpc
    async def slowly(self, ms: int) -> int:
        await immortal.sleep(timedelta(milliseconds=ms))
        return ms
"""

WORKER = """
import os, sys, time
from immortal.patterns.pirate import Request, Server

def work(request: Request) -> bytes:
    if request.body == b"slowly":
        print("begun", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
    count = int(request.rows.get(b"count", b"0")) + 1
    request.rows[b"count"] = b"%d" % count
    return b"%d %d" % (count, os.getpid())

server = Server(work, "tcp://127.0.0.1:*", store="store")
print(server.endpoint, flush=True)
server.run()
"""


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.01)


class Worker:
    """A server process. ``line``: the next that it prints."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        self.endpoint = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def workers(folder: Path, count: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Worker(folder))
            stack.callback(made[-1].end)
        yield made


def test_debits_at_servers_that_die_with_their_replies() -> None:
    command = [sys.executable, str(ROOT / "examples" / "pirate" / "debits.py"), "--debits", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    deaths = re.search(r"(\d+) servers killed with a reply on its way\n1000000 - 60 = 999940: right", done.stdout)
    assert deaths is not None
    assert int(deaths[1]) > 0


def test_debits_end_at_once_where_a_server_can_not_start() -> None:
    script = "import debits, sys, vault; vault.__file__ = '/no/vault.py'; sys.exit(debits.main())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=ROOT / "examples" / "pirate", capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "can't open file '/no/vault.py'" in done.stderr


def test_a_server_that_is_killed_at_work(tmp_path: Path) -> None:
    """The one that works is killed; the other waits for the store, and does it. It is done once."""
    with workers(tmp_path, 2) as (one, two), connect([one.endpoint, two.endpoint]) as pool:
        until(lambda: set(pool.servers.values()) == {"live"})
        replies: list[bytes] = []
        thread = threading.Thread(target=lambda: replies.append(pool.request(b"slowly")))
        thread.start()
        assert one.line() == "begun"
        one.end()
        (tmp_path / "go").touch()
        thread.join(DEADLINE_S)
        assert replies == [b"1 %d" % two.process.pid]
        assert pool.servers[one.endpoint] == "dead"


def test_a_frozen_server_is_found_by_its_silence(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as (one, two), connect([one.endpoint, two.endpoint], policy=QUICK) as pool:
        until(lambda: set(pool.servers.values()) == {"live"})
        one.signal(signal.SIGSTOP)
        until(lambda: pool.servers[one.endpoint] == "dead")
        pids = {pool.request(b"").split()[1] for _ in range(4)}
        assert pids == {b"%d" % two.process.pid}
        one.signal(signal.SIGCONT)
        until(lambda: pool.servers[one.endpoint] == "live")
        assert len({pool.request(b"").split()[1] for _ in range(4)}) == 2


def test_one_that_freezes_at_work_and_goes_on_later_does_nothing_twice(tmp_path: Path) -> None:
    """Its request is sent on once it is killed, or answered by it once it goes on: the store has one writer."""
    with workers(tmp_path, 2) as (one, two), connect([one.endpoint, two.endpoint], policy=QUICK) as pool:
        until(lambda: set(pool.servers.values()) == {"live"})
        with pytest.raises(GaveUp) as raised:
            pool.request(b"slowly", timeout=1.5)
        assert raised.value.tries == {one.endpoint: 1, two.endpoint: 1}
        one.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        one.signal(signal.SIGCONT)
        assert raised.value.again(timeout=DEADLINE_S) == b"1 %d" % one.process.pid
        assert pool.request(b"").split()[0] == b"2"


def free_ports(count: int) -> list[str]:
    taken: set[int] = set()
    for _ in range(count):
        taken.add(free_port(["127.0.0.1"], taken))
    return [str(port) for port in taken]


def in_folder(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "IMMORTAL_HOME": str(folder / HOME), "PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@contextmanager
def banks(folder: Path) -> Iterator[list[Run]]:
    imports = "from datetime import timedelta\n\nimport immortal\n"
    source = PROGRAMS["bank"].replace("from immortal", f"{imports}from immortal", 1)
    (folder / "bank.py").write_text(source + SLOWLY)
    runs: list[Run] = []
    try:
        for name in ("bank-1", "bank-2"):
            immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
            runs.append(Run(folder, name, "bank:Bank", "--restart"))
        for run in runs:
            run.line("ready")
        yield runs
    finally:
        for run in runs:
            run.kill()


def test_the_programs_of_the_guide(tmp_path: Path) -> None:
    assert sorted(PROGRAMS) == ["bank", "client", "script", "tellers", "vault"]
    ports = free_ports(2)
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source.replace("5701", ports[0]).replace("5702", ports[1]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        for port in ports:
            command = [sys.executable, "vault.py", f"tcp://127.0.0.1:{port}"]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
        assert in_folder(tmp_path, "client.py") == OUTPUTS["client"]
        assert in_folder(tmp_path, "script.py", "crash") == "b'999'\ncrashed\n"
        assert in_folder(tmp_path, "script.py") == "b'999'\nb'997'\n"
        stack.enter_context(banks(tmp_path))
        assert in_folder(tmp_path, "tellers.py") == OUTPUTS["tellers"]


def test_instances_are_found_and_each_call_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps and coordinators are killed all along; then a whole instance, and queries go on to the other at once."""
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    with banks(tmp_path) as runs:
        spec = importlib.util.spec_from_file_location("pirate_bank", tmp_path / "bank.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "pirate_bank", module)
        spec.loader.exec_module(module)
        Bank = module.Bank  # noqa: N806
        with connect_instances(Bank, "bank-*", policy=FOR_INSTANCES, timeout=60) as pool:
            for turn in range(8):
                if turn % 2:
                    run = runs[turn // 2 % 2]
                    found = re.findall(r"coordinator_pid=(\d+) app_pid=(\d+)", run.text)[-1]
                    os.kill(int(found[turn // 4]), signal.SIGKILL)
                assert pool.debit(1) > 0
                assert pool.debit(1) > 0
            total = 0
            for name in ("bank-1", "bank-2"):
                with connect_to(Bank, name) as bank:
                    total += bank.total()
            assert total == 16
            with connect_instances(Bank, ["bank-2"], policy=ONE_TRY) as one:
                assert one.slowly(2000) == 2000, "it says that it has the call"
            runs[0].kill()
            with connect_to(Bank, "bank-2") as bank:
                expected = bank.total()
            assert {pool.total() for _ in range(3)} == {expected}
