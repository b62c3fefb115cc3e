"""Run the simulation: scripts/simulate.

    scripts/simulate                      1,000 seeds, on all processors
    scripts/simulate --minutes 10         as many as there is time for
    scripts/simulate --seed 42            one, with a trace of all that happens

A seed that fails is run again, made smaller while it still fails, and shown with the command that repeats it. The exit
status is then 3. It is 1 if at least 10,000 seeds ran and some mark was never reached: the simulation no longer tests
that place.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tests import proof
from tests.simulation.marks import EXPECTED
from tests.simulation.plan import FAULT_KINDS, Plan, draw
from tests.simulation.shrink import shrink
from tests.simulation.trace import Trace
from tests.simulation.world import Totals, World, as_text

NIGHTLY_SEEDS = 10_000
SHARE_SEEDS = 50  # handed to a process at once
TRACE_LINES_SHOWN = 60
STATUS_NEVER_REACHED = 1
STATUS_FAILED = 3


def failure_of(plan: Plan, trace: Trace | None = None, totals: Totals | None = None) -> str | None:
    """Run ``plan``; return its failure, in a line or more, or None. Its totals are added to ``totals``."""
    world = World(plan, trace)
    try:
        world.run()
    except Exception as error:  # a Violation, or any error of the code under test
        return f"{type(error).__name__}: {error}"
    finally:
        if totals is not None:
            totals.add(world.totals())
    return None


def run_share(seeds: range) -> tuple[Totals, list[tuple[int, str]]]:
    """Run seeds, in a process of its own; return (their totals, the seeds that failed and why)."""
    totals, failures = Totals(), []
    for seed in seeds:
        failure = failure_of(draw(seed), totals=totals)
        if failure is not None:
            failures.append((seed, failure))
    return totals, failures


def shares(first: int, count: int | None, deadline_s: float | None) -> Iterator[range]:
    """Yield the seeds to run, in shares, until there are ``count`` or the time is up."""
    done = 0
    while (count is None or done < count) and (deadline_s is None or time.monotonic() < deadline_s):
        size = SHARE_SEEDS if count is None else min(SHARE_SEEDS, count - done)
        yield range(first + done, first + done + size)
        done += size


def run_many(all_shares: Iterable[range], jobs: int) -> tuple[Totals, list[tuple[int, str]]]:
    totals = Totals()
    failures: list[tuple[int, str]] = []

    def take(result: tuple[Totals, list[tuple[int, str]]]) -> None:
        totals.add(result[0])
        failures.extend(result[1])
        if sys.stderr.isatty():
            print(f"\r{totals.runs} seeds, {len(failures)} failed ", end="", file=sys.stderr, flush=True)

    if jobs == 1:
        for share in all_shares:
            take(run_share(share))
        return totals, failures
    gc.freeze()
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            waiting = []
            for share in all_shares:
                waiting.append(pool.submit(run_share, share))
                if len(waiting) >= 2 * jobs:  # so that the time is checked
                    take(waiting.pop(0).result())
            for future in waiting:
                take(future.result())
    finally:
        gc.unfreeze()
    return totals, failures


# --- output -----------------------------------------------------------------------------------------------------------


def command_for(plan: Plan) -> str:
    """Return the command that repeats a plan that was drawn and then made smaller."""
    drawn = draw(plan.seed)
    parts = [f"scripts/simulate --seed {plan.seed}"]
    if plan.faults != drawn.faults:
        kept = [str(drawn.faults.index(fault)) for fault in plan.faults]
        parts.append(f"--faults {','.join(kept) or 'none'}")
    if plan.names != drawn.names:
        parts.append(f"--instances {len(plan.names)}")
    if plan.work != drawn.work:
        parts.append(f"--work {plan.work}")
    for option in ("loss", "duplicate", "late"):
        if getattr(plan, f"{option}_rate") != getattr(drawn, f"{option}_rate"):
            parts.append(f"--no-{option}")
    if plan.fails != drawn.fails:
        parts.append("--no-failing")
    if plan.ends_with_power_failure != drawn.ends_with_power_failure:
        parts.append("--no-power-failure")
    return " ".join(parts)


def show_failure(seed: int, failure: str) -> None:
    print(f"\nseed {seed} fails: {failure}")
    smallest = shrink(draw(seed), lambda candidate: failure_of(candidate) is not None)
    trace = Trace()
    failure = failure_of(smallest, trace) or "it does not fail any more"
    print(f"the smallest that still fails:\n{as_text(smallest)}\nits last steps:")
    print("\n".join(trace.lines[-TRACE_LINES_SHOWN:]))
    print(f"{failure}\nrepeat it: {command_for(smallest)}")


def show_one(plan: Plan) -> int:
    trace = Trace()
    failure = failure_of(plan, trace)
    print(as_text(plan))
    print("\n".join(trace.lines))
    print(f"trace {trace.digest()}, {len(trace.lines)} lines")
    print(f"fails: {failure}" if failure else "passes")
    return STATUS_FAILED if failure else 0


def show_totals(totals: Totals, seconds: float, processor_s: float) -> None:
    print(
        f"{totals.runs:,} seeds in {seconds:.0f} s, "
        f"{totals.runs / max(processor_s, 1e-9):.0f} per second of a processor, "
        f"{totals.events // max(totals.runs, 1):,} events each"
    )
    for name in (
        "events",
        "effects",
        "records",
        "messages",
        "frames_lost",
        "frames_doubled",
        "frames_held",
        "starts",
        "crashes",
        "upgrades",
    ):
        print(f"  {name.replace('_', ' ')}: {getattr(totals, name):,}")
    print(f"  simulated: {totals.simulated_s:,.1f} s")
    print("faults: " + ", ".join(f"{kind} {totals.faults[kind]:,}" for kind in FAULT_KINDS))
    never = totals.marks.never_reached()
    print(f"marks: {len(EXPECTED) - len(never)} of {len(EXPECTED)} reached")
    for mark in never:
        print(f"  never reached: {mark}")


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=_positive, metavar="N", help="how many (default: 1000, or as --minutes allow)")
    made.add_argument("--first", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    made.add_argument("--minutes", type=float, metavar="M", help="no new ones after this time")
    made.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    proof.add_option(made)
    one = made.add_argument_group("one seed, with its trace")
    one.add_argument("--seed", type=int, metavar="N", help="run this one")
    one.add_argument("--faults", metavar="0,3,...", help="only these faults of its plan; 'none': without any")
    one.add_argument("--instances", type=_positive, metavar="N", help="fewer instances")
    one.add_argument("--work", type=_positive, metavar="N", help="less work for each")
    one.add_argument("--no-loss", action="store_true", help="no frame is lost")
    one.add_argument("--no-duplicate", action="store_true", help="none is doubled")
    one.add_argument("--no-late", action="store_true", help="none is late")
    one.add_argument("--no-failing", action="store_true", help="no message fails")
    one.add_argument("--no-power-failure", action="store_true", help="none at the end")
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} was given, a positive number was expected")
    return value


def plan_of(options: argparse.Namespace, error: argparse.ArgumentParser) -> Plan:
    """Return the plan of one seed, without the parts that the options leave out."""
    plan = draw(options.seed)
    if options.faults is not None:
        kept = [] if options.faults == "none" else options.faults.split(",")
        if not all(index.strip().isdigit() and int(index) < len(plan.faults) for index in kept):
            error.error(f"--faults {options.faults}: numbers below {len(plan.faults)} were expected, or 'none'")
        plan = replace(plan, faults=tuple(plan.faults[int(index)] for index in kept))
    if options.instances is not None:
        plan = replace(plan, names=plan.names[: options.instances])
    if options.work is not None:
        plan = replace(plan, work=options.work)
    for option in ("loss", "duplicate", "late"):
        if getattr(options, f"no_{option}"):
            plan = replace(plan, **{f"{option}_rate": 0.0})  # type: ignore[arg-type]
    if options.no_failing:
        plan = replace(plan, fails=False)
    if options.no_power_failure:
        plan = replace(plan, ends_with_power_failure=False)
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser()
    options = arguments.parse_args(argv)
    if options.seed is not None:
        return show_one(plan_of(options, arguments))
    if options.minutes is not None and options.minutes <= 0:
        arguments.error(f"--minutes {options.minutes:g}: a positive number was expected")
    recorder = proof.Recorder(is_on=options.record)
    began_s, began_processor_s = time.monotonic(), _processor_s()
    deadline_s = None if options.minutes is None else began_s + options.minutes * 60
    count = options.seeds or (1000 if deadline_s is None else None)
    totals, failures = run_many(shares(options.first, count, deadline_s), options.jobs)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    show_totals(totals, time.monotonic() - began_s, _processor_s() - began_processor_s)
    if failures:
        print(f"{len(failures)} failed: {', '.join(str(seed) for seed, _ in sorted(failures)[:20])}")
        show_failure(*min(failures))
    is_mark_missing = totals.runs >= NIGHTLY_SEEDS and bool(totals.marks.never_reached())
    if is_mark_missing:
        print("a mark was never reached: the simulation does not go there any more, or the core does not")
    return recorder.end(
        "simulation",
        f"scripts/simulate --first {options.first} --seeds {totals.runs}",
        STATUS_FAILED if failures else STATUS_NEVER_REACHED if is_mark_missing else 0,
        {"seeds": totals.runs, "crashes": totals.crashes, "faults": totals.faults.total(), "events": totals.events},
    )


def _processor_s() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
