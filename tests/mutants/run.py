"""Change the code in small ways, one at a time, and see whether the tests notice: scripts/mutants.

    scripts/mutants                          100 changes, spread over the rooms
    scripts/mutants --number 20 --only coordinator/driver
    scripts/mutants --seed 7                 other ones

A change is tried against those tests of its room that run the changed function, then against 200 seeds of the
simulation where that runs its module. The work tree is left alone: each process has the changed module in memory.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import proof
from tests.mutants.operators import Mutant, mutants
from tests.mutants.rooms import PACKAGE, PYTEST, ROOMS, ROOT, BaselineError, Reach, Room, environment, reach_of

ACCEPTED = Path(__file__).with_name("survivors.toml")
SEEDS = 200
WALL_LIMIT_S = 600.0  # of each stage: what waits for ever uses no processor
PROCESSOR_FACTOR, PROCESSOR_MIN_S = 3, 30  # times what the tests take as the code is
STATUS_BASELINE = 1
STATUS_SURVIVED = 3
STATUS_INTERRUPTED = 130

# In a folder of PYTHONPATH, so each process that a test starts has the change as well.
_CUSTOMIZE = """\
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location

class Loader(SourceFileLoader):
    def get_data(self, path):
        with open({changed!r} if path == self.path else path, "rb") as file:
            return file.read()

    def path_stats(self, path):
        raise OSError("nothing of it is cached")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            return spec_from_file_location(
                name, {path!r}, loader=Loader(name, {path!r}), submodule_search_locations={folders!r}
            )

