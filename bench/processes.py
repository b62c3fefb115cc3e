"""Processes of a benchmark run, in a registry of its own, and their usage; they are killed when the run ends."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from immortal.appsdk.state.schema import decode_envelope
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.coordinator.service.process import die_with_parent
from immortal.log import open_reader
from immortal.protocol.errors import ImmortalError

# The disk alone: append and fdatasync.


SIZE_BYTES_MAX = 2 << 30
LATENCY_SAMPLES = 200
MIB = 1 << 20


def append_latencies(
    folder: Path, block_size_bytes: int, *, samples: int = LATENCY_SAMPLES, seconds: float = math.inf
) -> list[float]:
    """Append blocks to a new file in ``folder``, an fdatasync after each, up to both limits; return the times in s."""
    block = os.urandom(block_size_bytes)
    latencies_s: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        ended = time.perf_counter() + seconds
        while len(latencies_s) < samples and (begun := time.perf_counter()) < ended:
            file.write(block)
            os.fdatasync(file.fileno())
            latencies_s.append(time.perf_counter() - begun)
    return latencies_s


def append_rate(folder: Path, block_size_bytes: int, seconds: float = 0.5) -> float:
    """Measure the bytes/s of appending blocks to a new file in ``folder``, with an fdatasync after each."""
    samples = max(1, SIZE_BYTES_MAX // block_size_bytes)
    latencies_s = append_latencies(folder, block_size_bytes, samples=samples, seconds=seconds)
    return block_size_bytes * len(latencies_s) / sum(latencies_s)


# Memory and CPU time of a process, as the kernel counts them.


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process in MiB. ``resident`` counts all shared pages, ``proportional`` a share of them, ``own`` none:
    this much is free when the process ends. ``peak``: the highest ``resident`` so far."""

    resident: float
    proportional: float
    own: float
    peak: float


def memory_of(pid: int) -> Memory:
    """Read the memory of a process. Raises OSError."""
    kib = {}
    for file in ("smaps_rollup", "status"):
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE):
            kib[name] = int(size)
    own = kib["Private_Clean"] + kib["Private_Dirty"]
    return Memory(kib["Rss"] / 1024, kib["Pss"] / 1024, own / 1024, kib["VmHWM"] / 1024)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's current threads."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


# The processes of a benchmark run, in a registry of its own. They are killed when the run ends.


START_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.002


class BenchError(ImmortalError):
    """Raised if the benchmark could not be run, or its result is wrong."""


