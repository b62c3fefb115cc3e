"""Spark over the logs of one or many instances: tables of records, messages, outputs and checkpoints.

    from immortal.pipeline import register
    from immortal.pipeline.session import session

    spark = session()  # registers the format as well; register(spark) does it for a session of your own
    spark.read.format("immortal").option("table", "messages").load(".immortal")

schema      the tables           source    what Spark asks: options, partitions
session     a local session      stream    the live tail         writer    rows back to a log
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make ``format("immortal")`` known to ``spark``. Harmless when done before."""
    from immortal.pipeline.source import ImmortalSource  # what needs no Spark must not wait for pyspark to be imported

    spark.dataSource.register(ImmortalSource)
