"""``--strict``, ``--trace`` and ``--break`` of an app, over a real socket, the latter two against a scripted replay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from immortal import Immortal, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.options import RunOptions
from immortal.appsdk.running.runner import run_connection
from immortal.errors import EXIT_HANDLER_FAILED, EXIT_INTERRUPTED, EXIT_NOT_RUNNABLE, HandlerError
from immortal.protocol.extensions import decode_handler_failed, decode_origins
from immortal.protocol.messages import MessageType
from tests.helpers.sdk import GOODBYE, WAIT_S, ScriptedCoordinator, coordinator
from tests.helpers.wire import call, logged


class Counter(Immortal):
    @rpc(id=1)
    def count(self, line: str) -> None: ...


class Relay(Immortal):
    counter = peer(Counter, "counter")

    @rpc(id=1)
    def line(self, text: str) -> None:
        self.counter.count.fork(text)
        if text == "bad":
            raise ValueError("bad line")


def test_a_failure_is_told_behind_all_that_was_sent() -> None:
    """More than the buffers of both ends: the app must not leave before it is taken."""
    count = 2_000

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "x" * 10_000)] * count + [call(1, "bad"), call(1, "never")]))
        it.read_until(lambda output: output.messages[-1].message_type == MessageType.HANDLER_FAILED)
        assert it.connection.recv(1) == b""

    with coordinator(script) as it, pytest.raises(HandlerError, match="bad line"):
        run_connection(definition_of(Relay), it.address, options=RunOptions(trace=True))
    assert it.output.calls_count == count + 1
    failure = decode_handler_failed(it.output.messages[-1].data)
    assert (failure.sequence_id, failure.message_index) == (1, count)
    assert "ValueError: bad line" in failure.text
    origins = [sent.data for sent in it.output.messages if sent.message_type == MessageType.ORIGINS]
    made = [(run.sequence_id, run.message_index, run.count) for data in origins for run in decode_origins(data)]
    assert made == [(1, index, 1) for index in range(count + 1)]


def test_without_a_trace_nothing_is_told() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "bad")]))
        with pytest.raises((EOFError, ConnectionError)):
            it.read_until(lambda output: False)

    with coordinator(script) as it, pytest.raises(HandlerError):
        run_connection(definition_of(Relay), it.address)
    assert not {MessageType.ORIGINS, MessageType.HANDLER_FAILED} & {sent.message_type for sent in it.output.messages}


# --- the process ------------------------------------------------------------------------------------------------------

PROGRAM = """
import time
from immortal import Immortal, peer, rpc

class Total(Immortal):
    @rpc(id=1)
    def add(self, lines: int) -> None: ...

class Counter(Immortal):
    total = peer(Total, "total")
    lines: int

    def __init__(self) -> None:
        self.lines = 0

    @rpc(id=1)
    def count(self, line: str) -> None:
        self.lines += 1
        self.total.add.fork(self.lines)

class Careless(Counter):
    tags: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.tags = set()

    @rpc(id=1)
    def count(self, line: str) -> None:
        self.lines = int(time.time())
        for tag in self.tags:
            print(tag)
