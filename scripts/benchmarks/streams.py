"""One-way calls, timed from the first sender's first call to the last receiver's last one."""

from __future__ import annotations

import contextlib
import json
import select
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any, Protocol

from bench.calls import processes_of, running
from bench.processes import BenchError, Service, cpu_s, register, start_module
from protocol import compiled
from scripts.benchmarks.apps import CHAINS
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, PURE, Target

BURST_SIZE_BYTES = 2 << 20  # of arguments in one burst, roughly
CALL_OVERHEAD_BYTES = 200  # what a call costs in time, expressed in bytes
SILENCE_S_MAX = 300.0
WARM_UP_BYTES = 2_000_000


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


class Streams(Protocol):
    def run(self, load: Load, calls: int) -> OneWay:
        """About so many calls, in all. Raises BenchError."""


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
            _write(receiver, {"calls": received})
        for receiver in receivers:
            self._expect(receiver, "ready")
        plan = {"sizes": load.sizes, "receivers": load.receivers, "bursts": bursts, "calls": in_burst}
        for sender in senders:
            _write(sender, plan)
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
        return _read(process, self._check_alive)

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
    """``settings``: of the instances, as ``coordinator.instances.registry.Registry.register`` takes them."""
    apps = {f"receiver-{index}": "scripts.benchmarks.apps:Receiver" for index in range(receivers)}
    apps |= {f"sender-{index}": "scripts.benchmarks.apps:Sender" for index in range(senders)}
    services = register(home, apps, dict(variables), curve=curve, **settings)
    with running(services):
        yield ImmortalStreams(services)


@contextlib.contextmanager
def immortal_by_codec(home: Path, receivers: int = 1) -> Iterator[dict[str, ImmortalStreams]]:
    """As it is installed; where the codec is compiled, the same once more in pure Python."""
    with contextlib.ExitStack() as stack:
        streams = {IMMORTAL: stack.enter_context(immortal_streams(home / "installed", receivers=receivers))}
        if compiled.CODEC.is_installed:
            pure = immortal_streams(home / "pure", receivers=receivers, variables={compiled.PURE_VARIABLE: "1"})
            streams[PURE] = stack.enter_context(pure)
        yield streams


def codec_targets(pure: float, with_compiled: float) -> list[Target]:
    """In calls/s."""
    if not compiled.CODEC.is_installed:
        return [Target("at least", pure)]
    return [Target("at least", pure, of=PURE), Target("at least", with_compiled, note="with the compiled codec")]


class GrpcStreams:
    def __init__(self, clients: list[Popen[str]], servers: list[Popen[str]]) -> None:
        self._clients = clients
        self._processes = {"client": clients, "server": servers}

    def run(self, load: Load, calls: int) -> OneWay:
        each = max(1, round(calls / (load.senders * load.receivers * len(load.sizes)))) * len(load.sizes)
        calls = each * load.senders * load.receivers
        before = self._cpu_s()
        for client in self._clients:
            _write(client, {"sizes": load.sizes, "calls": each})
        counted = [_read(client, lambda: None) for client in self._clients]
        expected = (calls, calls // len(load.sizes) * sum(load.sizes))
        if (sum(one["calls"] for one in counted), sum(one["bytes"] for one in counted)) != expected:
            raise BenchError(f"the gRPC servers counted {counted}; {expected} calls and bytes were sent")
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        seconds = max(one["ended_s"] for one in counted) - min(one["begun_s"] for one in counted)
        return OneWay(calls, seconds, spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: sum(cpu_s(one.pid) for one in some) for name, some in self._processes.items()}


@contextlib.contextmanager
def grpc_streams(senders: int = 1, receivers: int = 1) -> Iterator[GrpcStreams]:
    module = "scripts.benchmarks.rivals.grpc_stream"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_module(module, "server")) for _ in range(receivers)]
        addresses = []
        for server in servers:
            if server.stdout is None or not (address := server.stdout.readline().strip()):
                raise BenchError("a gRPC server did not start")
            addresses.append(address)
        clients = [stack.enter_context(start_module(module, "client", *addresses)) for _ in range(senders)]
        yield GrpcStreams(clients, servers)


def streams_by(
    context: Context,
    streams: Mapping[str, Streams],
    load: Load,
    what: str,
    limits: Mapping[str, Callable[[], float]] | None = None,
) -> tuple[dict[str, list[OneWay]], dict[str, list[float]]]:
    """What each implementation's calls took, and the limits measured between them. Raises BenchError."""
    turns = {}
    for name, one in streams.items():
        context.progress(f"{what}: {name}, warming up")
        turns[name] = partial(one.run, load, calls_for(one, load, context.amounts.seconds))
    return context.interleave_with_limits(turns, limits or {}, what)


def rates(measured: Mapping[str, list[OneWay]]) -> dict[str, list[float]]:
    """In calls/s."""
    return {name: [one.calls_per_s for one in turns] for name, turns in measured.items()}


def calls_for(streams: Streams, load: Load, seconds: float) -> int:
    """How many calls take about so long: two runs, the first of which finds the processes cold."""
    calls = max(load.senders * load.receivers, round(WARM_UP_BYTES / (load.mean_size_bytes + CALL_OVERHEAD_BYTES)))
    for _ in range(2):
        calls = max(1, round(streams.run(load, calls).calls_per_s * seconds / 2))
    return calls * 2


def _write(process: Popen[str], line: object) -> None:
    if process.stdin is None:
        raise BenchError("a process has no standard input")
    with contextlib.suppress(BrokenPipeError):  # reading says why
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()


def _read(process: Popen[str], check_alive: Callable[[], None]) -> Any:
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