class Service:
    """Instance of a benchmark: its coordinator and its app. Their stderr goes to a file in the instance's folder.

    ``runner``: module, with arguments, that runs the module of each process; empty: none.
    """

    runner: tuple[str, ...] = ()

    def __init__(self, settings: InstanceSettings, app: str, environment: dict[str, str]) -> None:
        self.settings = settings
        self.environment = environment  # of both processes
        self._app = app
        self.coordinator: subprocess.Popen[str] | None = None
        self.app: subprocess.Popen[str] | None = None

    def start(self) -> None:
        settings = self.settings
        with open(settings.folder / "errors.txt", "a") as errors:
            self.coordinator = subprocess.Popen(
                [sys.executable, "-P", "-m", *self.runner, "immortal", "coordinator", settings.name],
                env=self.environment,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
            self.app = subprocess.Popen(
                [sys.executable, "-P", "-m", *self.runner, "immortal.appsdk", self._app],
                cwd=settings.folder,  # an app's modules are imported from there: no bench.py of the user's is found
                env={
                    **self.environment,
                    "IMMORTAL_APP_ADDRESS": settings.app_addresses[0],
                    app_secret.SECRET_FILE_VARIABLE: str(app_secret.path(settings.folder)),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent(os.getpid()),
            )

    def check_alive(self) -> None:
        for what, process in (("coordinator", self.coordinator), ("app", self.app)):
            if process is not None and process.poll() is not None:
                errors = (self.settings.folder / "errors.txt").read_text()
                status = process.returncode
                raise BenchError(f"{self.settings.name}'s {what} ended with status {status}:\n{errors[-2000:]}")

    def status(self) -> dict[str, Any] | None:
        """Return the coordinator's status; None while it is not up."""
        self.check_alive()
        try:
            return control.query(self.settings.folder, "status", timeout_s=2.0)
        except control.ControlError:
            return None

    def wait_for_phase(self, phase: str, *, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until the coordinator is in ``phase`` and has no backlog; return the seconds that this took."""
        return self.wait_for(
            lambda status: status["phase"] == phase and not status["backlog_records"],
            f"is not in phase {phase!r}",
            timeout_s,
        )

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], otherwise: str, timeout_s: float) -> float:
        """Wait until ``condition`` holds for the status; return the seconds. Raises BenchError with ``otherwise``."""
        begun = time.perf_counter()
        while True:
            status = self.status()
            if status is not None and condition(status):
                return time.perf_counter() - begun
            if time.perf_counter() - begun > timeout_s:
                raise BenchError(f"{self.settings.name!r} {otherwise} after {timeout_s:.0f} s; its status: {status}")
            time.sleep(POLL_INTERVAL_S)

    def processes(self) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """Return coordinator and app. Raises BenchError if they were not started."""
        if self.coordinator is None or self.app is None:
            raise BenchError(f"{self.settings.name!r} was not started")
        return self.coordinator, self.app

    def request_stop(self) -> None:
        """Ask coordinator and app to end, with a last checkpoint."""
        self.processes()[0].terminate()

    def wait_until_stopped(self, timeout_s: float) -> None:
        """Wait until coordinator and app have ended. Raises BenchError for a status other than 0, or a timeout."""
        for what, process in zip(("coordinator", "app"), self.processes(), strict=True):
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise BenchError(f"{self.settings.name}'s {what} has not stopped within {timeout_s:.0f} s") from None
            if status:
                self.check_alive()

    def kill(self) -> None:
        """Kill coordinator and app with SIGKILL, and wait for their ends."""
        for process in (self.app, self.coordinator):
            if process is not None:
                _kill(process)
        self.app = self.coordinator = None


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # it did not read all
                pipe.close()


@contextlib.contextmanager
def start_module(module: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run ``python -m module`` with pipes to its stdin and stdout; kill it at the end. ``options``: Popen's."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options},
        text=True,
        preexec_fn=die_with_parent(os.getpid()),
    )
    try:
        yield process
    finally:
        _kill(process)


def write_line(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process's standard input. If the process has ended, :func:`read_line` reports it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def read_line(
    process: subprocess.Popen[str],
    name: str,
    check_alive: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
) -> str:
    """Read a line of a process's stdout. Raises BenchError, or the errors of ``check_alive``, if there is none."""
    assert process.stdout is not None
    if timeout_s is not None and not select.select([process.stdout], [], [], timeout_s)[0]:
        check_alive()
        raise BenchError(f"{name} has said nothing for {timeout_s:.0f} s")
    line = process.stdout.readline()
    if not line:
        process.wait()
        check_alive()
        raise BenchError(f"{name} said nothing and ended with status {process.returncode}")
    return line.strip()


def register(
    home: Path, apps: dict[str, str], variables: dict[str, str], *, curve: bool = False, **settings: Any
) -> dict[str, Service]:
    """Register an instance for each (name, "module:Class") of ``apps`` in ``home``; with ``curve`` all have keys.

    ``settings``: further ones, as ``Registry.register`` takes them.
    """
    registry = Registry(home)
    environment = {**os.environ, **variables, "IMMORTAL_HOME": str(home), "PYTHONHASHSEED": "0"}
    services = {}
    for name, app in apps.items():
        instance = registry.register(name, "tcp://127.0.0.1:*", **settings)
        instance.folder.mkdir(parents=True, exist_ok=True)
        if curve:
            keys.create(instance.folder)
        services[name] = Service(instance, app, dict(environment))
    return services


@contextlib.contextmanager
def running(services: Mapping[str, Service]) -> Iterator[None]:
    """Run all services until the end of the block."""
    try:
        for service in services.values():
            service.start()
        for service in services.values():
            service.wait_for_phase("normal")
        yield
    finally:
        for service in services.values():
            service.kill()


def processes_of(services: Mapping[str, Service]) -> dict[str, subprocess.Popen[str]]:
    """Return the processes of running services by name."""
    processes = {}
    for name, service in services.items():
        processes[f"{name}'s app"], processes[f"{name}'s coordinator"] = reversed(service.processes())
    return processes


def check_all_alive(services: Mapping[str, Service]) -> None:
    for service in services.values():
        service.check_alive()


# The state of a benchmark's service when it was stopped.


def final_state(service: Service, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``attributes`` (name to type) as they were when ``service`` stopped cleanly. Raises BenchError."""
    name = service.settings.name
    with open_reader(service.settings.log, name) as log:
        summary = log.summary()
        checkpoint = summary.checkpoints[-1]
        if checkpoint.sequence_id != summary.last_sequence_id:
            raise BenchError(
                f"the last checkpoint of {name!r} is of record {checkpoint.sequence_id}, its log ends with record "
                f"{summary.last_sequence_id}: the stop was not clean"
            )
        blob = b"".join(log.checkpoint_chunks(checkpoint.checkpoint_id))
    state = msgspec.msgpack.decode(decode_envelope(blob)[1], type=dict[str, msgspec.Raw])
    return {name: msgspec.msgpack.decode(state[name], type=kind) for name, kind in attributes.items()}
