"""What a live coordinator notices of those who read its log with Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scripts.benchmarks.parts.pipeline import measure_growth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_reader_keeps_no_page_from_being_used_again(spark: SparkSession, tmp_path: Path) -> None:
    """A log that is trimmed as it is written stays as large as it is; a reader that held on would make it grow."""
    sizes, scans = measure_growth(spark, tmp_path, commits=1500)
    assert scans >= 2
    assert sizes["beside scans"] <= sizes["alone"] * 1.1
    assert sizes["beside a reader that holds on"] > sizes["alone"] * 1.1, "the log uses no page again"
