"""Count the words of many files with two services, while their processes are killed one after another; then compare.

    scripts/demo [FILES...] [--crashes N] [--seed S] [--keep FOLDER] [--peer tcp]

Four processes run: Reader and Counter, each with its coordinator, each pair under `immortal run --restart`. A seed
draws the kills over the progress of their instance (lines read, or counted), so that all occur before the end. With
`--peer tcp` each pair is in a network of its own, with a cable between the two, as on two machines: the traffic is
encrypted.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import wordcount
from networks import ADDRESSES, Networks, NetworksError
from rich.table import Table

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.protocol.errors import ImmortalError

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, Kill, RunError, console

LINES_WANTED = 600_000  # of the default input
POLL_S = 0.05
PEER_PORT = 7400  # no other process has it in a network of its own
READER, COUNTER = "reader", "counter"
APPS = {READER: "wordcount:Reader", COUNTER: "wordcount:Counter"}
SIDES = {name: side for side, name in enumerate(APPS)}
ROLES = (APP, COORDINATOR)
FOLDER = Path(__file__).parent


# --- the input -------------------------------------------------------------------------------------------------------


def default_files() -> list[Path]:
    """Return the files of Python's standard library: all but its tests, then tests up to LINES_WANTED lines."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    found = [path for path in sorted(library.rglob("*.py")) if not left_out & set(path.relative_to(library).parts)]
    test_folders = {"test", "tests", "idle_test"}
    tests = [path for path in found if test_folders & set(path.relative_to(library).parts)]
    chosen: list[Path] = []
    line_count = 0
    for path in [*(path for path in found if path not in set(tests)), *tests]:
        if line_count >= LINES_WANTED:
            break
        chosen.append(path)
        line_count += len(wordcount.text_of(path).splitlines())
    return chosen


def plain_count(files: Sequence[Path]) -> tuple[Counter[str], int]:
    """Count words and lines of all files in this process, as the two services must count them."""
    words: Counter[str] = Counter()
    line_count = 0
    for file in files:
        text = wordcount.text_of(file)
        words.update(text.split())
        line_count += len(text.splitlines())
    return words, line_count


# --- the run ---------------------------------------------------------------------------------------------------------


class Instance(supervised.Instance):
    """Instance whose progress, in lines, is read from its coordinator's status. ``networks``: None on one machine."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str], networks: Networks | None) -> None:
        self.status: dict[str, Any] = {}
        inside = list if networks is None else partial(networks.inside, SIDES[name])
        super().__init__(name, APPS[name], home, FOLDER, environment, inside=inside)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(home / name, networks), daemon=True)
        self._watcher.start()

    def _watch(self, folder: Path, networks: Networks | None) -> None:
        if networks is not None:
            networks.enter(SIDES[self.name])
        while not self._stopping.wait(POLL_S):
            with suppress(ImmortalError):  # it is down, or busy
                self.status = control.query(folder, "status", 1.0)
                self.count = max(self.count, self._lines())

    def _lines(self) -> int:
        """Return the number of lines done: for Reader, those that Counter acknowledged; for Counter, those logged."""
        if self.name == READER:
            return int(self.status["outputs"].get(COUNTER, {}).get("acknowledged", 0))
        return int(self.status["inputs"].get(READER, {}).get("position", 0))

    def end(self) -> None:
        self._stopping.set()
        self._watcher.join()
        super().end()


def run(
    folder: Path, files: Sequence[Path], total: int, kills: list[Kill], *, keep: bool, networks: Networks | None
) -> float:
    """Run the services and kill their processes until all is counted, then stop them; return the seconds it took.

    ``keep``: never trim the logs, which are read later. ``networks``: set if each instance has its own.
    """
    home, listing = folder / REGISTRY_NAME, folder / "files.txt"
    listing.write_text("".join(f"{file}\n" for file in files))
    environment = {**os.environ, "WORDCOUNT_FILES": str(listing)}
    registry = Registry(home)
    for name in APPS:
        trimming: dict[str, Any] = {"keep_checkpoints": None} if keep else {}
        peer = "tcp://127.0.0.1:*" if networks is None else f"tcp://{ADDRESSES[SIDES[name]]}:{PEER_PORT}"
        settings = registry.register(name, peer, **trimming)
        if networks is not None:
            keys.create(settings.folder)  # required outside loopback
    instances: list[Instance] = []

    def start(name: str) -> Instance:
        instances.append(Instance(name, home, environment, networks))
        return instances[-1]

    elapsed_s = supervised.run(APPS, start, "lines", list(APPS), total, kills)
    if networks is not None:
        for instance in instances:
            if instance.status["security"]["key"] is None:
                raise instance.failed("what went over the cable was not encrypted")
        console.print("in two networks, with a cable between them; encrypted and authenticated with CURVE")
    return elapsed_s


# --- output ----------------------------------------------------------------------------------------------------------


def compare(folder: Path, expected: Counter[str], total: int) -> list[str]:
    """Compare the services' counts with ``expected`` and ``total``; return a line for each difference."""
    home = folder / REGISTRY_NAME
    words = supervised.final_state(home, COUNTER, FOLDER)["words"]
    lines = supervised.final_state(home, READER, FOLDER)["lines"]
    console.print(f"plain Counter: {expected.total():,} words, {len(expected):,} distinct, {total:,} lines")
    console.print(f"two immortals: {sum(words.values()):,} words, {len(words):,} distinct, {lines:,} lines")
    differences = [
        f"{word!r} was counted {words.get(word, 0)} times, {expected[word]} expected"
        for word in sorted(words.keys() | expected.keys())
        if words.get(word, 0) != expected[word]
    ]
    return differences + ([f"{lines:,} lines were read, {total:,} expected"] if lines != total else [])


