"""Spark for tests: one small session on loopback."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

import immortal.pipeline.session


@contextmanager
def running_session() -> Iterator[SparkSession]:
    options = {"spark.sql.shuffle.partitions": "4", "spark.driver.memory": "1g"}
    # Behind all others, its workers would not start within the 10 s that Spark gives them while other tests run.
    with tempfile.TemporaryDirectory() as warehouse:
        options["spark.sql.warehouse.dir"] = warehouse
        with patch.object(immortal.pipeline.session, "_NICENESS", 0):
            spark = immortal.pipeline.session.session("local[2]", "immortal tests", **options)
        try:
            yield spark
        finally:
            spark.stop()


def read(spark: SparkSession, table: str, *paths: object, **options: object) -> DataFrame:
    reader = spark.read.format("immortal").option("table", table)
    for name, value in options.items():
        reader = reader.option(name.rstrip("_"), str(value))
    return reader.load(",".join(map(str, paths)))


def rows(frame: DataFrame, *order: str) -> list[dict[str, object]]:
    """Return the rows as plain dicts; binary as bytes."""
    collected = (frame.orderBy(*order) if order else frame).collect()
    return [
        {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()}
        for row in collected
    ]
