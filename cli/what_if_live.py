"""Processes of what-if --fleet --live: one runs the code of the shadows, this one reports, and starts it again."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from immortal.presenters.what_if import DIFFERENT
from immortal.presenters.what_if_live import LiveReport
from immortal.protocol.command_line import FailedError, echo, echo_json, echo_lines
from immortal.protocol.decoding import decode_json
from immortal.protocol.files import write_whole
from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.fleet.shadow import TOO_LARGE, Event, Found, Mark, Note, Progress, follow

NICENESS = 5  # the services come first
TICK_S = 0.1
STOP_S = 5.0
FLEET_RUN_S = 30.0  # between two runs of the fleet, at least
FLEET_RUN_SHARE = 9  # ... and so many times as long as the last one took
SUMMARY_S = 10.0  # between two summaries
PAGE_S = 1.0  # between two pages
HANG_S_MIN = 2.0
MEMORY_MIB = 2048  # of the process of the shadows
NOTE_SIZE_BYTES = 400
SAID_LINES_MAX = 1000  # of the last words of a process: a traceback


class _Given(msgspec.Struct):
    """Order to the process of the shadows. ``note``: descriptor of a file in which it says what it does now."""

    note: int
    marks: dict[str, Mark]


def run_shadows(
    home: Path,
    changes: Mapping[str, str],
    order_json: str,
    code: Path | None,
    begin_ns: int | None,
    handler_limit_s: float,
    memory_limit_mib: int,
    trust_pickle: bool,
) -> int:
    """Run the shadows in this process until SIGTERM; write what they find to stdout, a JSON object a line."""
    from immortal.replay.fleet.player import seal_process

    order, over = decode_json(order_json.encode(), type=_Given), threading.Event()
    signal.signal(signal.SIGTERM, lambda *of: over.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the process that started this one says when to end
    os.nice(NICENESS)
    with open(os.dup(1), "wb") as out, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # handlers would print their output

        def emit(event: Event) -> None:
            out.write(msgspec.json.encode(event) + b"\n")
            out.flush()  # all of it, also when SIGTERM comes meanwhile

        seal_process(handler_limit_s)
        follow(
            home,
            changes,
            order.marks,
            emit,
            lambda text: os.pwrite(order.note, text.encode().ljust(NOTE_SIZE_BYTES), 0),
            over.is_set,
            code=code,
            begin_ns=begin_ns,
            trust_pickle=trust_pickle,
            limit_s=max(handler_limit_s, HANG_S_MIN),
            memory_bytes=memory_limit_mib << 20,
        )
    return 0


Start = Callable[[list[str]], dict[str, Any]]
"""Function that returns how subprocess starts the command with further arguments."""


def run_live(
    start: Start,
    changes: Mapping[str, str],
    duration_ns: int | None,
    page: Path | None,
    *,
    consequences: Start | None,
    as_json: bool,
) -> int:
    """Report what the shadows find until Ctrl-C, SIGTERM or the end of the duration; return the exit status.

    ``start``: starts the process of the shadows. ``consequences``: starts one for what follows in the fleet.
    """
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *of: over.set())
    runs = None if consequences is None else _FleetRuns(consequences)
    timer = None if duration_ns is None else threading.Timer(duration_ns / 1e9, over.set)
    live = _Live(LiveReport(changes), page, runs, timer, as_json=as_json)
    note = os.memfd_create("immortal-shadow")
    while not over.is_set():
        os.truncate(note, 0)
        given = msgspec.json.encode(_Given(note, live.report.marks)).decode()
        live.watch(start(["--shadow", given]), note, over)
    return live.end()


class _Live:
    """Report to people. ``timer``: started once all services are followed."""

    def __init__(
        self,
        report: LiveReport,
        page: Path | None,
        runs: _FleetRuns | None,
        timer: threading.Timer | None,
        *,
        as_json: bool,
    ) -> None:
        self.report = report
        self._page = page
        self._runs = runs
        self._timer = timer
        self._as_json = as_json
        self._page_s = self._summary_s = time.monotonic()
        self._write_page()  # what it needs takes a while to load

    def watch(self, how: dict[str, Any], note: int, over: threading.Event) -> None:
        """Run one process of the shadows until its end. Raises FailedError if another one would be no better."""
        error_lines: deque[bytes] = deque(maxlen=SAID_LINES_MAX)
        lines: queue.Queue[bytes | None] = queue.Queue(maxsize=1000)
        pipe = subprocess.PIPE
        with subprocess.Popen(**how, stdout=pipe, stderr=pipe, pass_fds=(note,)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            readers = [
                threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
                threading.Thread(target=_read, args=(process.stderr, error_lines.append), daemon=True),
            ]
            for reader in readers:
                reader.start()
            asked_s = 0.0
            try:
                while (line := self._next(lines)) is not None:
                    if line.endswith(b"\n"):  # else its process died
                        self._show(decode_json(line, type=Event))
                    self._show_progress()
                    if over.is_set() and not asked_s:
                        asked_s = time.monotonic()
                        process.terminate()
                    elif asked_s and time.monotonic() - asked_s > STOP_S:
                        process.kill()  # its code hangs
            except BaseException:  # such as a closed stdout
                process.kill()
                raise
            try:
                status = process.wait(STOP_S)
            except subprocess.TimeoutExpired:  # a thread of the user's code goes on
                process.kill()
                status = process.wait()
            readers[1].join(STOP_S)
        if not over.is_set():
            self._report_end(status, [line.decode("utf-8", "replace").rstrip() for line in error_lines if line], note)

    def _next(self, lines: queue.Queue[bytes | None]) -> bytes | None:
        try:
            return lines.get(timeout=TICK_S)
        except queue.Empty:
            return b""

    def _report_end(self, status: int, error_lines: list[str], note: int) -> None:
        """Say at which record the process has ended, and which code did it."""
        at = os.pread(note, NOTE_SIZE_BYTES, 0).decode().split()
        hangs = any(line.startswith("Timeout (") for line in error_lines)
        reason = (
            error_lines[-1] if error_lines else f"the code ends its process before its first record (status {status})"
        )
        if not at or reason.startswith("error: "):
            raise FailedError(reason.removeprefix("error: "))
        name, record, side = at[0], int(at[1]), at[2]
        does = "does not end" if hangs else f"ends its process (status {status})"
        if reason in (TOO_LARGE, "MemoryError"):
            does = "needs more memory than --memory-limit allows"
        text = f"the {side} code {does}"
        if side == "new":
            self._show(Found(name, "ends", name, "", record, None, time.time_ns(), 0.0, text))
        again = f"record {record}: {text}; it begins again at the next checkpoint"
        self._show(Note(name, again, follows=False))
        self.report.note_restart(name, record)

    def _show(self, event: Event) -> None:
        text = self.report.add(event)
        if self._timer is not None and all(self.report.following.values()):
            self._timer.daemon = True
            self._timer.start()
            self._timer = None
        if isinstance(event, Found):
            self._is_new = True
            if self._runs is not None:
                self._runs.request_run(event.time_ns)
        if self._as_json and not isinstance(event, Progress):
            echo_json(msgspec.to_builtins(event))
        elif text:
            echo(text)

    def _show_outcome(self, outcome: FleetOutcome | str) -> None:
        self.report.set_outcome(outcome)
        if self._as_json:
            echo_json({"type": "consequences", "outcome": msgspec.to_builtins(outcome)})
        else:
            echo_lines(self.report.outcome_lines())

    def _show_progress(self) -> None:
        """Write the page and a summary from time to time."""
        if self._runs is not None and (outcome := self._runs.poll()) is not None:
            self._is_new = True
            self._show_outcome(outcome)
        now_s = time.monotonic()
        is_due = now_s - self._summary_s >= SUMMARY_S
        if is_due:
            self._summary_s = now_s
            if self._as_json:
                self._print_totals()
            elif sys.stderr is not None and sys.stderr.isatty():
                echo(self.report.line, err=True)
        if is_due or (self._is_new and now_s - self._page_s >= PAGE_S):
            self._page_s = now_s
            self._write_page()

    def _write_page(self) -> None:
        self._is_new = False
        if self._page is not None:
            write_whole(self._page, self.report.page())

    def _print_totals(self) -> None:
        for one in self.report.totals:
            echo_json(msgspec.to_builtins(one))

    def end(self) -> int:
        """Print all counts; return the exit status."""
        if self._runs is not None:
            self._runs.close()
        if self._as_json:
            self._print_totals()
        else:
            echo_lines(self.report.lines())
        self._write_page()
        if self.report.is_different:
            return DIFFERENT
        return 0 if all(self.report.following.values()) else 1


class _FleetRuns:
    """Runs of a fleet's what-if, one after the other, from before the first difference up to the present."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: subprocess.Popen[Any] | None = None
        self._files: list[IO[bytes]] = []  # its output and its errors
        self._first_ns: int | None = None
        self._is_requested = False
        self._started_s = self._due_s = 0.0

    def request_run(self, time_ns: int) -> None:
        """Ask for a run, with a difference of that time in it."""
        self._is_requested = True
        self._first_ns = min(time_ns, self._first_ns or time_ns)

    def poll(self) -> FleetOutcome | str | None:
        """Begin a run if one is due; return the outcome of one that has ended, or why there is none."""
        now_s = time.monotonic()
        if self._process is None:
            if self._is_requested and self._first_ns is not None and now_s >= self._due_s:
                self._is_requested, self._started_s = False, now_s
                begin = datetime.fromtimestamp(self._first_ns / 1e9, UTC).isoformat()
                self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
                how = self._start(["--from", begin])
                self._process = process = subprocess.Popen(**how, stdout=self._files[0], stderr=self._files[1])
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            return None
        if (status := self._process.poll()) is None:
            return None
        self._due_s = now_s + max(FLEET_RUN_S, FLEET_RUN_SHARE * (now_s - self._started_s))
        for file in self._files:
            file.seek(0)
        output, error_lines = (file.read() for file in self._files)
        self.close()
        if status in (0, DIFFERENT):
            return decode_json(output, type=FleetOutcome)
        lines = error_lines.decode("utf-8", "replace").splitlines() or [f"status {status}"]
        return lines[-1].removeprefix("error: ")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for file in self._files:
            file.close()


def _read(file: IO[bytes], put: Callable[[bytes | None], object]) -> None:
    for line in file:
        put(line)
    put(None)
