"""A Spark session with defaults for one machine: quiet, on loopback only, quick to start."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
from typing import IO

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from immortal import pipeline
from immortal.pipeline.errors import SparkError
from immortal.pipeline.java import find_java

_NICENESS = 10
_LOOPBACK_MASTER = re.compile(r"local(\[|$)|local-cluster\[|spark://(127\.|localhost)")
_ON_THIS_MACHINE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # One compiler instead of two, one thread for garbage: seconds less to start, and queries of a minute are no slower.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": str(max(4, os.cpu_count() or 1)),
}
_EVERYWHERE = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",  # as `immortal log show` prints times
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def session(master: str = "local[*]", app_name: str = "immortal", **conf: str) -> SparkSession:
    """A session with the format "immortal" registered; the one that runs already, where there is one.

    ``master``: as Spark takes it ("local[2]", "spark://host:7077", ...). ``conf``: settings by their full names,
    ``**{"spark.driver.memory": "4g"}``; they go before the defaults.
    Raises JavaError, SparkError.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        pipeline.register(running)
        return running
    context = SparkContext._active_spark_context
    if context is None:
        here = _LOOPBACK_MASTER.match(master) is not None
        settings = {**_EVERYWHERE, **(_ON_THIS_MACHINE if here else {}), **conf}
        context = _start(master, app_name, settings, here=here)
    # pyspark logs each error to stderr as JSON, besides raising it.
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    spark = SparkSession(context)
    pipeline.register(spark)
    return spark


def _start(master: str, app_name: str, settings: dict[str, str], *, here: bool) -> SparkContext:
    java = find_java()
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)
    if here:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers with the packages of this environment
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark_conf = SparkConf(loadDefaults=False).setMaster(master).setAppName(app_name).setAll(list(settings.items()))
    # The JVM writes warnings to stderr before any setting can silence it; what it says is of use only when it fails.
    with tempfile.TemporaryFile() as said:
        try:
            gateway = launch_gateway(spark_conf, {"stderr": said})  # type: ignore[no-untyped-call]
            if here and gateway.proc is not None:  # None: whoever started us has started the JVM as well
                _lower_priority(gateway.proc.pid)
            return SparkContext(conf=spark_conf, gateway=gateway)
        except PySparkRuntimeError as error:
            raise SparkError(f"Spark did not start: {_last_line(said) or error}") from error
        except Exception as error:
            raise SparkError(f"Spark at {master} did not start: {str(error).splitlines()[-1]}") from error


def _lower_priority(pid: int) -> None:
    """Let instances on this machine go first. Spark's workers inherit it from the threads that start them."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
