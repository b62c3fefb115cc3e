"""One-way calls, timed from the first sender's first call to the last receiver's last one."""

from __future__ import annotations

import contextlib
import json
import select
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any

from immortal.bench.apps import CHAINS
from immortal.bench.calls import processes_of, running
from immortal.bench.processes import BenchError, Service, cpu_s, register

BURST_SIZE_BYTES = 2 << 20  # of arguments in one burst, roughly: small enough to be paced smoothly
CALL_OVERHEAD_BYTES = 200  # what a call costs in time, expressed in bytes: so that runs take about as long
SILENCE_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """What each sender sends: arguments of ``sizes`` in turn, to each of ``receivers`` in turn."""

    sizes: tuple[int, ...]
    senders: int = 1
    receivers: int = 1

    @property
    def mean_size_bytes(self) -> float:
        return sum(self.sizes) / len(self.sizes)


@dataclass(frozen=True, slots=True)
class OneWay:
    calls: int
    seconds: float
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds


class ImmortalStreams:
    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = services

    def run(self, load: Load, calls: int) -> OneWay:
        round_calls = len(load.sizes) * load.receivers  # so that each receiver gets the same
        in_burst = max(1, round(BURST_SIZE_BYTES / (load.mean_size_bytes + CALL_OVERHEAD_BYTES) / round_calls))
        in_burst *= round_calls
        bursts = max(1, round(calls / (load.senders * CHAINS * in_burst)))
        if bursts == 1:  # few calls: smaller bursts
            in_burst = max(1, round(calls / (load.senders * CHAINS * round_calls))) * round_calls
        calls = load.senders * CHAINS * bursts * in_burst
        received = calls // load.receivers
        before = self._cpu_s()
        receivers = [self._app(f"receiver-{index}") for index in range(load.receivers)]
        senders = [self._app(f"sender-{index}") for index in range(load.senders)]
        for receiver in receivers:
            write_plan(receiver, {"calls": received})
        for receiver in receivers:
            self._expect(receiver, "ready")
        plan = {"sizes": load.sizes, "receivers": load.receivers, "bursts": bursts, "calls": in_burst}
        for sender in senders:
            write_plan(sender, plan)
        begun_s = min(self._read(sender)["begun_s"] for sender in senders)
        ended_s = begun_s
        for receiver in receivers:
            counted = self._read(receiver)
            expected_bytes = received // len(load.sizes) * sum(load.sizes)
            if (counted["calls"], counted["bytes"]) != (received, expected_bytes):
                raise BenchError(f"a receiver counted {counted}; {received} calls, {expected_bytes} bytes were sent")
            ended_s = max(ended_s, counted["ended_s"])
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        return OneWay(calls, ended_s - begun_s, spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(process.pid) for name, process in processes_of(self.services).items()}

    def _app(self, name: str) -> Popen[str]:
        app = self.services[name].app
        if app is None:
            raise BenchError(f"{name} was not started")
        return app

    def _read(self, process: Popen[str]) -> Any:
        return read_counted(process, self._check_alive)

    def _expect(self, process: Popen[str], word: str) -> None:
        if (said := self._read(process)) != word:
            raise BenchError(f"a receiver said {said!r}, {word!r} was expected")

    def _check_alive(self) -> None:
        for service in self.services.values():
            service.check_alive()


@contextlib.contextmanager
def immortal_streams(
    home: Path,
    senders: int = 1,
    receivers: int = 1,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    curve: bool = False,
    **settings: Any,
) -> Iterator[ImmortalStreams]:
    """``settings``: of the instances, as ``immortal.coordinator.instances.registry.Registry.register`` takes them."""
    apps = {f"receiver-{index}": "immortal.bench.apps:Receiver" for index in range(receivers)}
    apps |= {f"sender-{index}": "immortal.bench.apps:Sender" for index in range(senders)}
    services = register(home, apps, dict(variables), curve=curve, **settings)
    with running(services):
        yield ImmortalStreams(services)


def write_plan(process: Popen[str], line: object) -> None:
    if process.stdin is None:
        raise BenchError("a process has no standard input")
    with contextlib.suppress(BrokenPipeError):  # reading says why
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()


def read_counted(process: Popen[str], check_alive: Callable[[], None]) -> Any:
    if process.stdout is None:
        raise BenchError("a process has no standard output")
    readable, _, _ = select.select([process.stdout], [], [], SILENCE_S_MAX)
    if not readable:
        check_alive()
        raise BenchError(f"a process has said nothing for {SILENCE_S_MAX:.0f} s")
    line = process.stdout.readline()
    if not line:
        process.wait()
        check_alive()
        raise BenchError(f"a process ended with status {process.returncode}")
    return json.loads(line)
