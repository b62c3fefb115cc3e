"""Check of every record and every checkpoint, in parallel, which lists all problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from immortal.coordinator.core.errors import LogError
from immortal.pipeline.jobs.audit import LogReport, results_of
from immortal.pipeline.jobs.evidence import LOG
from immortal.pipeline.jobs.sources import ExportFleet, Fleet, LogFleet, open_fleet
from immortal.pipeline.reading import log_folders
from immortal.protocol import decoding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage in a log or an export. ``instance``: the log's folder, if the log does not name its instance."""

    instance: str
    place: str  # "record 812", "checkpoint 3", "tables", "export"
    text: str


@dataclass(slots=True)
class VerifyReport:
    records: dict[str, int] = field(default_factory=dict)  # sound ones, by instance
    checkpoints: dict[str, int] = field(default_factory=dict)  # sound ones, by instance
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0

    def add(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.problem_count += 1

    def to_json(self, first: int) -> dict[str, Any]:
        """Return plain values, with at most ``first`` of the problems in full."""
        return {
            "sound": not self.problem_count,
            "records": self.records,
            "checkpoints": self.checkpoints,
            "problem_count": self.problem_count,
            "problems": [asdict(problem) for problem in self.problems[:first]],
        }


@dataclass(frozen=True, slots=True)
class Opened:
    """Logs that could be opened, and problems of the others; ``fleet`` is None if none could."""

    fleet: Fleet | None
    problems: list[Problem]


def open_all(paths: Sequence[str]) -> Opened:
    """Open the logs whose small tables are sound enough; the others become problems. Raises SourceError."""
    try:
        return Opened(open_fleet(paths), [])
    except LogError:  # one of several: which?
        sound, problems = [], []
        for folder in log_folders(list(paths)):
            try:
                LogFleet([folder])
                sound.append(folder)
            except LogError as error:
                problems.append(Problem(folder, "tables", str(error)))
        return Opened(LogFleet(sound) if sound else None, problems)


def verify(spark: SparkSession, opened: Opened) -> VerifyReport:
    """Verify logs, or an export. Damage is reported, not raised."""
    report = VerifyReport()
    for problem in opened.problems:
        report.add(problem)
    fleet = opened.fleet
    if fleet is None:
        return report
    evidence = fleet.evidence(spark)
    for what, _, name, _, _, body in results_of(spark, evidence.where(evidence["what"] == LOG)):
        if what == "log":
            log = LogReport(**decoding.load_json(body))
            report.records[name] = log.records
            for first, _, text in log.damages:
                report.add(Problem(name, f"record {first}", text))
            report.problem_count += log.damaged - len(log.damages)
    for name in fleet.states:
        report.records.setdefault(name, 0)
    if not isinstance(fleet, ExportFleet) or "checkpoints" in fleet.tables:
        _verify_checkpoints(spark, fleet, report)
    if isinstance(fleet, ExportFleet):
        _verify_export(spark, fleet, report)
    return report


def _verify_checkpoints(spark: SparkSession, fleet: Fleet, report: VerifyReport) -> None:
    checkpoints = fleet.table(spark, "checkpoints").select("instance", "checkpoint_id", "ok", "reason")
    for row in checkpoints.orderBy("instance", "checkpoint_id").toLocalIterator():
        if row["ok"]:
            report.checkpoints[row["instance"]] = report.checkpoints.get(row["instance"], 0) + 1
        else:
            report.add(Problem(row["instance"], f"checkpoint {row['checkpoint_id']}", row["reason"]))


def _verify_export(spark: SparkSession, fleet: ExportFleet, report: VerifyReport) -> None:
    """Compare the records of an export with its state."""
    from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

    raw = fleet.table(spark, "raw")
    rows = raw.groupBy("instance").agg(F.count(F.lit(1)).alias("records"), F.bit_xor("check").alias("check")).collect()
    found = {row["instance"]: (row["records"], row["check"]) for row in rows}
    for name, expected in sorted(fleet.exported.items()):
        records, check = found.get(name, (0, 0))
        if (records, check) != (expected["records"], expected["check"]):
            text = (
                f"{name!r} has {records} records with checksum {check % (1 << 64):016x} in the export, its state says"
                f" {expected['records']} with {expected['check'] % (1 << 64):016x}: files were changed or removed"
            )
            report.add(Problem(name, "export", text))
