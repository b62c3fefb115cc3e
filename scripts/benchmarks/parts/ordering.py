"""Multicasts in one order, by destinations: beside them the same fan-out without an order, and a sequencer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.processes import BenchError
from immortal.client import connect
from immortal.coordinator.service.process import die_with_parent
from scripts.benchmarks.apps import Fan, Sink
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, Figure, Target
from scripts.benchmarks.rivals.sequencer import SEQUENCER, Sequencer, sequencer
from scripts.benchmarks.rivals.servers import postgres_programs

UNORDERED = "plain calls, no order"
ONE_CALL = "one plain awaited call"
CALLS_PER_BURST = 20_000  # a burst is answered when its last multicast stands
AWAITED = 100
ALL_ROUNDS_NOTE = "All rounds, between the four processes of a plain call: none waits for a processor for long."
_READY_S = 60.0


@contextlib.contextmanager
def _running(home: Path, destinations: int) -> Iterator[None]:
    coordinator = [sys.executable, "-m", "immortal", "--home", str(home)]
    apps = {"fan": "Fan"} | {f"d{number}": "Sink" for number in range(destinations)}
    quiet = subprocess.DEVNULL
    with contextlib.ExitStack() as stack:
        for name, cls in apps.items():
            subprocess.run([*coordinator, "register", name, "--peer", "tcp://127.0.0.1:*"], check=True, stdout=quiet)
            command = [*coordinator, "run", name, f"scripts.benchmarks.apps:{cls}"]
            process = subprocess.Popen(command, stdout=quiet, stderr=quiet, preexec_fn=die_with_parent(os.getpid()))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _rate(fan: Any, sinks: list[Any], seconds: float, *, ordered: bool) -> float:
    """Multicasts in a second, from the first to the last one that all have counted."""
    before = [sink.counted() for sink in sinks]
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        fan.burst(CALLS_PER_BURST, len(sinks), ordered)
        count += CALLS_PER_BURST
    for sink, had in zip(sinks, before, strict=True):
        while (seen := sink.counted() - had) < count:
            if time.perf_counter() - began_s > _READY_S:
                raise BenchError(f"{seen} of {count} multicasts have come")
    return count / (time.perf_counter() - began_s)


def _sequenced(rival: Sequencer, seconds: float) -> float:
    """Measure the rival's rate as _rate does: one transaction for as many calls as a burst has."""
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        rival.send(CALLS_PER_BURST)
        count += CALLS_PER_BURST
    rival.wait()
    return count / (time.perf_counter() - began_s)


def _p50_us(fan: Any, ask: Callable[[], Any]) -> float:
    """Return the median latency of the AWAITED calls that ``ask`` makes one after the other; in µs."""
    fan.p50_us()
    ask()
    latency_us: float = fan.p50_us()
    return latency_us


def run(context: Context) -> list[Figure]:
    figures = []
    for destinations in context.amounts.multicast_destinations:
        with context.home() as home, _running(home, destinations), contextlib.ExitStack() as stack:
            fan: Any = stack.enter_context(connect(Fan, "fan", home=home, timeout=_READY_S))
            sinks = [
                stack.enter_context(connect(Sink, f"d{number}", home=home, timeout=_READY_S))
                for number in range(destinations)
            ]
            fan.ask(1, destinations, ordered=True)
            # Behind bursts the disk is busy with what they have left.
            what = f"multicasts to {destinations}, awaited, p50"
            asks = {
                IMMORTAL: partial(_p50_us, fan, partial(fan.ask, AWAITED, destinations, ordered=True)),
                UNORDERED: partial(_p50_us, fan, partial(fan.ask, AWAITED, destinations, ordered=False)),
                ONE_CALL: partial(_p50_us, fan, partial(fan.ask_one, AWAITED)),
            }
            targets = [Target("at most", 3, ONE_CALL)] if destinations == 3 else []
            figures.append(Figure(what, "µs", "lower", context.interleave(asks, what), targets))
            if destinations == 3:
                figures.append(_all_rounds(context, fan))
            what = f"multicasts to {destinations}, one-way"
            turns = {
                IMMORTAL: partial(_rate, fan, sinks, context.amounts.seconds, ordered=True),
                UNORDERED: partial(_rate, fan, sinks, context.amounts.seconds, ordered=False),
            }
            if postgres_programs() is not None:
                rival = stack.enter_context(sequencer(context.folder, destinations))
                turns[SEQUENCER] = partial(_sequenced, rival, context.amounts.seconds)
            targets = [Target("at least", 50_000)] if destinations == 3 else []
            figures.append(Figure(what, "multicasts/s", "higher", context.interleave(turns, what), targets))
    return figures


def _all_rounds(context: Context, fan: Any) -> Figure:
    what = "multicasts to one other and oneself, awaited, p50"
    asks = {
        IMMORTAL: partial(_p50_us, fan, partial(fan.ask_with_itself, AWAITED)),
        ONE_CALL: partial(_p50_us, fan, partial(fan.ask_one, AWAITED)),
    }
    targets = [Target("at most", 3, ONE_CALL)]
    return Figure(what, "µs", "lower", context.interleave(asks, what), targets, note=ALL_ROUNDS_NOTE)
