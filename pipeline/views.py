"""The tables of `immortal sql` as views of Spark: what waits, timers, effects, clients, states; all of one moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from immortal.pipeline.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make_views(
    spark: SparkSession,
    tables: Sequence[str],
    *,
    folder: str | os.PathLike[str],
    home: str | os.PathLike[str] = ".immortal",
    at: str | int = "",
    instances: Sequence[str] = (),
) -> None:
    """Write ``tables`` to ``folder`` as Parquet files, and make a view of each: "waiting", "counter", "counter.words".

    ``at``: as of then, a time such as "2026-01-31T12:00:00Z" or a record of the only instance; now, if it is not given.
    ``instances``: only these; all that have a log, if none are. ``folder`` is where Spark's workers see it as well, and
    has no files of these tables yet. A name with a dot takes backquotes in queries. Needs the extra sql. Raises
    SourceError.
    """
    place = Path(folder)
    if not tables or isinstance(tables, str):
        raise SourceError(f"tables {tables!r}: a list of names was expected, such as ['messages', 'counter.words']")
    files = {table: place / f"{table}.parquet" for table in tables}
    if there := [str(file) for file in files.values() if file.exists()]:
        raise SourceError(f"{there[0]} is there already: give another folder, or remove it first")
    place.mkdir(parents=True, exist_ok=True)
    order = {"home": str(home), "folder": str(place), "tables": list(tables), "at": str(at), "names": list(instances)}
    done = subprocess.run(
        [sys.executable, "-m", "immortal.pipeline.sql.opening"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SourceError(done.stderr.strip().removeprefix("error: ") or f"it ended with status {done.returncode}")
    for table, file in files.items():
        spark.read.parquet(str(file)).createOrReplaceTempView(f"`{table}`")
