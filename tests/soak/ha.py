"""scripts/soak --ha: faults of machines and of the database, drawn from a seed, one after the other.

Each is over when everything runs, and every follower has caught up. At the end the books of the banks are compared, and
what the clients saw.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.fleet import Fleet
from tests.soak.machines import has_rights
from tests.soak.outcomes import Fault
from tests.soak.service import SoakError
from tests.soak.takeovers import Faults, Outcome


def run(
    takeovers: int, minutes: float, seed: int, *, small: bool, only: Sequence[str] = ()
) -> tuple[int, dict[str, int]]:
    """Return the exit status, and counts. ``only``: names of the kinds that are drawn from; none: all."""
    started_s = time.monotonic()
    isolated = has_rights()
    print(f"seed {seed}" + ("" if isolated else "; no cut cables and no full disks, which need root"), flush=True)
    rng = random.Random(f"ha-{seed}")
    folder = Path(tempfile.mkdtemp(prefix="soak-ha-"))
    folder.chmod(0o755)
    done: dict[Fault, list[Outcome]] = {}
    count = 0
    ends: list[str] = []
    keeps = False
    try:
        with Fleet(folder, rng, isolated=isolated, small=small) as fleet:
            print(f"all runs, after {time.monotonic() - started_s:.0f} s", flush=True)
            faults = Faults(fleet, rng)
            bag: list[Fault] = []
            while count < takeovers and time.monotonic() < started_s + 60 * minutes:
                if not bag:
                    kinds = [kind for kind in faults.kinds if not only or kind.name in only]
                    if not kinds:
                        raise SoakError(f"{', '.join(only)}: these need root")
                    bag = rng.sample(kinds, len(kinds))
                kind = bag.pop()
                at_s = time.monotonic()
                outcome = faults.kinds[kind]()
                count += 1
                done.setdefault(kind, []).append(outcome)
                waits = f", answered after {max(outcome.waits_ms):,.0f} ms" if outcome.waits_ms else ""
                moved = f": {', '.join(outcome.moved)} elsewhere" if outcome.moved else ""
                fleet.until_all_is_well()
                print(f"{count}: {outcome.what}{moved}{waits} ({time.monotonic() - at_s:.1f} s)", flush=True)
            found = fleet.finish()
            ends = [end for placed in fleet.placed.values() for end in placed.ends]
    except (SoakError, AssertionError) as error:
        keeps = True
        print(f"soak: seed {seed}, after {count} faults: {error}\nfiles are kept in {folder}", file=sys.stderr)
        return 1, {"faults": count}
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
    print(found)
    _print_counts(done, ends, time.monotonic() - started_s)
    moved = sum(len(outcome.moved) for each in done.values() for outcome in each)
    return 0, {"faults": count, "takeovers": moved}


def _print_counts(done: dict[Fault, list[Outcome]], ends: list[str], took_s: float) -> None:
    outcomes = [outcome for each in done.values() for outcome in each]
    moved = sum(len(outcome.moved) for outcome in outcomes)
    print(f"{len(outcomes)} faults, {moved} takeovers of instances, {took_s:.0f} s")
    print("  faults  instances moved  clients answered after, ms: p50, most")
    for kind, each in done.items():
        waits = [wait for outcome in each for wait in outcome.waits_ms]
        told = f"{statistics.median(waits):,.0f}, {max(waits):,.0f}" if waits else "-"
        print(f"  {len(each):6}  {sum(len(outcome.moved) for outcome in each):15}  {told:>20}  {kind.value}")
    if ends:
        print(f"{len(ends)} times 'immortal run' ended by itself and was started again, as a supervisor does")