sys.meta_path.insert(0, Finder)
"""
_SIMULATE = f"""\
import sys
from tests.simulation.plan import draw
from tests.simulation.run import failure_of
sys.exit(any(failure_of(draw(seed)) is not None for seed in range({SEEDS})))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``killed_by``: "unit tests", "simulation", or None for a survivor. ``why``: what a failing run said last."""

    mutant: Mutant
    killed_by: str | None
    why: str
    seconds: float


def plant(mutant: Mutant, folder: Path) -> None:
    """From now on a process with ``folder`` in its PYTHONPATH imports the changed module."""
    path = PACKAGE / mutant.path
    is_package = path.name == "__init__.py"
    parts = Path(mutant.path).parent.parts if is_package else Path(mutant.path).with_suffix("").parts
    (folder / "changed.py").write_bytes(mutant.source)
    (folder / "sitecustomize.py").write_text(
        _CUSTOMIZE.format(
            changed=str(folder / "changed.py"),
            module=".".join((PACKAGE.name, *parts)),
            path=str(path),
            folders=[str(path.parent)] if is_package else None,
        )
    )


def run_limited(command: Sequence[str], folder: str, processor_s: float) -> str | None:
    """None if it passes, otherwise what it said last. What it has started ends with it."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            limit_s = int(processor_s)
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit_s, limit_s + 5))
            status = process.wait(WALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"time limit: {WALL_LIMIT_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == -signal.SIGXCPU:
        return f"time limit: {limit_s} s of a processor"
    return None if status == 0 else lines[0] if lines else f"status {status}"


def try_out(mutant: Mutant, reach: Reach) -> Outcome:
    begun_s = time.monotonic()
    files = reach.tests_of((mutant.path, mutant.within))
    rest = sorted(set(reach.files).difference(files))  # they may run it in processes of their own
    processor_s = PROCESSOR_MIN_S + PROCESSOR_FACTOR * sum(reach.files.values())
    stages = [("unit tests", [*PYTEST, *some]) for some in (files, rest) if some]
    if reach.is_simulated(mutant.path):
        stages.append(("simulation", ["-c", _SIMULATE]))
    for stage, command in stages:
        with tempfile.TemporaryDirectory(prefix="immortal-mutant-") as folder:
            plant(mutant, Path(folder))
            why = run_limited(command, folder, processor_s)
        if why is not None:
            return Outcome(mutant, stage, why, time.monotonic() - begun_s)
    return Outcome(mutant, None, "", time.monotonic() - begun_s)


# --- which ones -------------------------------------------------------------------------------------------------------

Key = tuple[str, str, str]


def key_of(mutant: Mutant) -> Key:
    return mutant.path, mutant.within, mutant.change


def accepted_in(path: Path) -> dict[Key, str]:
    """The reason for each. Raises OSError; ValueError for what is not such a file."""
    content = tomllib.loads(path.read_text())
    found = {}
    for entry in content.get("survivor", []):
        if set(entry) != {"path", "within", "change", "reason"} or not all(entry.values()):
            raise ValueError(f"{path}: {entry} came, expected a path, within, change and reason")
        found[entry["path"], entry["within"], entry["change"].strip()] = entry["reason"]
    return found


def all_of(room: Room, only: str | None) -> list[Mutant]:
    paths = [path for path in room.modules() if only is None or path == only or path.startswith(f"{only}/")]
    return [mutant for path in paths for mutant in mutants(path, (ROOT / path).read_bytes())]


def draw(seed: int, number: int, of_rooms: Mapping[str, Sequence[Mutant]], accepted: Mapping[Key, str]) -> list[Mutant]:
    """Of each room as many as of the others, while it has that many; what is accepted is left out."""
    heaps = {}
    for name, found in of_rooms.items():
        heaps[name] = [mutant for mutant in found if key_of(mutant) not in accepted]
        random.Random(f"{seed} {name}").shuffle(heaps[name])
    drawn: list[Mutant] = []
    while any(heaps.values()):
        for heap in heaps.values():
            while heap and len(drawn) < number:
                mutant = heap.pop()
                if mutant.is_sound:
                    drawn.append(mutant)
                    break
        if len(drawn) == number:
            break
    return drawn


# --- the command ------------------------------------------------------------------------------------------------------


def show(outcome: Outcome, number: int, count: int) -> None:
    mutant = outcome.mutant
    said = f"killed by {outcome.killed_by}: {outcome.why}" if outcome.killed_by else "SURVIVED"
    print(
        f"{number}/{count} {mutant.path}:{mutant.line} {mutant.operator} ({outcome.seconds:.0f} s): {said}", flush=True
    )


def show_all(outcomes: Sequence[Outcome], stale: Sequence[Key]) -> None:
    counts = Counter(outcome.killed_by for outcome in outcomes)
    print(f"{len(outcomes)} mutants: {counts['unit tests']} killed by the tests of their room,")
    print(f"  {counts['simulation']} by the simulation, {counts[None]} survived")
    for path, within, change in stale:
        print(f"accepted, but there is no such change any more: {path} {within}\n{change}")
    for outcome in outcomes:
        if outcome.killed_by is None:
            mutant = outcome.mutant
            print(f"\n# line {mutant.line}, {mutant.operator}\n[[survivor]]\npath = '{mutant.path}'")
            print(f"within = '{mutant.within}'\nchange = '''\n{mutant.change}'''\nreason = ''")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--number", type=int, default=100, metavar="N", help="how many (default: 100)")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="which ones (default: 0)")
    made.add_argument("--only", metavar="PATH", help="of this module or folder alone")
    made.add_argument("--line", type=int, metavar="L", help="and of this line alone: all of them")
    made.add_argument("--survivors", type=Path, default=ACCEPTED, metavar="FILE", help="those that are accepted")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    proof.add_option(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser()
    options = arguments.parse_args(argv)
    if options.number < 1 or options.jobs < 1:
        arguments.error("--number and --jobs: a positive number was expected")
    recorder = proof.Recorder(is_on=options.record)
    only = None if options.only is None else options.only.rstrip("/")
    try:
        accepted = accepted_in(options.survivors)
    except (OSError, ValueError) as error:
        arguments.error(f"--survivors: {error}")
    of_rooms = {room.name: all_of(room, only) for room in ROOMS}
    if options.line is not None:
        of_rooms = {name: [one for one in found if one.line == options.line] for name, found in of_rooms.items()}
    of_rooms = {name: found for name, found in of_rooms.items() if found}
    if not of_rooms:
        arguments.error(f"--only {only}: nothing to change is there; rooms: {', '.join(room.folder for room in ROOMS)}")
    keys = {key_of(one) for room in ROOMS for one in all_of(room, None)}
    stale = [key for key in accepted if key not in keys]
    drawn = draw(options.seed, options.number, of_rooms, accepted)
    try:
        reaches = {room.name: reach_of(room) for room in ROOMS if room.name in of_rooms}
    except BaselineError as error:
        print(error, file=sys.stderr)
        return STATUS_BASELINE
    outcomes, is_interrupted = [], False
    with ThreadPoolExecutor(options.jobs) as pool:
        room_of = {id(one): name for name, found in of_rooms.items() for one in found}
        try:
            for outcome in pool.map(lambda one: try_out(one, reaches[room_of[id(one)]]), drawn):
                outcomes.append(outcome)
                show(outcome, len(outcomes), len(drawn))
        except KeyboardInterrupt:  # those that are under way are waited for
            pool.shutdown(wait=False, cancel_futures=True)
            is_interrupted = True
    show_all(outcomes, stale)
    if is_interrupted:
        return STATUS_INTERRUPTED
    survivors = sum(outcome.killed_by is None for outcome in outcomes)
    command = f"scripts/mutants --number {options.number} --seed {options.seed}"
    command += "" if only is None else f" --only {only}"
    counts = {"mutants": len(outcomes), "survived": survivors}
    return recorder.end("mutants", command, STATUS_SURVIVED if stale or survivors else 0, counts)


if __name__ == "__main__":
    sys.exit(main())