"""


def run_app(
    folder: Path,
    target: str,
    script: ScriptedCoordinator | None,
    *options: str,
    stdin: str = "",
    module: str = "wordcount",
    **variables: str,
) -> tuple[int, str, str]:
    """The exit status of ``python -m immortal.appsdk``, its output and what it said on stderr."""
    (folder / "wordcount.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IMMORTAL_")}
    environment |= {"PYTHONHASHSEED": "0", **variables}
    if script is not None:
        script.start()
        environment["IMMORTAL_APP_ADDRESS"] = script.address
    command = [sys.executable, "-m", "immortal.appsdk", f"{module}:{target}", *options]
    app = subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    if script is not None:
        script.join(WAIT_S)
        assert script.error is None, (script.error, app)
    return app.returncode, app.stdout, app.stderr


def test_output_that_can_not_be_written_fails_nobody(tmp_path: Path) -> None:
    """On a full disk each call with a print failed, also in a recovery, which then could not go on."""
    (tmp_path / "talker.py").write_text(f"print('in the module')\n{PROGRAM}")
    command = [sys.executable, "-m", "immortal.appsdk", "talker:Counter"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IMMORTAL_")}
    with open("/dev/full", "w") as full:
        app = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "no address of a coordinator" in app.stderr, "it came past the import"
    assert "No space left" not in app.stderr


def replay(it: ScriptedCoordinator) -> None:
    it.start_first()
    it.send(logged(1, [call(1, "a b")] * 3) + logged(2, [call(1, "c d")] * 3))
    it.read_until(lambda output: output.calls_count == 6)
    it.send(GOODBYE)


def test_a_break(tmp_path: Path) -> None:
    debugger = "p ('in', self.lines, line)\nn\np ('then', self.lines)\nc\n"
    it = ScriptedCoordinator(replay)
    status, output, errors = run_app(tmp_path, "Counter", it, "--break", "2:1", stdin=debugger)
    assert (status, errors) == (0, "")
    assert output.startswith("record 2, message 1: Counter.count('c d')\n")
    assert "-> self.lines += 1" in output
    assert "('in', 4, 'c d')" in output
    assert "('then', 5)" in output
    assert output.count("(Pdb) ") == 4  # it stops once
    assert [arguments for _, _, arguments in it.output.calls] == [(number,) for number in range(1, 7)]


def test_a_break_in_the_environment_with_a_trace_and_the_debugger_left(tmp_path: Path) -> None:
    def until_closed(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "a b")] * 3))
        with pytest.raises((EOFError, ConnectionError)):
            it.read_until(lambda output: False)

    it = ScriptedCoordinator(until_closed)
    status, output, errors = run_app(tmp_path, "Counter", it, "--trace", stdin="q\n", IMMORTAL_BREAK="1")
    assert (status, errors) == (EXIT_INTERRUPTED, "")
    assert output.startswith("record 1, message 0: Counter.count('a b')\n")


def test_a_break_that_never_comes(tmp_path: Path) -> None:
    status, output, errors = run_app(tmp_path, "Counter", ScriptedCoordinator(replay), "--break", "2:3")
    assert (status, output) == (0, "")
    assert errors == "app Counter: record 2, message 3 did not come: there was nothing to stop at\n"


def test_an_error_under_the_debugger_is_the_handlers(tmp_path: Path) -> None:
    def failing(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "a b")]))
        it.read_until(lambda output: output.messages[-1].message_type == MessageType.HANDLER_FAILED)

    it = ScriptedCoordinator(failing)
    debugger = "self.lines = None\nc\n"
    status, _, errors = run_app(tmp_path, "Counter", it, "--break", "1", stdin=debugger, IMMORTAL_TRACE="1")
    assert status == EXIT_HANDLER_FAILED
    assert "Counter.count raised TypeError at record 1, message 0" in errors


def test_findings_are_warnings(tmp_path: Path) -> None:
    def goodbye(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(GOODBYE)

    status, _, errors = run_app(tmp_path, "Careless", ScriptedCoordinator(goodbye))
    assert status == 0
    assert errors.splitlines() == [
        "app Careless: warning: wordcount.py, line 30: Careless.count calls time.time(), which differs at each "
        "replay: use immortal.now()",
        "app Careless: warning: wordcount.py, line 31: Careless.count goes through self.tags, a set, whose order can "
        "differ after a recovery: use sorted(self.tags)",
    ]


@pytest.mark.parametrize(("options", "variables"), [(["--strict"], {}), ([], {"IMMORTAL_STRICT": "1"})])
def test_with_strict_they_are_an_error(tmp_path: Path, options: list[str], variables: dict[str, str]) -> None:
    status, _, errors = run_app(tmp_path, "Careless", None, *options, **variables)
    assert status == EXIT_NOT_RUNNABLE
    assert errors.startswith(
        "app Careless: 2 places would not run, or not be replayed, as they are written (--strict):\n  wordcount.py, "
    )
    assert errors.count("wordcount.py, line") == 2


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["--break", "x"], {}, "--break 'x': a record and a message of it were expected, such as 12 or 12:3"),
        (["--break", "1:"], {}, "--break '1:'"),
        ([], {"IMMORTAL_BREAK": "-1"}, "IMMORTAL_BREAK '-1'"),
        ([], {"IMMORTAL_TRACE": "yes"}, "IMMORTAL_TRACE='yes': 1 (on) or 0 (off) were expected"),
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, options: list[str], variables: dict[str, str], words: str) -> None:
    status, _, errors = run_app(tmp_path, "Counter", None, *options, **variables)
    assert status == EXIT_NOT_RUNNABLE
    assert words in errors
    assert errors.count("\n") == 1


ASYNC_PROGRAM = """
import immortal
from immortal import Immortal, rpc

class Waiter(Immortal):
    @rpc(id=1)
    async def wait(self, text: str) -> None:
        got = await immortal.event(text)

    @rpc(id=2)
    def send(self, text: str) -> None:
        immortal.signal(text, 1)
"""


def test_a_break_at_handlers_of_an_app_that_waits(tmp_path: Path) -> None:
    def waiting(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "x"), call(2, "x")]))
        it.send(GOODBYE)

    (tmp_path / "waiter.py").write_text(ASYNC_PROGRAM)
    for where, first_line in (("1:0", "got = await immortal.event(text)"), ("1:1", "immortal.signal(text, 1)")):
        it = ScriptedCoordinator(waiting)
        status, output, errors = run_app(
            tmp_path, "Waiter", it, "--break", where, stdin="s\np ('in', text)\nc\n", module="waiter"
        )
        assert (status, errors) == (0, "")
        assert f"-> {first_line}" in output
        assert "('in', 'x')" in output
