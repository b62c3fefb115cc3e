"""Spark for tests: one small session on loopback. Most tests of its data source do without: :func:`rows_here`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

import immortal.pipeline.session
from immortal.pipeline.source import ImmortalSource

_OPTIONS = {
    "spark.driver.memory": "1g",
    # A task that has few rows costs more than they do, and so does the compilation of a query that runs once.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.python.daemon.module": "tests.helpers.spark_daemon",
}


@contextmanager
def running_session() -> Iterator[SparkSession]:
    # Behind all others, its workers would not start within the 10 s that Spark gives them while other tests run.
    with tempfile.TemporaryDirectory() as warehouse:
        options = {**_OPTIONS, "spark.sql.warehouse.dir": warehouse}
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


def rows_here(table: str, *paths: object, **options: object) -> list[dict[str, Any]]:
    """Return the rows that Spark's tasks would read, one after the other in this process."""
    named = {name.rstrip("_"): str(value) for name, value in options.items()}
    source = ImmortalSource({"table": table, "path": ",".join(map(str, paths)), **named})
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
