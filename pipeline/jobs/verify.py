"""Parallel check of all records and checkpoints, which lists all problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

from immortal.pipeline.jobs.audit import LogReport, results_of
from immortal.pipeline.jobs.evidence import LOG
from immortal.pipeline.jobs.sources import ExportFleet, Fleet, Unreadable
from immortal.protocol import decoding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage in a log or an export."""

    instance: str
    place: str  # "record 812", "checkpoint 3", "export"
    text: str


@dataclass(slots=True)
class VerifyReport:
    records: dict[str, int] = field(default_factory=dict)  # sound ones, by instance
    checkpoints: dict[str, int] = field(default_factory=dict)  # sound ones, by instance
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0
    unreadable: Sequence[Unreadable] = ()

    def add(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.problem_count += 1

    def to_json(self, first: int) -> dict[str, Any]:
        """Return the report as plain values, with the first ``first`` problems."""
        return {
            "sound": not self.problem_count and not self.unreadable,
            "records": self.records,
            "checkpoints": self.checkpoints,
            "problem_count": self.problem_count,
            "problems": [asdict(problem) for problem in self.problems[:first]],
            "unreadable": [asdict(each) for each in self.unreadable],
        }


def verify(spark: SparkSession, fleet: Fleet) -> VerifyReport:
    """Verify logs, or an export. Damage is reported, not raised."""
    report = VerifyReport()
    evidence = fleet.evidence(spark, streams=False)
    for what, _, name, _, _, body in results_of(spark, evidence.where(evidence["what"] == LOG)):
        if what == "log":
            log = decoding.decode_json(body, type=LogReport)
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
    report.unreadable = fleet.unreadable
    return report


def _verify_checkpoints(spark: SparkSession, fleet: Fleet, report: VerifyReport) -> None:
    columns = ["instance", "checkpoint_id", "ok", "reason"]
    for row in sorted(fleet.table(spark, "checkpoints", columns).collect(), key=lambda row: row[:2]):
        if row["ok"]:
            report.checkpoints[row["instance"]] = report.checkpoints.get(row["instance"], 0) + 1
        else:
            report.add(Problem(row["instance"], f"checkpoint {row['checkpoint_id']}", row["reason"]))


def _verify_export(spark: SparkSession, fleet: ExportFleet, report: VerifyReport) -> None:
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
