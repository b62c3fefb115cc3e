"""Recovery, start, checkpoints and growth of a service."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

from immortal.bench.calls import CALL_APPS, Caller, processes_of, running
from immortal.bench.one_way import CALL_OVERHEAD_BYTES, ImmortalStreams, Load, Replay, immortal_streams, measure_replay
from immortal.bench.processes import MIB, BenchError, Service, hear, memory_of, register, tell
from immortal.bench.workload import Run
from immortal.coordinator.operator import control
from scripts.benchmarks.comparisons import calls_by, calls_for
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import HANDLER, IMMORTAL, Better, Figure, Target
from scripts.benchmarks.limits import handler_rate
from scripts.benchmarks.snapshot import Measured, measure

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
        results, limited = context.interleave_with_limits(
            {"few": partial(_crash, streams, FEW_CALLS), "many": partial(_crash, streams, calls)},
            {HANDLER: partial(handler_rate, LOAD.sizes[0])},
            "replay",
        )
    few, many = results["few"], results["many"]
    rates = [
        (one.calls - FEW_CALLS) / max(1e-9, one.seconds - median([small.seconds for small in few])) for one in many
    ]
    return [
        Figure(
            "replay of 16 B calls, less the start of the processes",
            "calls/s",
            "higher",
            {IMMORTAL: rates, **limited},
            [Target("at least", 500e3), Target("at least", 1.0e6, note="with the compiled codec")],
        ),
        Figure(
            f"recovery after kill -9, about {calls:,} calls to replay, start of the processes included",
            "ms",
            "lower",
            {IMMORTAL: [1e3 * one.seconds for one in many]},
        ),
        Figure(
            f"recovery after kill -9, about {FEW_CALLS:,} calls to replay, start of the processes included",
            "ms",
            "lower",
            {IMMORTAL: [1e3 * one.seconds for one in few]},
        ),
    ]


def _crash(streams: ImmortalStreams, calls: int) -> Replay:
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
            caller.run(Run(1, CALLS_UNTIL_KILL, 16))
            results = context.interleave(
                {IMMORTAL: partial(_killed_in_the_middle, caller, services["callee"])}, "kill -9"
            )
    return Figure(
        "kill -9 of a callee with a small state, until its caller has the next answer",
        "ms",
        "lower",
        results,
        [Target("at most", 300)],
        note="The callee is started again at once, as a supervisor would. The start of two Python processes is in it.",
    )


def _killed_in_the_middle(caller: Caller, callee: Service) -> float:
    """Kill the callee during calls; return the longest wait of a call in ms. The caller checks each answer."""
    before = caller.run(Run(1, CALLS_UNTIL_KILL, 16))
    # The calls are in the other thread: the callee's processes would die with the thread that started them.
    with ThreadPoolExecutor(1) as executor:
        running_calls = executor.submit(caller.run, Run(1, CALLS_UNTIL_KILL + CALLS_AFTER, 16))
        time.sleep(before.seconds / 2)
        callee.kill()
        callee.start()
        callee.wait_for_phase("normal")
        return running_calls.result().max_us / 1e3


# A start, and the memory of an idle service.


PYTHON = "python -c pass"
CALLEE = "immortal.bench.apps:Callee"


def start(context: Context) -> list[Figure]:
    """Measure a start, and the memory of an idle service."""
    memory: dict[str, list[float]] = {"coordinator": [], "app": []}
    names = iter(range(sys.maxsize))
    with context.home() as home:
        results = context.interleave(
            {
                "a new log": lambda: _start(home / str(next(names)), memory, again=False),
                "again, after a clean stop": lambda: _start(home / str(next(names)), memory, again=True),
                PYTHON: _python,
            },
            "start",
        )
    return [
        Figure("start of coordinator and app, until they take input", "ms", "lower", results),
        Figure(f"memory of an idle {IMMORTAL} service", "MiB", "lower", memory),
    ]


def _start(home: Path, memory: dict[str, list[float]], *, again: bool) -> float:
    service = register(home, {"callee": CALLEE}, {})["callee"]
    try:
        begun = time.perf_counter()
        service.start()
        service.wait_for_phase("normal")
        if again:
            service.ask_to_stop()
            service.wait_until_stopped(30.0)
            service.kill()  # its pipes
            begun = time.perf_counter()
            service.start()
            service.wait_for_phase("normal")
        spent_s = time.perf_counter() - begun
        for name, process in zip(memory, service.processes(), strict=True):
            memory[name].append(memory_of(process.pid).resident / MIB)
        return 1e3 * spent_s
    finally:
        service.kill()


def _python() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return 1e3 * (time.perf_counter() - begun)


# How long a checkpoint delays the handlers, by the size of the state.


INLINE, FORK = 'checkpoint="inline"', 'checkpoint="fork"'
REPEATS_MAX = 3


def checkpoint(context: Context) -> list[Figure]:
    """Measure how long a checkpoint delays the handlers, by the size of the state."""
    figures = []
    for size_mib in context.amounts.state_sizes_mib:
        repeated = context.with_repeats(min(context.repeats, REPEATS_MAX))
        results = repeated.interleave(
            {
                FORK: partial(measure, "Fork", "large", size_mib),
                INLINE: partial(measure, "Inline", "large", size_mib),
            },
            f"checkpoint of {size_mib} MiB",
        )
        figures += _figures(size_mib, results)
    return figures


def _figures(size_mib: int, results: dict[str, list[Measured]]) -> list[Figure]:
    whole = size_mib == 1024
    pauses = {name: [1e3 * one.longest_pause_s for one in some] for name, some in results.items()}
    pauses["no checkpoint"] = [1e3 * one.steady_pause_s for some in results.values() for one in some]
    during = {
        name: [100 * one.during_calls_per_s / one.steady_calls_per_s for one in some] for name, some in results.items()
    }
    took = {name: [one.checkpoint_s for one in some] for name, some in results.items()}
    by_size = {"x": size_mib, "x_label": "size of the state, MiB"}
    return [
        Figure(
            f"checkpoint of {size_mib} MiB: longest pause of the handlers",
            "ms",
            "lower",
            pauses,
            [Target("at most", 100, of=FORK)] if whole else [],
            group="checkpoint: longest pause, ms",
            **by_size,  # type: ignore[arg-type]
        ),
        Figure(
            f"checkpoint of {size_mib} MiB: calls/s meanwhile",
            "% of those before",
            "higher",
            during,
            [Target("at least", 50, of=FORK)] if whole else [],
        ),
        Figure(f"checkpoint of {size_mib} MiB: until it is sent", "s", "lower", took),
    ]


# Growth: by the size of the log, the state, and the number of peers and waiting handlers.


GIB = 1 << 30
RECOVERY_TIMEOUT_S = 300.0
FILL_CALLS = 8_000  # of 64 KiB, at a time
CHECKPOINT_TIMEOUT_S = 120.0
SMALL, LARGE = Load((16,)), Load((64 << 10,))


def growth(context: Context) -> list[Figure]:
    """Measure growth: figures by the size of the log, the state, and the number of peers and waiting handlers."""
    return [*_log(context), *_state(context), *_peers(context), *_waiting(context)]


# --- the log ---------------------------------------------------------------------------------------------------------


def _log(context: Context) -> list[Figure]:
    figures: list[Figure] = []
    with context.home() as home, immortal_streams(home, keep_checkpoints=None) as streams:
        receiver = streams.services["receiver-0"]
        for size_gib in sorted(context.amounts.log_sizes_gib):
            what = f"log of {size_gib:g} GiB"
            size_bytes = size_gib * GIB
            if shutil.disk_usage(home).free < 1.5 * (size_bytes - _size_bytes(receiver)) + 2 * GIB:
                context.skip(what, "there is not enough room on the disk")
                break
            while (written := _size_bytes(receiver)) < size_bytes:
                context.progress(f"{what}: {written / GIB:.1f} GiB are written")
                streams.run(LARGE, min(FILL_CALLS, max(1, round((size_bytes - written) / LARGE.sizes[0]))))
            calls = calls_for(streams, SMALL, context.amounts.seconds)
            rates = [streams.run(SMALL, calls).calls_per_s for _ in range(context.repeats)]
            by, label = "size of the log", "size of the log, GiB"
            figures += [
                _recovery(context, receiver, what, size_gib, label, by),
                _grown(size_gib, label, f"{what}: one-way 16 B", "calls/s", rates, f"one-way 16 B by {by}"),
            ]
    return figures


def _size_bytes(service: Service) -> int:
    """Return the size of the log's used pages: the file itself can be larger."""
    return (Path(service.settings.log) / "data.mdb").stat().st_blocks * 512


