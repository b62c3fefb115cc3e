"""Instances under `immortal run --restart`, for the example programs that kill them and read their logs later."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

STOP_S = 60.0
STALLED_S = 60.0  # without progress for so long, a run fails
POLL_S = 0.02
REGISTRY_NAME = "registry"
console = Console()
KEEP_ALL = ("--keep-checkpoints", "all")
"""Options of an instance whose log is read later: with every checkpoint the whole log is kept."""
APP, COORDINATOR, SUPERVISOR = "app", "coordinator", "supervisor"


class RunError(Exception):
    """Raised when the run can't continue; the text says why."""


def immortal(home: Path) -> list[str]:
    return [sys.executable, "-m", "immortal", "--home", str(home)]


def register(home: Path, name: str, *options: str) -> None:
    command = [*immortal(home), "register", name, "--peer", "tcp://127.0.0.1:*", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Instance:
    """Supervisor with its two processes, which are known from its log lines.

    ``folder``: where its app is. ``unit``: such as "settled", if its app prints lines like "settled: 12"; ``count`` is
    the highest number so far. ``inside``: wraps the command.
    """

    def __init__(
        self,
        name: str,
        app: str,
        home: Path,
        folder: Path,
        environment: Mapping[str, str],
        unit: str = "",
        inside: Callable[[Sequence[str]], Sequence[str]] = lambda command: command,
    ) -> None:
        self.name = name
        self.log_file = home.parent / f"{name}.log"
        self.last_lines: deque[str] = deque(maxlen=12)
        self.changed = threading.Condition()
        self.starts = 0  # of the two processes
        self.ready = 0  # the last of the starts that has become ready
        self._command = inside([*immortal(home), "run", name, app, "--restart", "--log-format", "json"])
        self._folder, self._environment, self._unit = folder, environment, unit
        self.count = 0
        self._readers: list[threading.Thread] = []
        self._killed: list[tuple[Kill, float, int]] = []  # not recovered from: the kill, when, and the starts then
        self.start()

    def start(self) -> None:
        self._pids: dict[str, int] = {}
        self.supervisor = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._unit else None,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        for work in (self._read_log, *([self._read_output] if self._unit else [])):
            self._readers.append(threading.Thread(target=work, args=(self.supervisor,), daemon=True))
            self._readers[-1].start()

    def _read_output(self, supervisor: subprocess.Popen[str]) -> None:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            if counted := re.fullmatch(rf"{self._unit}: (\d+)\n", line):
                self.count = max(self.count, int(counted[1]))

    def _read_log(self, supervisor: subprocess.Popen[str]) -> None:
        """Keep the supervisor's log, and learn from it which processes run."""
        assert supervisor.stderr is not None
        with self.log_file.open("a") as log:
            for line in supervisor.stderr:
                log.write(line)
                log.flush()
                self.last_lines.append(line.rstrip())
                try:
                    event = json.loads(line) if line.startswith("{") else {}
                except json.JSONDecodeError:
                    continue
                with self.changed:
                    if event.get("message") == "started" and "app_pid" in event and supervisor is self.supervisor:
                        self._pids = {APP: event["app_pid"], COORDINATOR: event["coordinator_pid"]}
                        self.starts += 1
                    elif event.get("message") == "ready":
                        self.ready = self.starts
                        self._note_recovery()
                    self.changed.notify_all()

    def _note_recovery(self) -> None:
        for kill, killed_s, starts in self._killed:
            if starts < self.ready and kill.recovery_s is None:
                kill.recovery_s = time.monotonic() - killed_s

    def until_ready(self) -> None:
        """Wait until the last start has become ready. Raises RunError."""
        with self.changed:
            if not self.changed.wait_for(lambda: 0 < self.starts == self.ready, STOP_S):
                raise self.failed(f"it did not come up within {STOP_S:.0f} s")

    def kill(self, role: str) -> bool:
        """Kill a process with kill -9. False if there is none of that role now, because it is being restarted."""
        if role == SUPERVISOR:
            self.supervisor.kill()
            self.supervisor.wait()
            self.start()
            return True
        pid = self._pids.pop(role, None)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself, after the other one of the two
            return False
        return True

    def carry_out(self, kill: Kill) -> bool:
        """Kill as planned, and note the recovery. False if it is too early, because the process is being restarted."""
        before = kill, time.monotonic(), self.starts
        if not self.kill(kill.role):
            return False
        self._killed.append(before)
        return True

    def check(self) -> None:
        """Raise RunError if the supervisor has ended."""
        if self.supervisor.poll() is not None:
            raise self.failed(f"its supervisor ended with status {self.supervisor.returncode}")

    def stop(self) -> None:
        """Stop cleanly, with a last checkpoint. Raises RunError."""
        with self.changed:  # a process that starts, or is being killed, would end at the signal with another status
            if not self.changed.wait_for(lambda: len(self._pids) == 2 and self.starts == self.ready, STOP_S):
                raise self.failed(f"it did not come up within {STOP_S:.0f} s")
        self.supervisor.terminate()
        try:
            status = self.supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise self.failed(f"it did not stop within {STOP_S:.0f} s") from None
        if status != 0:
            raise self.failed(f"its supervisor ended with status {status}")

    def failed(self, why: str) -> RunError:
        last = "\n".join(f"    {line}" for line in self.last_lines)
        return RunError(f"{self.name}: {why}\nthe last lines of its log ({self.log_file}):\n{last}")

    def end(self) -> None:
        """End all processes of the instance, whatever their state."""
        if self.supervisor.poll() is None:
            self.supervisor.kill()  # its two processes die with it
        self.supervisor.wait()
        for reader in self._readers:
            reader.join()


class Keeper:
    """Keeper of a process: it starts another one, ``pause_s`` after each death, until :meth:`end`.

    ``command``: returns the arguments of the next one. ``on_line`` gets the lines that they print. A death with another
    status than ``dies_with`` is the last one.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        on_line: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        pause_s: float = 0.0,
        dies_with: int | None = None,
    ) -> None:
        self.deaths = 0
        self._command, self._on_line, self._environment = command, on_line, environment
        self._pause_s, self._dies_with = pause_s, dies_with
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = subprocess.Popen(
                    self._command(), env=self._environment, stdout=subprocess.PIPE, text=True
                )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._on_line(line.strip())
            status = self._process.wait()
            if self._stopping.wait(self._pause_s) or self._dies_with not in (None, status):
                return
            self.deaths += 1

    @property
    def is_running(self) -> bool:
        """False after the last death."""
        return self._thread.is_alive()

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        self._stopping.set()
        self.kill()
        self._thread.join()


@dataclass
class Kill:
    """One kill -9, due when the run has counted up to ``count``."""

    count: int
    name: str
    role: str
    recovery_s: float | None = None


def draw_kills(count: int, total: int, names: Iterable[str], roles: Sequence[str], source: random.Random) -> list[Kill]:
    """Draw ``count`` kills at random moments: each role of each instance once, before any is hit a second time."""
    kinds = [(name, role) for name in names for role in roles]
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        drawn += source.sample(kinds, min(len(kinds), count - len(drawn)))
    moments = sorted(int(total * source.uniform(0.02, 0.95)) for _ in drawn)
    return [Kill(moment, name, role) for moment, (name, role) in zip(moments, drawn, strict=True)]


def run(
    names: Iterable[str],
    start_instance: Callable[[str], Instance],
    unit: str,
    counters: Sequence[str],
    total: int,
    kills: Iterable[Kill],
) -> float:
    """Run until ``counters``, some of the instances, have each counted up to ``total``, and all are stopped.

    ``start_instance`` starts a registered instance. ``unit``: what is counted. Returns the seconds until all was
    counted. Raises RunError.
    """
    instances: dict[str, Instance] = {}
    try:
        began_s = time.monotonic()
        for name in names:
            instances[name] = start_instance(name)
        _until_counted(instances, [instances[name] for name in counters], unit, total, list(kills))
        elapsed_s = time.monotonic() - began_s
        for instance in instances.values():
            instance.stop()
        return elapsed_s
    finally:
        for instance in instances.values():
            instance.end()


def _until_counted(
    instances: Mapping[str, Instance], counters: Sequence[Instance], unit: str, total: int, kills: list[Kill]
) -> None:
    columns = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar, kills_bar = progress.add_task(unit, total=total), progress.add_task("kills", total=len(kills))
        moved_s, before = time.monotonic(), -1
        while (count := min(one.count for one in counters)) < total or kills:
            for kill in list(kills):
                victim = instances[kill.name]
                if (victim.count if victim in counters else count) >= kill.count and victim.carry_out(kill):
                    kills.remove(kill)
                    progress.advance(kills_bar)
            progress.update(bar, completed=count)
            for instance in instances.values():
                instance.check()
            if (now := sum(one.count for one in counters)) > before:
                before, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > STALLED_S:
                counts = {one.name: one.count for one in counters}
                raise counters[0].failed(f"nothing has moved for {STALLED_S:.0f} s: {counts}")
            time.sleep(POLL_S)
        progress.update(bar, completed=total)


def final_state(home: Path, name: str, folder: Path) -> Any:
    """Return the attributes at the end of the log, as `immortal replay` shows them. Raises RunError."""
    command = [*immortal(home), "replay", name, "--state", "--json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RunError(f"{name} can't be replayed: {result.stderr.strip()}")
    return json.loads(result.stdout, object_hook=_mapping)["state"]["state"]


def _mapping(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping of a state. One with a key such as "$x" is shown as a list of pairs."""
    return dict(shown["$map"]) if shown.keys() == {"$map"} else shown


def conclude(
    work: Callable[[Path], tuple[list[str], str]],
    keep: Path | None,
    note: str = "",
    errors: tuple[type[Exception], ...] = (RunError,),
) -> int:
    """Do ``work`` in a folder, print its problems or its result, and return the exit status.

    ``keep``: a new folder that stays; without it the folder is removed unless there are problems. ``note``: for a
    repeat of the run. ``errors``: of ``work``, which end it.
    """
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="immortal-example-"))
    else:
        keep.mkdir(parents=True, exist_ok=True)
        folder = keep.absolute()
    kept = f"logs and registry are kept in {folder}{note}"
    try:
        problems, verdict = work(folder)
    except errors as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False, highlight=False)
        console.print(kept, highlight=False)
        return 1
    except KeyboardInterrupt:
        if keep is None:
            shutil.rmtree(folder)
        return 130
    if problems:
        for problem in problems[:10]:
            console.print(f"WRONG: {problem}", style="bold red", markup=False, highlight=False)
        console.print(f"{len(problems)} problems; {kept}", highlight=False)
        return 1
    console.print(verdict, style="bold green", highlight=False)
    if keep is None:
        shutil.rmtree(folder)
    else:
        console.print(f"the registry's home is {folder / REGISTRY_NAME}", highlight=False)
    return 0
