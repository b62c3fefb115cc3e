"""Harness of all benchmarks: implementations that run in turns, and the figures that they give."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

from immortal.bench.processes import BenchError
from immortal.bench.workload import Measured
from immortal.protocol.command_line import echo, print_table

T = TypeVar("T")

IMMORTAL = "immortal"  # as it is installed
PURE = "immortal, pure Python"  # beside it if the codec is compiled
DISK = "disk: append + fdatasync"
TCP = "loopback TCP"
HANDLER = "bare Python loop"
LIMITS = (DISK, TCP, HANDLER)


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a figure. ``value`` is in its unit, or, with ``against``, times that one's figure in the same turn."""

    bound: Literal["at least", "at most"]
    value: float
    against: str | None = None
    of: str = IMMORTAL
    note: str = ""  # "compiled": the target holds for that alone

    def measured(self, samples: Mapping[str, list[float]]) -> float | None:
        """Return the figure to compare with ``value``; None if it was not measured."""
        ours, theirs = samples.get(self.of), samples.get(self.against or self.of)
        if not ours or not theirs:
            return None
        if self.against is None:
            return statistics.median(ours)
        if len(ours) == len(theirs):
            return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        return statistics.median(ours) / statistics.median(theirs)

    def met(self, samples: Mapping[str, list[float]]) -> bool | None:
        measured = self.measured(samples)
        if measured is None:
            return None
        return measured >= self.value if self.bound == "at least" else measured <= self.value

    def in_words(self, unit: str) -> str:
        note = f" ({self.note})" if self.note else ""
        value = number(self.value)
        return f"{self.bound} {value} {f'times {self.against}' if self.against else unit}{note}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured figure. ``samples``: by implementation, or by limit, one for each turn.

    ``group`` and ``x`` make a line of a chart out of several figures; without them the figure is a number of its own.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    samples: dict[str, list[float]]
    targets: list[Target] = field(default_factory=list)
    note: str = ""
    group: str = ""
    x: float | None = None
    x_label: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Figure:
        return cls(**{**data, "targets": [Target(**target) for target in data["targets"]]})


