"""Measures growth: figures by the size of the log, the state, and the number of peers and waiting handlers."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from immortal.bench.calls import CALL_APPS, IMMORTAL, Caller, processes_of, running
from immortal.bench.one_way import Load, immortal_streams
from immortal.bench.processes import MIB, BenchError, Service, memory_of, register
from immortal.coordinator.operator import control
from scripts.benchmarks.comparisons import calls_by, calls_for
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Better, Figure

GIB = 1 << 30
RECOVERY_TIMEOUT_S = 300.0
FILL_CALLS = 8_000  # of 64 KiB, at a time
CHECKPOINT_TIMEOUT_S = 120.0
SMALL, LARGE = Load((16,)), Load((64 << 10,))
__all__ = ["run"]


def run(context: Context) -> list[Figure]:
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
    """Return the size of the log's used pages: the file itself may be larger."""
    return (Path(service.settings.log) / "data.mdb").stat().st_blocks * 512


def _grown(x: float, x_label: str, name: str, unit: str, values: list[float], group: str) -> Figure:
    """``group``: with the unit behind it, the title of the chart."""
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
    before = _checkpoint_id(service)
    control.query(folder, "checkpoint")
    service.wait_for(lambda status: _id(status) > before, "has taken no checkpoint", CHECKPOINT_TIMEOUT_S)


def _checkpoint_id(service: Service) -> int:
    status = service.status()
    return 0 if status is None else _id(status)


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
    if app.stdin is None or app.stdout is None:
        raise BenchError("the app was not started")
    app.stdin.write(f"{line}\n")
    app.stdin.flush()
    answer = app.stdout.readline()
    if not answer:
        raise BenchError(f"the app ended with status {app.wait()}")
    return dict(json.loads(answer))


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
