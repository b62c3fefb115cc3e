"""Spark over the logs of one or many instances: tables of records, messages, outputs and checkpoints.

    from immortal.pipeline import register
    from immortal.pipeline.session import session

    spark = session()  # registers the format as well; register(spark) does it for a session of your own
    spark.read.format("immortal").option("table", "messages").load(".immortal")

tables      the tables' columns    source    what Spark calls: options, partitions, the live tail
session     a local session        writer    writes rows back to a log
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register ``format("immortal")`` with ``spark``; doing it twice is harmless."""
    from immortal.pipeline.source import ImmortalSource  # late: code that needs no Spark must not import pyspark

    spark.dataSource.register(ImmortalSource)
