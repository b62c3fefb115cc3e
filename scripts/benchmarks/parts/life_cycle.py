"""Recovery, start, checkpoints and growth of a service."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

from immortal.bench.calls import CALL_APPS, Caller, compare_callers
from immortal.bench.harness import HANDLER, IMMORTAL, Context, Figure, Target, latency, rate, values
from immortal.bench.one_way import (
    CALL_OVERHEAD_BYTES,
    ImmortalStreams,
    Load,
    compare_streams,
    immortal_streams,
    measure_replay,
)
from immortal.bench.processes import (
    BenchError,
    Service,
    memory_of,
    processes_of,
    read_line,
    register,
    running,
    write_line,
)
from immortal.bench.workload import Measured
from immortal.coordinator.operator import control
from scripts.benchmarks.limits import handler_rate

LOAD = Load((16,))
FEW_CALLS = 1_000
CALLS_UNTIL_KILL = 200
CALLS_AFTER = 200


def recovery(context: Context) -> list[Figure]:
    """Measure recovery: the rate of a replay, and how soon a service works again after kill -9."""
    return [*_replay(context), _outage(context)]


def _replay(context: Context) -> list[Figure]:
    calls = round(context.amounts.replay_mb * 1e6 / (LOAD.sizes[0] + CALL_OVERHEAD_BYTES))
    with context.home() as home, immortal_streams(home) as streams:
        turns = {count: partial(_crash, streams, count) for count in (FEW_CALLS, calls)}
        limit = {HANDLER: partial(handler_rate, LOAD.sizes[0])}
        results = context.interleave({**{f"{count:,}": turn for count, turn in turns.items()}, **limit}, "replay")
    seconds = {count: [one.seconds for one in results[f"{count:,}"]] for count in turns}
    start_s = median(seconds[FEW_CALLS])
    rates = [(one.calls - FEW_CALLS) / max(1e-9, one.seconds - start_s) for one in results[f"{calls:,}"]]
    return [
        Figure(
            "replay of 16 B calls, less the start of the processes",
            "calls/s",
            "higher",
            {IMMORTAL: rates, HANDLER: [one.calls_per_s for one in results[HANDLER]]},
            [Target("at least", 500e3), Target("at least", 1.0e6, note="with the compiled codec")],
        ),
        *(
            _ms(
                f"recovery after kill -9, about {count:,} calls to replay, start of the processes included",
                {IMMORTAL: [1e3 * one for one in seconds[count]]},
            )
            for count in (calls, FEW_CALLS)
        ),
    ]


def _ms(name: str, samples: dict[str, list[float]], targets: Sequence[Target] = (), **more: Any) -> Figure:
    return Figure(name, "ms", "lower", samples, list(targets), **more)


def _crash(streams: ImmortalStreams, calls: int) -> Measured:
    streams.run(LOAD, calls)
    replayed = measure_replay(streams.services["receiver-0"])
    if replayed is None:
        raise BenchError("there was no checkpoint to recover from")
    return replayed


def _outage(context: Context) -> Figure:
    with context.home() as home:
        services = register(home, dict(CALL_APPS), {})
        with running(services):
            app = services["caller"].processes()[1]
            caller = Caller(IMMORTAL, {"caller's app": app}, services["caller"].check_alive)
            caller.about(CALLS_UNTIL_KILL)
            turn = partial(_longest_wait_ms, caller, services["callee"])
            results = context.interleave({IMMORTAL: turn}, "kill -9")
    note = "The callee is started again at once, as a supervisor would. The start of two Python processes is in it."
    name = "kill -9 of a callee with a small state, until its caller has the next answer"
    return _ms(name, results, [Target("at most", 300)], note=note)


def _longest_wait_ms(caller: Caller, callee: Service) -> float:
    """Kill the callee during calls; return the longest wait of a call in ms. The caller checks each answer."""
    before = caller.about(CALLS_UNTIL_KILL)
    # The calls are in the other thread: the callee's processes would die with the thread that started them.
    with ThreadPoolExecutor(1) as executor:
        running_calls = executor.submit(caller.about, CALLS_UNTIL_KILL + CALLS_AFTER)
        time.sleep(before.seconds / 2)
        callee.kill()
        callee.start()
        callee.wait_for_phase("normal")
        return running_calls.result().max_us / 1e3


# A start, and the memory of an idle service.


def start(context: Context) -> list[Figure]:
    """Measure a start, and the memory of an idle service."""
    memory: dict[str, list[float]] = {"coordinator": [], "app": []}
    with context.home() as home:
        homes = (home / str(number) for number in count())
        turns = {
            "a new log": lambda: _start(next(homes), memory, again=False),
            "again, after a clean stop": lambda: _start(next(homes), memory, again=True),
            "python -c pass": lambda: _timed_ms(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)),
        }
        results = context.interleave(turns, "start")
    return [
        _ms("start of coordinator and app, until they take input", results),
        Figure(f"memory of an idle {IMMORTAL} service", "MiB", "lower", memory),
    ]


def _start(home: Path, memory: dict[str, list[float]], *, again: bool) -> float:
    service = register(home, {"callee": CALL_APPS["callee"]}, {})["callee"]
    try:
        took_ms = _restart_ms(service)
        if again:
            service.request_stop()
            service.wait_until_stopped(30.0)
            took_ms = _restart_ms(service)
        for name, process in zip(memory, service.processes(), strict=True):
            memory[name].append(memory_of(process.pid).resident)
        return took_ms
    finally:
        service.kill()


def _restart_ms(service: Service) -> float:
    """Kill the service, and measure its start."""
    service.kill()

    def start() -> None:
        service.start()
        service.wait_for_phase("normal", timeout_s=RECOVERY_TIMEOUT_S)

    return _timed_ms(start)


def _timed_ms(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begun)


# How long a checkpoint delays the handlers, by the size of the state.


INLINE, FORK = 'checkpoint="inline"', 'checkpoint="fork"'
HOLDERS = {FORK: "ForkingHolder", INLINE: "Holder"}
REPEATS_MAX = 3
CHECKPOINT_TIMEOUT_S = 120.0
WARM_UP_S, STEADY_S = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Figures of one checkpoint under load: the longest pauses between two calls, and the calls/s meanwhile."""

    longest_ms: float
    steady_ms: float  # without a checkpoint
    seconds: float
    percent: float  # of the calls/s without a checkpoint


