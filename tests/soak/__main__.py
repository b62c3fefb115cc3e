"""scripts/soak [--kills N] [--round K] [--seed S] [--workload NAME]..."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.havoc import Havoc
from tests.soak.service import SoakError
from tests.soak.workloads import WORKLOADS


def run_round(name: str, kills: int, seed: str) -> tuple[Havoc, str]:
    """Start, wreak, settle, stop, compare. Raises SoakError; the folder with all logs stays then."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"immortal-soak-{name}-"))
    workload = WORKLOADS[name](folder, rng)
    havoc = Havoc(workload.services, rng, workload.feed)
    try:
        for service in workload.services:
            service.start()
        havoc.wreak(kills)
        workload.settle()
        for service in workload.services:
            service.stop()
        found = workload.check()
    except SoakError as error:
        raise SoakError(f"{name}, seed {seed!r}: {error}\nlogs are kept in {folder}") from error
    finally:
        for service in workload.services:
            service.end()
    shutil.rmtree(folder)
    return havoc, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Kill processes of the examples, and count.")
    parser.add_argument("--kills", type=int, default=1000, help="kill -9 in all (default: 1000)")
    parser.add_argument("--round", type=int, default=50, help="kills before the counts are compared (default: 50)")
    parser.add_argument("--seed", type=int, default=None, help="draws all; which one it was is printed")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append", help="default: all, in turn")
    options = parser.parse_args()
    if options.kills < 1 or options.round < 1:
        parser.error("--kills and --round must be at least 1")
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    names = options.workload or sorted(WORKLOADS)
    print(f"seed {seed}", flush=True)
    kills: Counter[str] = Counter()
    stops = rounds = 0
    started_s = time.monotonic()
    while kills.total() < options.kills:
        name = names[rounds % len(names)]
        round_started_s = time.monotonic()
        try:
            havoc, found = run_round(name, min(options.round, options.kills - kills.total()), f"{seed}-{rounds}")
        except SoakError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
        rounds += 1
        kills += havoc.kills
        stops += havoc.stops
        took_s = time.monotonic() - round_started_s
        print(
            f"round {rounds}: {name}, {havoc.kills.total()} kills, {havoc.stops} stops, {found} ({took_s:.0f} s)",
            flush=True,
        )
    took_s = time.monotonic() - started_s
    each_s = took_s / kills.total()
    print(f"{kills.total()} kills and {stops} stops in {rounds} rounds, {took_s:.0f} s: {each_s:.2f} s each")
    for victim, count in sorted(kills.items(), key=lambda item: -item[1]):
        print(f"  {count:5} {victim}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