def _grown(x: float, x_label: str, name: str, unit: str, values: list[float], group: str) -> Figure:
    """Return a figure of growth. ``group``, with the unit after it, is the title of the chart."""
    better: Better = "higher" if unit == "calls/s" else "lower"
    return Figure(name, unit, better, {IMMORTAL: values}, group=f"{group}, {unit}", x=x, x_label=x_label)


def _recovery(context: Context, service: Service, what: str, x: float, x_label: str, by: str) -> Figure:
    starts = []
    for turn in range(context.repeats):
        context.progress(f"{what}: recovery {turn + 1} of {context.repeats}")
        _take_checkpoint(service)
        starts.append(_restart_ms(service))
    name = f"{what}: recovery after kill -9, just after a checkpoint"
    return _grown(x, x_label, name, "ms", starts, f"recovery by {by}")


def _take_checkpoint(service: Service) -> None:
    folder = service.settings.folder
    status = service.status()
    before = 0 if status is None else _id(status)
    control.query(folder, "checkpoint")
    service.wait_for(lambda status: _id(status) > before, "has taken no checkpoint", CHECKPOINT_TIMEOUT_S)


def _id(status: dict[str, Any]) -> int:
    return status["checkpoint"]["id"] if status["checkpoint"] else 0


def _restart_ms(service: Service) -> float:
    service.kill()
    begun = time.perf_counter()
    service.start()
    service.wait_for_phase("normal", timeout_s=RECOVERY_TIMEOUT_S)
    return 1e3 * (time.perf_counter() - begun)


