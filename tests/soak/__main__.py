"""scripts/soak [--kills N | --faults N] [--minutes M] [--round K] [--seed S] [--workload NAME]...
scripts/soak --ha [--takeovers N] [--minutes M] [--seed S]"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from tests import proof
from tests.soak.faults import Faults
from tests.soak.havoc import Havoc
from tests.soak.outcomes import Fault
from tests.soak.service import SoakError
from tests.soak.workloads import WORKLOADS, Workload


class Course(Protocol):
    """What happens to the services of one round; ``counts`` are by what was done, ``beside`` of what does not count."""

    counts: Counter[str]
    beside: Counter[str]

    def start(self) -> None: ...

    def wreak(self, count: int, deadline_s: float) -> None: ...

    def finish(self) -> None: ...

    def end(self) -> None: ...


class Stopped(BaseException):
    """By a signal."""


def stop_at_signals() -> None:
    """All services are ended then. They have process groups of their own: nobody else would do it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)  # the end is under way
        raise Stopped(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for one in numbers:
        signal.signal(one, stop)


def run_round(name: str, faults: bool, count: int, deadline_s: float, seed: str) -> tuple[Course, str]:
    """Start, wreak, settle, stop, compare. Raises SoakError; the folder with all logs stays then, and only then."""
    keeps = False
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"immortal-soak-{name}-"))
    workload: Workload = WORKLOADS[name](folder, rng)
    course: Course = (
        Faults(folder, workload.services, rng, workload.feed)
        if faults
        else Havoc(workload.services, rng, workload.feed)
    )
    try:
        course.start()
        course.wreak(count, deadline_s)
        course.finish()
        workload.settle()
        for service in workload.services:
            service.stop()
        found = workload.check()
    except SoakError as error:
        keeps = True
        done = ", ".join(f"{count} {what}" for what, count in course.counts.items())
        raise SoakError(
            f"{name}, seed {seed!r}, after {done or 'nothing'}: {error}\nlogs are kept in {folder}"
        ) from error
    finally:
        course.end()
        for service in workload.services:
            service.end()
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
    return course, found


def by_number(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Kill processes of the examples, and let their disks fail; then count."
    )
    parser.add_argument("--kills", type=int, help="kill -9 in all (default: 1000)")
    parser.add_argument("--faults", type=int, help="in place of kills: faults of all kinds in all")
    parser.add_argument("--ha", action="store_true", help="logs in PostgreSQL, with followers: faults of both")
    parser.add_argument("--takeovers", type=int, help="with --ha: faults in all (default: 200)")
    names = [fault.name for fault in Fault]
    parser.add_argument("--only", action="append", choices=names, help="with --ha: a kind of faults (several times)")
    parser.add_argument("--small", action="store_true", help="with --ha: only one bank and the teller have followers")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new faults after so long")
    parser.add_argument("--round", type=int, default=50, help="kills or faults before the counts are compared (50)")
    parser.add_argument("--seed", type=int, default=None, help="draws all; which one it was is printed")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append", help="default: all, in turn")
    proof.add_option(parser)
    options = parser.parse_args()
    if options.kills is not None and options.faults is not None:
        parser.error("--kills and --faults are two kinds of run: give one of them")
    if not options.ha and (options.takeovers is not None or options.small or options.only):
        parser.error("--takeovers, --small and --only go with --ha")
    if options.ha and (options.kills, options.faults, options.workload) != (None,) * 3:
        parser.error("--kills, --faults and --workload do not go with --ha")
    if options.takeovers is not None and options.takeovers < 1:
        parser.error("--takeovers must be at least 1")
    faults = options.faults is not None
    total = options.faults if faults else options.kills or 1000
    if total < 1 or options.round < 1 or options.minutes <= 0:
        parser.error("--kills, --faults and --round must be at least 1, --minutes more than 0")
    if faults and not (shutil.which("cc") or shutil.which("gcc")):
        parser.error("--faults needs a C compiler, for the disks that fail and the clocks that jump")
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    recorder = proof.Recorder(is_on=options.record)
    minutes = f" --minutes {options.minutes:g}" if options.minutes < float("inf") else ""
    if options.ha:
        from tests.soak.ha import run  # psycopg is not needed otherwise

        count = options.takeovers or 200
        status, counts = run(count, options.minutes, seed, small=options.small, only=options.only or ())
        small = " --small" if options.small else ""
        kinds = "".join(f" --only {kind}" for kind in options.only or ())
        return recorder.end(
            "takeovers", f"scripts/soak --ha{small} --takeovers {count}{minutes} --seed {seed}{kinds}", status, counts
        )
    names = options.workload or sorted(WORKLOADS)
    what = "faults" if faults else "kills"
    command = f"scripts/soak --{what} {total}{minutes} --seed {seed}"
    command += "".join(f" --workload {name}" for name in options.workload or ())
    print(f"seed {seed}", flush=True)
    done: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    rounds = 0
    started_s = time.monotonic()
    deadline_s = started_s + 60 * options.minutes
    while done.total() < total and time.monotonic() < deadline_s:
        name = names[rounds % len(names)]
        round_started_s = time.monotonic()
        try:
            count = min(options.round, total - done.total())
            course, found = run_round(name, faults, count, deadline_s, f"{seed}-{rounds}")
        except SoakError as error:
            print(f"soak: {error}", file=sys.stderr)
            return recorder.end(what, command, 1, {what: done.total(), "rounds": rounds})
        rounds += 1
        done += course.counts
        beside += course.beside
        took_s = time.monotonic() - round_started_s
        print(f"round {rounds}: {name}, {course.counts.total()} {what}, {found} ({took_s:.0f} s)", flush=True)
    took_s = time.monotonic() - started_s
    each_s = took_s / max(done.total(), 1)
    print(f"{done.total()} {what} in {rounds} rounds, {took_s:.0f} s: {each_s:.2f} s each")
    for kind, number in [*by_number(done), *by_number(beside)]:
        print(f"  {number:5} {kind}")
    return recorder.end(what, command, 0, {what: done.total(), "rounds": rounds})


if __name__ == "__main__":
    stop_at_signals()
    try:
        sys.exit(main())
    except Stopped as stopped:
        print("soak: stopped; nothing of it runs any more", file=sys.stderr, flush=True)
        os._exit(128 + stopped.args[0])  # threads may wait for answers still
