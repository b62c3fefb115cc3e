"""Spark session with defaults for one machine: quiet, on loopback only, quick to start.

:func:`make_views` gives the tables of `immortal sql` as views: messages that wait, timers, effects, clients, states.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from immortal import pipeline
from immortal.pipeline.errors import SourceError, SparkError
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
    """Return a session with the format "immortal" registered; the running session, if there is one.

    ``master``: as Spark takes it ("local[2]", "spark://host:7077", ...). ``conf``: settings by their full names,
    ``**{"spark.driver.memory": "4g"}``; they override the defaults. Raises JavaError, SparkError.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        pipeline.register(running)
        return running
    # py4j logs the traceback of Ctrl-C, besides raising it.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_no_interrupt)
    context = SparkContext._active_spark_context
    if context is None:
        is_local = _LOOPBACK_MASTER.match(master) is not None
        settings = {**_EVERYWHERE, **(_ON_THIS_MACHINE if is_local else {}), **conf}
        context = _start(master, app_name, settings, is_local=is_local)
    # pyspark logs each error to stderr as JSON, besides raising it.
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    spark = SparkSession(context)
    pipeline.register(spark)
    return spark


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C or SIGTERM wait for the end of the block: a JVM that is left while it starts never ends."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in came[:1]:
            signal.raise_signal(one)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("KeyboardInterrupt while sending command")


def _start(master: str, app_name: str, settings: dict[str, str], *, is_local: bool) -> SparkContext:
    java = find_java()
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)
    if is_local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers with the packages of this environment
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark_conf = SparkConf(loadDefaults=False).setMaster(master).setAppName(app_name).setAll(list(settings.items()))
    # The JVM writes warnings to stderr before a setting can silence it; they are of use only if it fails.
    with tempfile.TemporaryFile() as said:
        try:
            with _uninterrupted():
                gateway = launch_gateway(spark_conf, {"stderr": said})  # type: ignore[no-untyped-call]
            if is_local and gateway.proc is not None:  # None: our starter has started the JVM as well
                _lower_priority(gateway.proc.pid)
            on_interrupt = signal.getsignal(signal.SIGINT)
            context = SparkContext(conf=spark_conf, gateway=gateway)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, on_interrupt)  # Spark's own fails in the middle of a call
            return context
        except PySparkRuntimeError as error:
            raise SparkError(f"Spark did not start: {_last_line(said) or error}") from error
        except Exception as error:
            raise SparkError(f"Spark at {master} did not start: {str(error).splitlines()[-1]}") from error


def _lower_priority(pid: int) -> None:
    """Lower the priority of the JVM, so that instances run first. Spark's workers inherit it from their threads."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def make_views(
    spark: SparkSession,
    tables: Sequence[str],
    *,
    folder: str | os.PathLike[str],
    home: str | os.PathLike[str] = ".immortal",
    at: str | int = "",
    instances: Sequence[str] = (),
) -> None:
    """Write ``tables`` to ``folder`` as Parquet files, and create a view of each: "waiting", "counter.words".

    ``at``: a time such as "2026-01-31T12:00:00Z", or a record of the only instance; default: now. ``instances``: only
    these; without any, all that have a log. ``folder`` must be visible to Spark's workers, and hold no files of these
    tables yet. In queries a name with a dot needs backquotes. Needs the extra sql. Raises SourceError.
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
