"""Recovery: the rate of a replay, and how soon a service works again after kill -9."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from immortal.bench.calls import CALL_APPS, IMMORTAL, Caller, running
from immortal.bench.one_way import CALL_OVERHEAD_BYTES, ImmortalStreams, Load, Replay, immortal_streams, measure_replay
from immortal.bench.processes import BenchError, Service, register
from immortal.bench.workload import Run
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import HANDLER, Figure, Target, median
from scripts.benchmarks.limits import handler_rate

LOAD = Load((16,))
FEW_CALLS = 1_000
CALLS_UNTIL_KILL = 200
CALLS_AFTER = 200


def run(context: Context) -> list[Figure]:
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
    """The longest that a call has waited, in ms; each answer is checked by the caller."""
    before = caller.run(Run(1, CALLS_UNTIL_KILL, 16))
    # The calls are in the other thread: the callee's processes would die with the thread that started them.
    with ThreadPoolExecutor(1) as executor:
        running_calls = executor.submit(caller.run, Run(1, CALLS_UNTIL_KILL + CALLS_AFTER, 16))
        time.sleep(before.seconds / 2)
        callee.kill()
        callee.start()
        callee.wait_for_phase("normal")
        return running_calls.result().max_us / 1e3
