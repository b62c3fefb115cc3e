"""The section of docs/benchmarks/figures.txt on takeovers and moves; histograms for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- failover -->", "<!-- end of failover -->"
STEPS_MS = (10, 20, 50, 100, 200, 500, 1000)
LINES_MAX = 20
BAR_MAX = 60
HOW = {
    "kill": "kill -9 of the machine",
    "migrate": "`immortal migrate`",
    "stop": "SIGTERM",
    "upgrade": "a rolling upgrade",
}


def share_ms(waits_ms: Sequence[float], share: float) -> float:
    """Return the wait that ``share`` of all waits do not exceed."""
    ordered = sorted(waits_ms)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def histogram(waits_ms: Sequence[float]) -> list[str]:
    """A line for each step between the least and the most: the smallest steps that give LINES_MAX lines at most."""
    least, most = min(waits_ms), max(waits_ms)
    step = next((step for step in STEPS_MS if most // step - least // step < LINES_MAX), STEPS_MS[-1])
    counts = Counter(int(wait // step) for wait in waits_ms)
    a_mark = max(1.0, max(counts.values()) / BAR_MAX)
    return [
        f"{place * step:>6,} to {(place + 1) * step:>6,} ms {counts[place]:>4} {'#' * round(counts[place] / a_mark)}"
        for place in range(min(counts), max(counts) + 1)
    ]


def section(runs: Sequence[dict[str, Any]]) -> str:
    lines = [
        BEGIN,
        "## Takeovers and moves of an instance in PostgreSQL",
        "",
        "The longest time between two answers, of a caller that makes one call after the other. Two machines (for a",
        "kill each is a PID namespace with its own host name), the database, a peer and an outside client that call,",
        "all on one machine. Written by `python -m scripts.benchmarks.failover --report FILE ...`.",
        "",
        "| | state | lease | times | who waits | p50 | p90 | p99 | most |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        for who, waits_ms in run["waits_ms"].items():
            shares = " | ".join(f"{share_ms(waits_ms, share):,.0f} ms" for share in (0.5, 0.9, 0.99))
            lines.append(
                f"| {HOW[run['how']]} | {run['state_mib']:,} MiB | {run['lease_s']} s | {len(waits_ms)} | a {who} "
                f"| {shares} | {max(waits_ms):,.0f} ms |"
            )
    for run in runs:
        machine, load = run["machine"], run["load"]
        lines += [
            "",
            f"{machine['processor']}, {machine['cores']} cores, commit {machine['commit']}; load average"
            f" {load[0][0]} at the start, {load[1][0]} at the end.",
        ]
    return "\n".join([*lines, END])


def section_of(text: str) -> str:
    """Return the section as it stands in ``text``; "" if there is none."""
    return text[text.index(BEGIN) : text.index(END) + len(END)] if BEGIN in text and END in text else ""


def put(path: Path, new: str) -> None:
    """In place of the section that is there, or at the end."""
    text = path.read_text() if path.exists() else ""
    old = section_of(text)
    path.write_text(text.replace(old, new) if old else f"{text.rstrip()}\n\n{new}\n".lstrip())