def number(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def spread(values: Sequence[float]) -> str:
    """Format the median, and lowest to highest if there are several values."""
    middle = number(statistics.median(values))
    return middle if len(values) < 2 else f"{middle} ({number(min(values))}-{number(max(values))})"


def show(title: str, figures: Sequence[Figure]) -> None:
    """Print a table of figures, and which targets are met."""
    rows = [
        ("" if index else f"{figure.name}, {figure.unit}", name, spread(values))
        for figure in figures
        for index, (name, values) in enumerate(figure.samples.items())
    ]
    print_table(("", " ", "median"), rows, right=("median",), title=f"{title}: medians (lowest-highest)")
    for figure in figures:
        for target in figure.targets:
            if (measured := target.measured(figure.samples)) is not None:
                value = f"{number(measured)} times" if target.against else number(measured)
                of = "" if target.of == IMMORTAL else f"{target.of}: "
                verdict = "met" if target.met(figure.samples) else "missed"
                echo(f"target: {figure.name}: {of}{target.in_words(figure.unit)}: {value}, {verdict}")


# Turns: other load on the machine affects all that run in turns alike.


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of a full run. QUICK has smaller ones."""

    repeats: int = 5
    seconds: float = 2.0  # of one turn of one implementation, roughly
    sizes: Sequence[int] = (16, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20)
    outstanding: Sequence[int] = (1, 8, 64, 1000)
    peers: int = 16  # of fan-out and fan-in
    handlers: Sequence[int] = (1, 64, 500)  # three-step handlers at a time
    replay_mb: int = 800
    log_sizes_gib: Sequence[float] = (1, 10)
    state_sizes_mib: Sequence[int] = (1, 16, 128, 1024)
    peer_counts: Sequence[int] = (2, 8, 32)
    waiting: Sequence[int] = (0, 100, 1000, 10_000)
    delays_ms: Sequence[float] = (0, 1, 5, 10)
    multicast_destinations: Sequence[int] = (2, 3, 4, 8, 16)


QUICK = Amounts(
    repeats=2,
    seconds=0.4,
    sizes=(16, 1 << 10, 64 << 10, 1 << 20),
    outstanding=(1, 64, 1000),
    peers=4,
    handlers=(1, 64),
    replay_mb=200,
    log_sizes_gib=(0.1, 0.3),
    state_sizes_mib=(1, 64),
    peer_counts=(2, 6),
    waiting=(0, 1000),
    delays_ms=(0, 5),
    multicast_destinations=(2, 3),
)


@dataclass(slots=True)
class Context:
    """Context of a benchmark: its folder, its amounts, and its progress."""

    amounts: Amounts
    folder: Path  # of logs and databases: its disk is the measured one
    progress: Callable[[str], None] = lambda text: None
    skipped: dict[str, str] = field(default_factory=dict)  # what was left out, and why

    @contextlib.contextmanager
    def home(self) -> Iterator[Path]:
        """Yield a folder that is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="immortal-bench-", dir=self.folder) as name:
            yield Path(name)

    def interleave(
        self, turns: Mapping[str, Callable[[], T]], title: str, repeats: int | None = None
    ) -> dict[str, list[T]]:
        """Run each of ``turns`` once, then each once more, and so on; return their results."""
        results: dict[str, list[T]] = {name: [] for name in turns}
        repeats = repeats or self.amounts.repeats
        for turn in range(repeats):
            for name, run in turns.items():
                self.progress(f"{title}: {name}, {turn + 1} of {repeats}")
                results[name].append(run())
        return results

    def compare(
        self,
        title: str,
        sides: Mapping[str, Callable[[int], Measured]],
        limits: Mapping[str, Callable[[], Any]] | None = None,
        *,
        first_calls: int = 200,
    ) -> dict[str, list[Any]]:
        """Interleave ``sides``, which make as many calls as they are asked for, with the limits of the machine.

        Each makes the calls of about ``seconds``. A rival that fails is skipped. Raises BenchError if we do.
        """
        turns: dict[str, Callable[[], Any]] = {}
        for name, run in sides.items():
            self.progress(f"{title}: {name}, warming up")
            try:
                turns[name] = partial(run, self.calls_for(run, first_calls))
            except BenchError as error:
                if name.startswith(IMMORTAL):
                    raise
                self.skipped[f"{title}: {name}"] = str(error).splitlines()[0]
        return self.interleave({**turns, **(limits or {})}, title)

    def calls_for(self, run: Callable[[int], Measured], first_calls: int) -> int:
        """Return the number of calls of a turn, after two runs, the first of which finds the processes cold."""
        calls = first_calls
        for _ in range(2):
            calls = max(1, round(run(calls).calls_per_s * self.amounts.seconds / 2))
        return 2 * calls


def values(results: Mapping[str, list[Any]], name: str) -> dict[str, list[float]]:
    """Return attribute ``name`` of all results; a result that is a number stands for itself."""
    return {side: [getattr(one, name, one) for one in some] for side, some in results.items()}


def rate(
    name: str, results: Mapping[str, list[Any]], targets: Sequence[Target] = (), unit: str = "calls/s", **more: Any
) -> Figure:
    """Return the figure of calls/s, or of what else ``unit`` says. ``more``: further fields."""
    return Figure(name, unit, "higher", values(results, "calls_per_s"), list(targets), **more)


def latency(
    name: str, percent: str, results: Mapping[str, list[Any]], targets: Sequence[Target] = (), **more: Any
) -> Figure:
    """Return the figure of a latency: ``percent`` is "p50", "p99" or "p99.9"."""
    samples = values(results, f"{percent.replace('.', '')}_us")
    return Figure(f"{name}, {percent}", "µs", "lower", samples, list(targets), **more)


@contextlib.contextmanager
def progress_lines() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress; without a terminal it prints each text before a colon only once."""
    console = Console(stderr=True)
    said: set[str] = set()
    with console.status("starting") as status:

        def progress(text: str) -> None:
            title = text.partition(":")[0]
            if console.is_terminal:
                status.update(text)
            elif title not in said:
                said.add(title)
                echo(title, err=True)

        yield progress