def print_kills(kills: Sequence[Kill]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kill -9", "at line", "recovered after"):
        table.add_column(column, justify="left" if column == "kill -9" else "right")
    for kill in kills:
        table.add_row(f"{kill.name}'s {kill.role}", f"{kill.count:,}", f"{kill.recovery_s or 0:.2f} s")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], prog="scripts/demo")
    parser.add_argument("files", nargs="*", type=Path, help="default: the source of Python's standard library")
    parser.add_argument("--crashes", type=int, default=8, metavar="N", help="how many kills (default 8)")
    parser.add_argument("--seed", type=int, help="of the kills; drawn and printed without it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new one, where the whole logs stay")
    parser.add_argument(
        "--peer",
        choices=("loopback", "tcp"),
        default="loopback",
        help="tcp: each instance in a network of its own, with keys; needs root (default loopback)",
    )
    options = parser.parse_args()
    if options.peer == "tcp" and os.geteuid() != 0:
        parser.error("--peer tcp makes two network namespaces, which only root can: sudo scripts/demo --peer tcp")
    if options.crashes < 0:
        parser.error("--crashes cannot be negative")
    for file in options.files:
        if not file.is_file():
            parser.error(f"there is no file {file}")
    if (
        options.keep is not None
        and options.keep.exists()
        and (not options.keep.is_dir() or any(options.keep.iterdir()))
    ):
        parser.error(f"{options.keep} is not an empty folder; a new one is expected")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    files = [file.absolute() for file in options.files] or default_files()
    expected, total = plain_count(files)
    console.print(f"{total:,} lines of {len(files):,} files; {options.crashes} kills, seed {seed}")
    kills = supervised.draw_kills(options.crashes, total, APPS, ROLES, random.Random(seed)) if total else []

    def work(folder: Path) -> tuple[list[str], str]:
        with ExitStack() as stack:
            networks = stack.enter_context(Networks()) if options.peer == "tcp" else None
            elapsed_s = run(folder, files, total, kills, keep=options.keep is not None, networks=networks)
        print_kills(sorted(kills, key=lambda kill: kill.count)) if kills else None
        differences = compare(folder, expected, total)
        console.print(f"{total / elapsed_s:,.0f} lines/s over {elapsed_s:.1f} s, {len(kills)} kills, seed {seed}")
        return differences, "equal"

    return supervised.conclude(work, options.keep, f"; seed {seed}", (RunError, NetworksError, ImmortalError))


if __name__ == "__main__":
    sys.exit(main())
