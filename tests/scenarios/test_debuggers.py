"""Debuggers, as a person uses them: `breakpoint()` under `immortal dev`, `replay --break`, and VS Code by debugpy."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.cli import main
from tests.helpers import commands
from tests.helpers.at_terminal import AtTerminal
from tests.helpers.cli import DEADLINE_S
from tests.helpers.dap import DapClient
from tests.helpers.projects import Development, command, immortal, make_project

SHOP = """
import functools
import immortal
from immortal import Immortal, rpc


def price(item: str) -> int:
    return 100


def logged(function):
    @functools.wraps(function)
    def run(self, *arguments):
        return function(self, *arguments)

    return run


class Shop(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    @logged
    def count(self, number: int) -> int:
        self.sold += number
        return self.sold

    @rpc
    async def buy(self, item: str) -> int:
        cents = await self.pay(item)
        total = await immortal.step(self.count, 2)
        await immortal.step(
            lambda: setattr(self, "sold", self.sold + 5)
        )
        return cents + total + self.sold

    async def pay(self, item: str) -> int:
        return await immortal.effect(price, item)
"""
PROJECT = '[services.shop]\napp = "shop:Shop"\n'


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SHOP.split("\n"), 1) if text in line)


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a shop that has sold a tea: the call of `buy` in record 1, the result of its effect in record 2."""
    folder = tmp_path_factory.mktemp("bought")
    make_project(folder, SHOP, PROJECT)
    dev = Development(folder)
    try:
        dev.ready("shop")
        assert immortal(folder, "call", "shop", "buy", '"tea"') == "109\n"
        assert immortal(folder, "call", "shop", "count", "1") == "8\n"
        assert dev.stop() == 0
    finally:
        dev.close()
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def replay(folder: Path, record: int, typed: str) -> str:
    done = commands.run(folder, "replay", "shop", "--to", str(record), "--break", home=".immortal", given=typed)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (1, "cents = await self.pay(item)"),  # the first line of an async handler
        (2, "return await immortal.effect(price, item)"),  # where it goes on
        (3, "return function(self, *arguments)"),  # of a def handler: that of the decorator
    ],
)
def test_break_stops_at_a_line_of_the_users(bought: Path, record: int, line: str) -> None:
    said = replay(bought, record, "p 'sold', self.sold\nc\n")
    first, rest = said.split("(Pdb) ", 1)
    assert re.search(rf"/shop.py\({line_of(line)}\)\w+\(\)\n-> {re.escape(line)}\n$", first), first
    assert rest.count("(Pdb) ") == 1
    assert f"('sold', {7 if record == 3 else 0})" in rest


