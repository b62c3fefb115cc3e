"""One instance under `immortal run --restart`: its processes, to be killed and stopped, and what its log lines say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.fault_points import VARIABLE, FaultPoint
from immortal.coordinator.operator import control
from immortal.coordinator.service.process import die_with_parent
from immortal.protocol.errors import ImmortalError

APP, COORDINATOR, SUPERVISOR = "app", "coordinator", "supervisor"
ROLES = (APP, COORDINATOR, SUPERVISOR)
DEADLINE_S = 60.0
POLL_S = 0.01


class SoakError(Exception):
    """What was expected has not come about; the text says what."""


@dataclass
class Run:
    """How to run the app of an instance."""

    app: str  # module:Class
    folder: Path  # where the module is
    environment: dict[str, str]


class Service:
    """Started anew by :meth:`start` whenever its supervisor is gone."""

    def __init__(self, settings: InstanceSettings, run: Run, folder: Path) -> None:
        self.settings = settings
        self.name = settings.name
        self.output = folder / f"{self.name}.log"
        self.plan = folder / f"{self.name}.plan"
        self.environment: dict[str, str] = {}  # of its processes, besides that of its run
        self._run = run
        self._pids: dict[str, int] = {}
        self._read_bytes = 0
        self._is_ready = False
        self.messages: list[str] = []
        self._supervisor: subprocess.Popen[bytes] | None = None

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        home = str(self.settings.folder.parent)
        command = [sys.executable, "-m", "immortal", "--home", home, "run", self.name, self._run.app]
        self._is_ready = False
        self._pids = {}
        repository = str(Path(__file__).parents[2])  # where the app's folder is the working one, ours must be found
        with self.output.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [*command, "--restart", "--log-format", "json"],
                cwd=self._run.folder,
                env={
                    **os.environ,
                    "PYTHONPATH": repository,
                    **self._run.environment,
                    **self.environment,
                    VARIABLE: str(self.plan),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),  # whatever ends this one
            )

    def stop(self) -> None:
        """Cleanly; it takes a last checkpoint."""
        if self._supervisor is None:
            return
        self._supervisor.terminate()
        try:
            status = self._supervisor.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise SoakError(f"{self.name} did not stop within {DEADLINE_S:g} s\n{self.tail()}") from None
        if status:
            raise SoakError(f"{self.name} ended with status {status}\n{self.tail()}")

    def end(self) -> None:
        """At once, whatever state it is in; its children die with it."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()

    def cut_power(self) -> None:
        """All its processes end at once; none is left that could write."""
        self.look()
        for pid in (self._pids.get(COORDINATOR), self._pids.get(APP)):
            if pid is not None and self._is_own(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.end()
        plan = str(self.plan).encode()
        wait_for(lambda: not processes_with(plan), lambda: f"all processes of {self.name} have ended")

    # --- what is known of it ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what it has logged since."""
        with self.output.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read_bytes += end
        for line in data[:end].decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
                message = event["message"]
            except (ValueError, KeyError, TypeError):
                self.messages.append(line)
                continue
            self.messages.append(message)
            if message == "started" and "app_pid" in event:
                self._pids = {APP: event["app_pid"], COORDINATOR: event["coordinator_pid"]}
                self._is_ready = False
            elif message == "ready":
                self._is_ready = True
            elif " died" in message:
                self._pids = {}
                self._is_ready = False

    @property
    def ready(self) -> bool:
        self.look()
        if self._supervisor is not None and self._supervisor.poll() is not None:
            raise SoakError(f"the supervisor of {self.name} ended by itself\n{self.tail()}")
        return self._is_ready

    def pid(self, role: str) -> int | None:
        """None while there is no such process."""
        if role == SUPERVISOR:
            return None if self._supervisor is None else self._supervisor.pid
        self.look()
        return self._pids.get(role)

    def status(self) -> dict[str, Any]:
        """Empty while nobody answers."""
        try:
            return control.query(self.settings.folder, "status", 2.0)
        except ImmortalError:
            return {}

    def tail(self) -> str:
        self.look()
        return "\n".join(f"    {line}" for line in self.messages[-15:])

    # --- what is done to it -------------------------------------------------------------------------------------------

    def signal(self, role: str, number: signal.Signals) -> bool:
        """False where there is no such process now."""
        pid = self.pid(role)
        if pid is None or (role != SUPERVISOR and not self._is_own(pid)):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _is_own(self, pid: int) -> bool:
        """Whether ``pid`` is still a child of this supervisor: a process ID is given out again."""
        try:
            parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
        except OSError:
            return False
        return self._supervisor is not None and int(parent) == self._supervisor.pid

    def kill(self, role: str) -> bool:
        """kill -9; a supervisor is started again. False where there was nothing to kill."""
        if role == SUPERVISOR:
            self.end()
            self.start()
            return True
        if not self.signal(role, signal.SIGKILL):
            return False
        self._pids.pop(role)
        self._is_ready = False
        return True

    def arm(self, point: FaultPoint, count: int = 1, action: str = "kill") -> None:
        """The next process of this instance that reaches ``point`` for the ``count``-th time does so."""
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(f"{count} {action} {point.value}")
        temporary.replace(self.plan)

    @property
    def armed(self) -> bool:
        return self.plan.exists()

    def disarm(self) -> bool:
        """True if it had not been reached."""
        try:
            self.plan.unlink()
        except FileNotFoundError:
            return False
        return True


def processes_with(value: bytes) -> list[int]:
    """Whose environment has it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            if value in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_for(condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = DEADLINE_S) -> None:
    """Raises SoakError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SoakError(f"within {timeout_s:g} s it did not come about: {what()}")
        time.sleep(POLL_S)
