"""Real standalone cluster on loopback: a master and some workers, each a Java process on free ports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from immortal.pipeline.java import find_java

DEADLINE_S = 60.0
BRIEF_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
REPOSITORY = Path(__file__).parents[2]
_SETTINGS = {
    "SPARK_DAEMON_MEMORY": "256m",
    # They run for a minute: optimized code, or parallel garbage collection, is not worth its start.
    "SPARK_DAEMON_JAVA_OPTS": BRIEF_JVM,
    "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # its port would be a fixed one
}


@contextmanager
def standalone_cluster(folder: Path, workers: int = 2) -> Iterator[str]:
    """Yield the cluster's URL, once all workers are registered. Every process that was started is stopped.

    The workers have no path to our tests: the driver names it, or another Python with all that it needs.
    """
    spark_home = Path(pyspark.__file__).parent
    java = find_java()
    environment = {
        **os.environ,
        **_SETTINGS,
        **({"JAVA_HOME": str(java.home)} if java.home is not None else {}),
        "SPARK_HOME": str(spark_home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": "",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        said = folder / f"{name}.log"
        command = [str(spark_home / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]]
        with said.open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder))
        return said

    try:
        ports = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        said = start("master", "master.Master", *ports)
        url = _said(said, r"Starting Spark master at (spark://[\d.]+:\d+)")
        page = _said(said, r"Bound MasterWebUI to [\d.]+, and started at (http://[\w.]+:\d+)")
        for number in range(workers):
            options = ("--cores", "1", "--memory", "700m", "--work-dir", str(folder / f"work-{number}"))
            start(f"worker-{number}", "worker.Worker", *ports, *options, url)
        _until_registered(page, workers)
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(DEADLINE_S)


def _said(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"{log} has no {pattern}: {log.read_text(errors='replace')[-2000:]}")


def _until_registered(page: str, workers: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    alive = 0
    while time.monotonic() < deadline:
        with opener.open(f"{page}/json/", timeout=DEADLINE_S) as answer:
            alive = json.load(answer)["aliveworkers"]
        if alive == workers:
            return
        time.sleep(0.05)
    raise AssertionError(f"{alive} of {workers} workers came")