def checkpoint(context: Context) -> list[Figure]:
    """Measure how long a checkpoint delays the handlers, by the size of the state."""
    figures = []
    for size_mib in context.amounts.state_sizes_mib:
        what = f"checkpoint of {size_mib} MiB"
        turns = {name: partial(_checkpoint, context, app, size_mib) for name, app in HOLDERS.items()}
        results = context.interleave(turns, what, min(context.amounts.repeats, REPEATS_MAX))
        pauses = values(results, "longest_ms")
        pauses["no checkpoint"] = [one.steady_ms for some in results.values() for one in some]
        pause_targets = [Target("at most", 100, of=FORK)] if size_mib == 1024 else []
        rate_targets = [Target("at least", 50, of=FORK)] if size_mib == 1024 else []
        chart = {"group": "checkpoint: longest pause, ms", "x": size_mib, "x_label": "size of the state, MiB"}
        during = values(results, "percent")
        figures += [
            _ms(f"{what}: longest pause of the handlers", pauses, pause_targets, **chart),
            Figure(f"{what}: calls/s meanwhile", "% of those before", "higher", during, rate_targets),
            Figure(f"{what}: until it is complete", "s", "lower", values(results, "seconds")),
        ]
    return figures


def _checkpoint(context: Context, app: str, size_mib: int) -> Pause:
    with context.home() as home, _holding(home, app, size_mib) as holder:
        process = holder.processes()[1]
        _query_app(process, "touch")
        time.sleep(WARM_UP_S)
        _query_app(process, "pauses")
        time.sleep(STEADY_S)
        steady = _query_app(process, "pauses")
        seconds = _timed_ms(lambda: _request_checkpoint(holder)) / 1e3
        during = _query_app(process, "pauses")
    percent = 100 * (during["calls"] / during["seconds"]) / (steady["calls"] / steady["seconds"])
    return Pause(1e3 * during["longest_s"], 1e3 * steady["longest_s"], seconds, percent)


@contextmanager
def _holding(home: Path, app: str, size_mib: int) -> Iterator[Service]:
    """Run a service with a state of that size."""
    services = register(home, {"holder": f"scripts.benchmarks.apps:{app}"}, {})
    with running(services):
        said = _query_app(services["holder"].processes()[1], f"fill {size_mib}")
        if said != {"entries": size_mib << 10}:
            raise BenchError(f"the holder said {said}")
        yield services["holder"]


def _query_app(app: Popen[str], line: str) -> dict[str, Any]:
    write_line(app, line)
    return dict(json.loads(read_line(app, "the app")))


def _request_checkpoint(service: Service) -> None:
    status = service.status()
    before = 0 if status is None else _id(status)
    control.query(service.settings.folder, "checkpoint")
    service.wait_for(lambda status: _id(status) > before, "has taken no checkpoint", CHECKPOINT_TIMEOUT_S)


def _id(status: dict[str, Any]) -> int:
    return status["checkpoint"]["id"] if status["checkpoint"] else 0


# Growth: by the size of the log, the state, and the number of peers and waiting handlers.


GIB = 1 << 30
RECOVERY_TIMEOUT_S = 300.0
FILL_CALLS = 8_000  # of 64 KiB, at a time
SMALL, LARGE = Load((16,)), Load((64 << 10,))


