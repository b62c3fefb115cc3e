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
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import wordcount
from networks import ADDRESSES, Networks, NetworksError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from immortal.appsdk.state import decode_envelope
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.log import open_reader
from immortal.protocol.errors import ImmortalError

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, Kill, RunError, console

LINES_WANTED = 600_000  # of the default input
POLL_S = 0.05
STALLED_S = 60.0  # without progress for so long, the run fails
PEER_PORT = 7400  # no other process has it in a network of its own
READER, COUNTER = "reader", "counter"
APPS = {READER: "wordcount:Reader", COUNTER: "wordcount:Counter"}
SIDES = {name: side for side, name in enumerate(APPS)}
ROLES = (APP, COORDINATOR)


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
    """Count as the two services must: (words, lines), by file and not by line."""
    words: Counter[str] = Counter()
    line_count = 0
    for file in files:
        text = wordcount.text_of(file)
        words.update(text.split())
        line_count += len(text.splitlines())
    return words, line_count


# --- one instance under its supervisor -------------------------------------------------------------------------------


class Instance(supervised.Instance):
    """Instance that is watched through its log lines and its coordinator's status.

    ``networks``: set if each instance has its own.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        total: int,
        kills: list[Kill],
        networks: Networks | None,
    ) -> None:
        self.folder, self.total, self.kills, self.networks = folder, total, kills, networks
        self.status: dict[str, Any] = {}
        self.lines = 0  # its progress
        self.error: str | None = None
        self.done: list[Kill] = []
        inside = list if networks is None else partial(networks.inside, SIDES[name])
        super().__init__(name, APPS[name], folder.parent, Path(__file__).parent, environment, inside=inside)
        self.stopping = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def _watch(self) -> None:
        """Query the status, and kill when a kill is due and the last one is recovered from."""
        try:
            if self.networks is not None:
                self.networks.enter(SIDES[self.name])
            self._watch_kills()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _watch_kills(self) -> None:
        killed: tuple[Kill, float, int] | None = None  # the kill to recover from, when, and the epoch then
        waiting = deque(self.kills)
        while not self.stopping.wait(POLL_S):
            if self.supervisor.poll() is not None:
                self.error = f"its supervisor ended with status {self.supervisor.returncode}"
                return
            try:
                status = control.query(self.folder, "status", 1.0)
            except ImmortalError:
                continue  # it is down, or busy
            if status["phase"] != "normal" or (killed and status["epoch"] <= killed[2]):
                continue
            if killed is not None:
                killed[0].recovery_s = time.monotonic() - killed[1]
                self.done.append(killed[0])
                killed = None
            self.lines = max(self.lines, self._progress(status))
            if waiting and self.lines >= waiting[0].count and self.kill(waiting[0].role):
                kill = waiting.popleft()
                kill.count = self.lines
                killed = (kill, time.monotonic(), status["epoch"])
                continue
            self.status = status

    def _progress(self, status: dict[str, Any]) -> int:
        """Return the lines done: for Reader the calls that it has made, for Counter those in its log."""
        if self.name == READER:
            return int(status["outputs"].get(COUNTER, {}).get("position", 0))
        return int(status["inputs"].get(READER, {}).get("position", 0))

    def is_complete(self) -> bool:
        """Return True if all lines went through and every kill is recovered from."""
        status = self.status
        if len(self.done) < len(self.kills) or not status or status["backlog_records"]:
            return False
        if self.name == READER:
            output = status["outputs"].get(COUNTER, {"position": 0, "acknowledged": 0})
            return bool(output["acknowledged"] == output["position"] == self.total)
        return self._progress(status) == self.total

    def stop_watching(self) -> None:
        self.stopping.set()
        self.watcher.join()

    def end(self) -> None:
        self.stop_watching()
        super().end()


# --- the run ---------------------------------------------------------------------------------------------------------


def run(
    folder: Path, files: Sequence[Path], total: int, kills: list[Kill], *, keep: bool, networks: Networks | None
) -> float:
    """Feed, kill, wait until all is counted, stop cleanly; return the seconds until all was counted.

    ``keep``: never trim the logs, which are read later. ``networks``: set if each instance has its own.
    """
    home = folder / REGISTRY_NAME
    listing = folder / "files.txt"
    listing.write_text("".join(f"{file}\n" for file in files))
    environment = {**os.environ, "WORDCOUNT_FILES": str(listing)}
    registry = Registry(home)
    folders: dict[str, Path] = {}
    for name in (COUNTER, READER):
        trimming: dict[str, Any] = {"keep_checkpoints": None} if keep else {}
        peer = "tcp://127.0.0.1:*" if networks is None else f"tcp://{ADDRESSES[SIDES[name]]}:{PEER_PORT}"
        settings = registry.register(name, peer, **trimming)
        if networks is not None:
            keys.make(settings.folder)  # required outside loopback
        folders[name] = settings.folder
    instances: list[Instance] = []
    try:
        started_s = time.monotonic()
        for name, place in folders.items():
            own = [kill for kill in kills if kill.name == name]
            instances.append(Instance(name, place, environment, total, own, networks))
        wait_until_complete(instances, total, len(kills))
        elapsed_s = time.monotonic() - started_s
        if networks is not None:
            for instance in instances:
                if instance.status["security"]["key"] is None:
                    raise instance.failed("what went over the cable was not encrypted")
            console.print("in two networks, with a cable between them; encrypted and authenticated with CURVE")
        for instance in instances:
            instance.stop_watching()
        for instance in instances:
            instance.stop()
        return elapsed_s
    finally:
        for instance in instances:
            instance.end()


def wait_until_complete(instances: Sequence[Instance], total: int, kill_count: int) -> None:
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {
            READER: progress.add_task("lines read", total=total),
            COUNTER: progress.add_task("lines counted", total=total),
        }
        kills_bar = progress.add_task("kills", total=kill_count)
        moved_s = time.monotonic()
        before: tuple[int, ...] = ()
        while not all(instance.is_complete() for instance in instances):
            for instance in instances:
                progress.update(bars[instance.name], completed=instance.lines)
                if instance.error is not None:
                    raise instance.failed(instance.error)
            recovered = sum(len(instance.done) for instance in instances)
            progress.update(kills_bar, completed=recovered)
            now = (recovered, *(instance.lines for instance in instances))
            if now != before:
                before, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > STALLED_S:
                slowest = min(instances, key=lambda instance: instance.lines)
                raise slowest.failed(f"nothing has moved for {STALLED_S:.0f} s; last status: {slowest.status}")
            time.sleep(POLL_S)
        for name in bars:
            progress.update(bars[name], completed=total)
        progress.update(kills_bar, completed=kill_count)


def final_state(folder: Path, name: str) -> dict[str, Any]:
    """Return the attributes in the checkpoint that the clean stop has just written."""
    settings = Registry(folder / REGISTRY_NAME).load(name)
    with open_reader(settings.log, name) as reader:
        summary = reader.summary()
        newest = summary.checkpoints[-1]
        if newest.sequence_id != summary.last_sequence_id:
            raise RunError(
                f"{name}: the last checkpoint is of record {newest.sequence_id},"
                f" the log ends with record {summary.last_sequence_id}: the stop was not clean"
            )
        blob = b"".join(reader.checkpoint_chunks(newest.checkpoint_id))
        state: dict[str, Any] = msgspec.msgpack.decode(decode_envelope(blob)[1])
        return state


# --- output ----------------------------------------------------------------------------------------------------------


def compare(folder: Path, expected: Counter[str], total: int) -> list[str]:
    """Return the differences; none if all is equal."""
    words = final_state(folder, COUNTER)["words"]
    lines = final_state(folder, READER)["lines"]
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
