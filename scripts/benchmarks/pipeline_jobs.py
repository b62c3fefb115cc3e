"""Measurement of an audit: creates a synthetic fleet, exports it, audits both.

python -m scripts.benchmarks.pipeline_jobs
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from immortal.pipeline.jobs.audit import audit
from immortal.pipeline.jobs.export import export
from immortal.pipeline.jobs.sources import open_fleet
from immortal.pipeline.jobs.stats import stats
from immortal.pipeline.jobs.verify import verify
from immortal.pipeline.session import session
from tests.helpers.synthetic_logs import Fleet, write_fleet

Result = TypeVar("Result")


def _timed(what: str, work: Callable[[], Result]) -> Result:
    started = time.monotonic()
    result = work()
    click.echo(f"{what:<24} {time.monotonic() - started:7.1f} s")
    return result


@click.command()
@click.option("--services", default=20, show_default=True)
@click.option("--messages", default=10_000_000, show_default=True)
@click.option("--batch", default=24, show_default=True, help="Messages of one batch, at most.")
@click.option("--master", default="local[*]", show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where the logs go, and stay.")
def main(services: int, messages: int, batch: int, master: str, folder: Path | None) -> None:
    """Export and audit a made-up fleet."""
    root = folder or Path(tempfile.mkdtemp(prefix="immortal-bench-"))
    try:
        if not (root / "logs").exists():
            _timed("making the logs", lambda: write_fleet(root / "logs", Fleet(services, messages, 1, batch)))
        logs = [str(root / "logs")]
        spark = _timed("starting Spark", lambda: session(master, "immortal bench"))
        shutil.rmtree(root / "export", ignore_errors=True)
        _timed("export of raw records", lambda: export(spark, open_fleet(logs), root / "export", ["raw"]))
        for what, paths in (("audit of the export", [str(root / "export")]), ("audit of the logs", logs)):
            report = _timed(what, lambda paths=paths: audit(spark, open_fleet(paths)))  # type: ignore[misc]
            executed = sum(stream.messages for stream in report.streams)
            compared = sum(stream.compared for stream in report.streams)
            click.echo(f"    {executed:,} messages, {compared:,} compared, {report.violation_count} violations")
        _timed("verification of the logs", lambda: verify(spark, open_fleet(logs)))
        _timed("statistics of the logs", lambda: stats(spark, open_fleet(logs)))
        spark.stop()
    finally:
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