@pytest.mark.parametrize(
    ("record", "said"), [(1, "Shop.buy('tea')"), (2, "the result of an effect"), (3, "Shop.count(1)")]
)
def test_break_names_the_message_in_the_users_words_and_is_left_in_silence(
    bought: Path, record: int, said: str
) -> None:
    done = commands.run(bought, "replay", "shop", "--to", f"{record}", "--break", home=".immortal", given="q\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"record {record}, message 0: {said}\n")


def test_break_where_no_code_of_the_users_runs_says_so(bought: Path) -> None:
    assert "no line of yours runs there: there was nothing to stop at\n" in replay(bought, 0, "")


def test_break_steps_from_an_await_to_the_function_of_a_step(bought: Path) -> None:
    said = replay(bought, 2, "n\nn\nn\nn\nn\ns\nc\n")
    assert re.findall(r"^-> (.*)", said, re.MULTILINE) == [
        "return await immortal.effect(price, item)",
        "cents = await self.pay(item)",
        "total = await immortal.step(self.count, 2)",
        "await immortal.step(",
        'lambda: setattr(self, "sold", self.sold + 5)',
        "await immortal.step(",
        'lambda: setattr(self, "sold", self.sold + 5)',
    ]
    assert "<lambda>()" in said


def test_a_saved_breakpoint_opens_the_debugger_at_the_next_real_call(tmp_path: Path) -> None:
    make_project(tmp_path, SHOP, PROJECT)
    dev = AtTerminal(command("dev"), tmp_path, {"NO_COLOR": "1"})
    calling: list[subprocess.Popen[str]] = []

    def call(*arguments: str) -> subprocess.Popen[str]:
        calling.append(
            subprocess.Popen(command("call", "shop", *arguments), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        )
        return calling[-1]

    try:
        dev.see("shop ready")
        assert immortal(tmp_path, "call", "shop", "buy", '"tea"') == "109\n"
        (tmp_path / "shop.py").write_text(
            SHOP.replace("        total =", "        breakpoint()\n        total =").replace(
                "        return self.sold", "        breakpoint()\n        return self.sold"
            )
        )
        dev.see("shop restarts with the current code: its replay is the same")
        dev.see("shop ready")
        made = call("count", "1")
        dev.see("-> return self.sold")
        dev.see("(Pdb) ")
        dev.type("p 'it is', 6 * self.sold\n")
        dev.see("('it is', 48)")
        dev.see("(Pdb) ")
        os.kill(app_of(tmp_path), signal.SIGKILL)  # its replay, with the call that is in the log, asks nothing
        dev.see("shop ready")
        assert made.communicate(timeout=DEADLINE_S)[0] == "8\n"
        made = call("buy", '"tea"')
        dev.see("(Pdb) ")
        dev.type("p 'cents', cents\n")
        dev.see("('cents', 100)")
        dev.see("(Pdb) ")
        assert "DIVERGED" not in dev.screen
        assert dev.screen.count("(Pdb)") == 4
    finally:
        dev.close()
        for one in calling:
            one.kill()
            one.communicate()


def app_of(folder: Path) -> int:
    """Process ID of the app of the shop that runs in ``folder``."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if "immortal.appsdk" in (place / "cmdline").read_text() and (place / "cwd").resolve() == folder:
                return int(place.name)
        except OSError:
            continue
    raise AssertionError("no app of the shop runs")


def test_an_editor_attaches_to_a_service_again_after_a_restart_and_leaves_no_trace(tmp_path: Path) -> None:
    waiting = SHOP.replace(
        "    return 100", "    while not os.path.exists('open'):\n        time.sleep(0.01)\n    return 100"
    )
    make_project(tmp_path, f"import os, time\n{waiting}", PROJECT)
    file, port = tmp_path / "shop.py", free_port()
    lines = [
        number for number, line in enumerate(file.read_text().split("\n"), 1) if "(price, item)" in line or "+=" in line
    ]
    dev = Development(tmp_path, "--debugpy", str(port))
    made = None
    try:
        dev.see("debuggers attach at 127.0.0.1:")
        client = DapClient(port, {str(file): lines})
        made = subprocess.Popen(command("call", "shop", "buy", '"tea"'), cwd=tmp_path, stdout=subprocess.PIPE)
        stop = client.stopped()
        assert stop.place == ("pay", lines[1])
        assert (stop.variables()["item"], stop.evaluate("self.sold + 1")) == ("'tea'", "1")
        assert stop.variables("self")["sold"] == "0"
        stop.go_on()
        immortal(tmp_path, "--home", ".immortal", "checkpoint", "shop")
        os.kill(app_of(tmp_path), signal.SIGKILL)
        client.close()
        dev.see("debuggers attach at 127.0.0.1:")  # its handler was rebuilt from the checkpoint
        client = DapClient(port, {str(file): lines})
        (tmp_path / "open").touch()
        stop = client.stopped()
        assert stop.place == ("count", lines[0])
        stop.go_on()
        assert made.communicate(timeout=DEADLINE_S)[0] == b"109\n"
        client.close()
        assert "the same" in immortal(tmp_path, "--home", ".immortal", "verify", "shop")
    finally:
        dev.close()
        if made is not None:
            made.kill()
            made.communicate()


@pytest.mark.parametrize(
    ("record", "place"),
    [(1, ("buy", "cents = await self.pay(item)")), (2, ("pay", "return await immortal.effect(price, item)"))],
)
def test_an_editor_stops_a_replay_at_the_line_of_break(bought: Path, record: int, place: tuple[str, str]) -> None:
    port = free_port()
    process = subprocess.Popen(
        command("--home", ".immortal", "replay", "shop", "--to", str(record), "--debugpy", str(port)),
        cwd=bought,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        client = DapClient(port)
        stop = client.stopped()
        assert stop.place == (place[0], line_of(place[1]))
        assert stop.variables()["item"] == "'tea'"
        assert stop.evaluate("self.sold") == "0"
        if record == 2:
            assert stop.step().place == ("buy", line_of("total = await"))
        stop.go_on()
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert f"to record {record}" in said
        client.close()
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_said(bought: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = immortal(bought, "--home", ".immortal", "replay", "shop", "--to", "1", "--debugpy", port, status=1)
    assert f"--debugpy: 127.0.0.1:{port} can't be listened at: [Errno 98] Address already in use" in said


def test_without_debugpy_it_is_said_what_to_install(bought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.cli.options.find_spec", lambda name: None)
    said = CliRunner().invoke(main, ["replay", "shop", "--to", "1", "--debugpy", "5678"])
    assert said.exit_code == 1
    assert "--debugpy needs debugpy, which is not installed: " in said.output
    assert "'immortal-services[debug]'" in said.output