def growth(context: Context) -> list[Figure]:
    """Measure growth: figures by the size of the log, the state, and the number of peers and waiting handlers."""
    return [*_log(context), *_state(context), *_peers(context), *_waiting(context)]


# --- the log ---------------------------------------------------------------------------------------------------------


def _log(context: Context) -> list[Figure]:
    figures: list[Figure] = []
    growing = _Growing("size of the log", "size of the log, GiB")
    with context.home() as home, immortal_streams(home, keep_checkpoints=None) as streams:
        receiver = streams.services["receiver-0"]
        for size_gib in sorted(context.amounts.log_sizes_gib):
            what = f"log of {size_gib:g} GiB"
            size_bytes = size_gib * GIB
            if shutil.disk_usage(home).free < 1.5 * (size_bytes - _size_bytes(receiver)) + 2 * GIB:
                context.skipped[what] = "there is not enough room on the disk"
                break
            while (written := _size_bytes(receiver)) < size_bytes:
                context.progress(f"{what}: {written / GIB:.1f} GiB are written")
                streams.run(LARGE, min(FILL_CALLS, max(1, round((size_bytes - written) / LARGE.sizes[0]))))
            rates = compare_streams(context, {IMMORTAL: streams}, SMALL, what)
            figures += [
                growing.recovery(context, receiver, what, size_gib),
                growing.figure(rate(f"{what}: one-way 16 B", rates), "one-way 16 B by {}, calls/s", size_gib),
            ]
    return figures


def _size_bytes(service: Service) -> int:
    """Return the size of the log's used pages: the file itself can be larger."""
    return (Path(service.settings.log) / "data.mdb").stat().st_blocks * 512


@dataclass(frozen=True, slots=True)
class _Growing:
    """What grows, in words, and the label of the axis."""

    what: str
    label: str

    def figure(self, figure: Figure, group: str, x: float) -> Figure:
        """Return ``figure`` as a point of a chart, with the title ``group``."""
        return replace(figure, group=group.format(self.what), x=x, x_label=self.label)

    def recovery(self, context: Context, service: Service, what: str, x: float) -> Figure:
        def turn() -> float:
            _request_checkpoint(service)
            return _restart_ms(service)

        starts = context.interleave({IMMORTAL: turn}, f"{what}: recovery")
        figure = _ms(f"{what}: recovery after kill -9, just after a checkpoint", starts)
        return self.figure(figure, "recovery by {}, ms", x)


def _state(context: Context) -> list[Figure]:
    figures = []
    growing = _Growing("size of the state", "size of the state, MiB")
    for size_mib in context.amounts.state_sizes_mib:
        with context.home() as home, _holding(home, "ForkingHolder", size_mib) as holder:
            figures.append(growing.recovery(context, holder, f"state of {size_mib} MiB", size_mib))
    return figures


def _peers(context: Context) -> list[Figure]:
    figures = []
    growing = _Growing("number of peers", "peers that send")
    for number in context.amounts.peer_counts:
        what = f"{number} peers"
        with context.home() as home, immortal_streams(home, senders=number) as streams:
            rates = compare_streams(context, {IMMORTAL: streams}, Load((16,), senders=number), what)
            peak_mib = memory_of(streams.services["receiver-0"].processes()[0].pid).peak
        one_way = rate(f"{what}: one-way 16 B, all to one", rates)
        figures += [
            growing.figure(one_way, "one-way 16 B by {}, calls/s", number),
            Figure(f"{what}: peak memory of the receiver's coordinator", "MiB", "lower", {IMMORTAL: [peak_mib]}),
        ]
    return figures


def _waiting(context: Context) -> list[Figure]:
    figures = []
    growing = _Growing("number of handlers that wait", "handlers that wait")
    for number in context.amounts.waiting:
        what = f"{number:,} handlers wait"
        with context.home() as home:
            services = register(home, {**CALL_APPS, "caller": "scripts.benchmarks.apps:WaitingCaller"}, {})
            with running(services):
                context.progress(what)
                app = services["caller"].processes()[1]
                said = _query_app(app, str(number))
                if said != {"held": number}:
                    raise BenchError(f"{number} handlers were to wait, the app said {said}")
                caller = Caller(IMMORTAL, processes_of(services), services["caller"].check_alive)
                call = latency(
                    f"{what}: one awaited call beside them", "p50", compare_callers(context, [caller], 1, what)
                )
                memory = {IMMORTAL: [memory_of(app.pid).resident]}
                recovery = growing.recovery(context, services["caller"], what, number)
        figures += [
            growing.figure(call, "one awaited call by {}, p50, µs", number),
            recovery,
            Figure(f"{what}: memory of the app", "MiB", "lower", memory),
        ]
    return figures
