"""Ledger of proof: which campaigns ran, on which commit, for how long, and with what result.

Each campaign (simulation, soak, fuzzing, mutants, tests) has ``--record``, which adds a line to docs/proof.jsonl and
writes docs/proof.md anew.

    python -m tests.proof                                write the page from the ledger
    python -m tests.proof --record versions PATH...      run these tests by pytest, and record them under that name
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct
from msgspec import json as msgspec_json

from scripts.benchmarks.machine import describe

ROOT = Path(__file__).parents[1]
LEDGER, PAGE = ROOT / "docs" / "proof.jsonl", ROOT / "docs" / "proof.md"
WRITTEN = ("docs/proof.jsonl", "docs/proof.md", "tests/fuzz/corpus")  # by campaigns: no change of what they try
CAMPAIGNS = {
    "simulation": "random runs of the core, with failing disks, networks and clocks",
    "kills": "`kill -9` of processes of the examples under load; then the books are compared",
    "faults": "the same with failing disks, losses of power, clock jumps, restored backups",
    "takeovers": "faults of machines and of PostgreSQL; histories of clients must be linearizable",
    "fuzzing": "random bytes for each reader of bytes from outside, guided by coverage",
    "mutants": "small changes of the code, each of which a test must notice",
    "versions": "services of earlier versions beside today's, and their logs",
    "disks": "failed syncs, full disks and losses of power at each place where an instance writes",
}
_INTRO = """# Proof

`scripts/nightly` runs these campaigns; `python -m tests.proof` writes this page from
[proof.jsonl](proof.jsonl), which has a line for each recorded run. A failed run stays there. The command repeats
a run on its commit, with the same seeds; only fuzzing draws new ones.
"""
_EARLIER = """
## Earlier runs

Not in proof.jsonl; each page names its command:

- 10,000 seeds of the simulation, 31,998 crashes, none failed:
  [tests/simulation/README.md](../tests/simulation/README.md)
- 210 faults of machines and PostgreSQL, 213 takeovers, seed 29:
  [benchmarks.md](benchmarks.md#faults-of-machines-and-postgresql)
"""


class Run(Struct, frozen=True):
    """A recorded run of a campaign. ``command`` repeats it."""

    campaign: str
    commit: str
    date: str
    machine: str
    seconds: int
    counts: dict[str, int]
    result: str
    command: str


class Recorder:
    """Measures one run from now on and adds it to the ledger, if ``is_on``. Raises SystemExit."""

    def __init__(self, *, is_on: bool) -> None:
        self._commit, self._began_s = "", time.monotonic()
        if is_on:
            changed = _git("status", "--porcelain", "--", ".", *(f":!{path}" for path in WRITTEN))
            if changed:
                print(
                    f"error: --record: commit these changes first, else nobody can repeat the run:\n{changed}",
                    file=sys.stderr,
                )
                raise SystemExit(2)
            self._commit = _git("rev-parse", "--short=10", "HEAD")

    def end(self, campaign: str, command: str, result: int, counts: Mapping[str, int]) -> int:
        """Record the run; return ``result``, its exit status."""
        if self._commit:
            machine = describe(ROOT)
            run = Run(
                campaign,
                self._commit,
                datetime.now(UTC).date().isoformat(),
                f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}",
                round(time.monotonic() - self._began_s),
                dict(counts),
                "passed" if result == 0 else f"failed, status {result}",
                command,
            )
            with LEDGER.open("ab") as ledger:
                ledger.write(msgspec_json.encode(run) + b"\n")
            PAGE.write_text(page(runs()))
        return result


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="add this run to docs/proof.jsonl and docs/proof.md")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def runs() -> list[Run]:
    """Return all recorded runs, oldest first."""
    return [msgspec_json.decode(line, type=Run) for line in LEDGER.read_bytes().splitlines()]


def page(recorded: Sequence[Run]) -> str:
    """Return the page for these runs, oldest first."""
    return _INTRO + "\n" + "\n".join(_lines(recorded)) + "\n" + _EARLIER


def _lines(recorded: Sequence[Run]) -> Iterator[str]:
    yield "| campaign | newest run | result | all runs |"
    yield "| --- | --- | --- | --- |"
    missing = []
    for name, what in CAMPAIGNS.items():
        of_campaign = [run for run in recorded if run.campaign == name]
        if not of_campaign:
            missing.append(name)
            continue
        newest, failed = of_campaign[-1], sum(run.result != "passed" for run in of_campaign)
        total: dict[str, int] = {}
        for run in of_campaign:
            for kind, count in run.counts.items():
                total[kind] = total.get(kind, 0) + count
        together = f": {_counted(total)} in {_duration(sum(run.seconds for run in of_campaign))}"
        yield (
            f"| **{name}**: {what} | {newest.date}, commit {newest.commit}: {_counted(newest.counts)} in"
            f" {_duration(newest.seconds)}: `{newest.command}` | {newest.result} | {len(of_campaign)}, {failed} failed"
            f"{together if of_campaign[1:] else ''} |"
        )
    yield ""
    if missing:
        yield f"Not recorded yet: {', '.join(missing)}."
    yield from (f"Machine of the newest run: {recorded[-1].machine}." for _ in recorded[-1:])


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


def _duration(seconds: int) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _run_tests(campaign: str, paths: Sequence[str]) -> int:
    recorder = Recorder(is_on=True)
    command = [".venv/bin/python", "-m", "pytest", "-n0", "-q", *paths]
    done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    counts = {
        kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-200:])
    }
    return recorder.end(campaign, " ".join(command), done.returncode, counts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", choices=CAMPAIGNS, metavar="CAMPAIGN", help="run tests and record them as a run of it"
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="test file, for --record")
    options = parser.parse_args()
    if bool(options.record) != bool(options.paths):
        parser.error("--record CAMPAIGN and paths of tests go together")
    if options.record:
        return _run_tests(options.record, options.paths)
    PAGE.write_text(page(runs()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