# --- the state -------------------------------------------------------------------------------------------------------


def _state(context: Context) -> list[Figure]:
    figures = []
    with context.home() as home:
        for size_mib in context.amounts.state_sizes_mib:
            what = f"state of {size_mib} MiB"
            services = register(home / str(size_mib), {"holder": "scripts.benchmarks.apps:Holder"}, {})
            with running(services):
                holder = services["holder"]
                said = _ask(holder.processes()[1], str(size_mib))
                if said != {"entries": size_mib << 10}:
                    raise BenchError(f"the holder said {said}")
                by = "size of the state"
                figures.append(_recovery(context, holder, what, size_mib, f"{by}, MiB", by))
    return figures


def _ask(app: Popen[str], line: str) -> dict[str, Any]:
    tell(app, line)
    return dict(json.loads(hear(app, "the app")))


# --- peers -----------------------------------------------------------------------------------------------------------


def _peers(context: Context) -> list[Figure]:
    figures = []
    for count in context.amounts.peer_counts:
        what = f"{count} peers"
        load = Load((16,), senders=count)
        with context.home() as home, immortal_streams(home, senders=count) as streams:
            calls = calls_for(streams, load, context.amounts.seconds)
            rates = []
            for turn in range(context.repeats):
                context.progress(f"{what}: {turn + 1} of {context.repeats}")
                rates.append(streams.run(load, calls).calls_per_s)
            coordinator, _ = streams.services["receiver-0"].peak_memory_mib()
        name, group = f"{what}: one-way 16 B, all to one", "one-way 16 B by number of peers"
        figures += [
            _grown(count, "peers that send", name, "calls/s", rates, group),
            Figure(f"{what}: peak memory of the receiver's coordinator", "MiB", "lower", {IMMORTAL: [coordinator]}),
        ]
    return figures


# --- handlers that wait ----------------------------------------------------------------------------------------------


def _waiting(context: Context) -> list[Figure]:
    figures = []
    for count in context.amounts.waiting:
        what = f"{count:,} handlers wait"
        with context.home() as home:
            apps = {**CALL_APPS, "caller": "scripts.benchmarks.apps:WaitingCaller"}
            services = register(home, apps, {})
            with running(services):
                context.progress(what)
                service = services["caller"]
                app = service.processes()[1]
                said = _ask(app, str(count))
                if said != {"held": count}:
                    raise BenchError(f"{count} handlers were to wait, the app said {said}")
                caller = Caller(IMMORTAL, processes_of(services), service.check_alive)
                measured, _ = calls_by(context, [caller], 1, what)
                memory = memory_of(app.pid).resident / MIB
                label, by = "handlers that wait", "number of handlers that wait"
                recovery = _recovery(context, service, what, count, label, by)
        name, group = f"{what}: one awaited call beside them, p50", f"one awaited call by {by}, p50"
        figures += [
            _grown(count, label, name, "µs", [one.p50_us for one in measured[IMMORTAL]], group),
            recovery,
            Figure(f"{what}: memory of the app", "MiB", "lower", {IMMORTAL: [memory]}),
        ]
    return figures
