"""Runs a what-if over the logs of a whole fleet: one fresh process for each instance.

Spark only distributes commands; `immortal what-if` does the rest. The code never runs in a worker of Spark, since a
worker keeps the modules that it has imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.accumulators import AddingAccumulatorParam
from pyspark.sql.pandas.types import from_arrow_schema

from immortal.coordinator.service.process import die_with_parent
from immortal.pipeline.errors import PipelineError
from immortal.pipeline.jobs.sources import LogFleet, TextAccumulator, Unreadable, none_left, rows_of
from immortal.pipeline.reading import log_folders, registered_log
from immortal.protocol import decoding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAME, FAILED, DIFFERENT = 0, 1, 3  # the exit statuses of `immortal what-if`
SOME_FAILED = 4
TIMEOUT_S = 3_600.0
_ERROR_LINES_MAX = 20
_RESULT = pa.schema(
    [
        ("number", pa.int64()),
        ("status", pa.int32()),
        ("output", pa.string()),
        ("error", pa.string()),
        ("duration_s", pa.float64()),
    ]
)


class WhatIfError(PipelineError):
    """Raised when the request can't be tried at all."""


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """Result of one instance. ``values``: the output of `immortal what-if --json`; None if it failed with ``error``."""

    instance: str
    app: str
    status: int
    duration_s: float
    values: dict[str, Any] | None
    error: str | None

    @property
    def not_worked_out(self) -> list[str]:
        """Return texts on what was not compared: a difference there is possible."""
        return [] if self.values is None else [one["text"] for one in self.values["not_worked_out"]]


@dataclass(slots=True)
class FleetResult:
    instances: list[InstanceResult]
    same: int = 0
    different: int = 0
    failed: int = 0
    records: int = 0
    messages: int = 0
    differences: dict[str, int] = field(default_factory=dict)  # by kind
    by_method: list[dict[str, Any]] = field(default_factory=list)  # of the fleet: destination, method, kinds
    not_worked_out: dict[str, list[str]] = field(default_factory=dict)  # by instance
    unreadable: Sequence[Unreadable] = ()

    @property
    def exit_status(self) -> int:
        if self.different:
            return DIFFERENT
        return SAME if not (self.failed or self.unreadable) else SOME_FAILED if self.same else FAILED


def what_if(
    spark: SparkSession,
    home: Path,
    apps: Mapping[str, str],
    *,
    code: Path | None = None,
    options: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    strict: bool = False,
) -> FleetResult:
    """Try ``apps`` ("module:Class" by instance) on the logs of the registry ``home``, which every worker must reach.

    ``code``: a folder or wheel with the code to try; the old code is that of the current folder, if the worker has a
    folder of that name. ``options``: further ones for `immortal what-if`. ``strict``: the first instance that can't be
    tried ends the job, with WhatIfError.
    """
    more = [*([] if code is None else ["--code", str(code.absolute())]), *options]
    tasks = [Task(name, ["what-if", name, "--app", app, "--json", *more]) for name, app in apps.items()]
    ended = run_tasks(spark, home, tasks, timeout_s=timeout_s, strict=strict)
    return summarize(
        InstanceResult(
            task.label,
            apps[task.label],
            done.status,
            done.duration_s,
            decoding.load_json(done.output) if done.output else None,
            done.error,
        )
        for task, done in sorted(zip(tasks, ended, strict=True), key=lambda each: each[0].label)
    )


@dataclass(frozen=True, slots=True)
class Task:
    """Command of `immortal` in a process of its own. ``label``: for people.

    ``code``: makes the folder that the command gets as its ``--code``, where it runs.
    """

    label: str
    arguments: Sequence[str]
    code: Callable[[], AbstractContextManager[Path]] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a task: its exit status, with its JSON, or what is wrong."""

    status: int
    output: str | None
    error: str | None
    duration_s: float


def run_tasks(
    spark: SparkSession,
    home: Path,
    tasks: Sequence[Task],
    *,
    timeout_s: float | None = None,
    strict: bool = False,
    env: Mapping[str, str] | None = None,
    watch: Callable[[Callable[[], Sequence[str]]], None] = lambda finished: None,
) -> list[Done]:
    """Run each task on some worker; return their results in the order of ``tasks``.

    Spark repeats those of an executor that dies. ``env``: set for their processes. ``watch``
    gets a function that returns the labels of ended tasks.
    """
    finished: TextAccumulator = spark.sparkContext.accumulator((), AddingAccumulatorParam(()))  # type: ignore[type-var, arg-type]
    watch(lambda: [label for label, _ in finished.value])
    run = partial(
        _run_tasks,
        tasks=tasks,
        home=str(home.absolute()),
        folder=os.getcwd(),
        timeout_s=timeout_s,
        strict=strict,
        env=env or {},
        finished=finished,
    )
    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, from_arrow_schema(_RESULT))
    return [Done(*row[1:]) for row in sorted(rows_of(frame.toArrow().to_batches()))]


def choose_apps(
    home: Path, wanted: Mapping[str, str], code: Path | None = None, *, strict: bool = False
) -> tuple[dict[str, str], Sequence[Unreadable], LogFleet]:
    """Choose the app for each instance; return also the logs that can't be read, and those that can.

    ``wanted``: by instance; "" stands for all that have a log. ``strict``: the first log that can't be read is an
    error. Raises WhatIfError for an instance that has none, or if there is no ``code``.
    """
    if code is not None and not code.exists():
        raise WhatIfError(f"there is no folder or wheel {code}")
    registered = {path.stem for path in home.glob("*.toml") if not path.name.startswith(".")}
    if not registered:
        raise WhatIfError(f"nothing is registered in {home}: a registry's home was expected")
    fleet = LogFleet(log_folders([str(home)], may_be_none=True), strict=strict)
    with_log = sorted(registered & fleet.states.keys())
    unreadable = fleet.unreadable
    if "" not in wanted:  # others do not matter
        places = {log_of(home, name) for name in wanted}
        unreadable = [each for each in unreadable if each.log in places]
    texts = {each.log: each.text for each in unreadable}
    for name in wanted:
        if name and name not in with_log:
            if log_of(home, name) in texts:
                continue
            problem = "has not been started yet" if name in registered else "is not registered"
            raise WhatIfError(f"the instance {name!r} {problem} in {home}: there are {', '.join(with_log) or 'none'}")
    everywhere = wanted.get("")
    chosen = {name: wanted.get(name, everywhere) for name in with_log}
    apps = {name: app for name, app in chosen.items() if app is not None}
    if not apps and texts:
        raise none_left(texts)
    if not apps:
        raise WhatIfError(f"there is nothing to try: no instance in {home} has a log yet")
    return apps, unreadable, fleet


def log_of(home: Path, name: str) -> str:
    """Return the folder or URL of an instance's log, as a fleet names it."""
    log = registered_log(home / f"{name}.toml")
    return log if isinstance(log, str) else os.path.abspath(log)


def summarize(results: Iterator[InstanceResult]) -> FleetResult:
    """Combine the results of all instances."""
    summary = FleetResult(list(results))
    differences: Counter[str] = Counter()
    methods: dict[tuple[str, str], Counter[str]] = {}
    for result in summary.instances:
        if result.values is None:
            summary.failed += 1
            continue
        if result.not_worked_out:
            summary.not_worked_out[result.instance] = result.not_worked_out
        summary.same += result.status == SAME
        summary.different += result.status == DIFFERENT
        summary.failed += result.status not in (SAME, DIFFERENT)
        summary.records += result.values["records"]
        summary.messages += result.values["messages"]
        differences.update(result.values["differences"])
        for row in result.values["by_method"]:
            destination = row["destination"] or result.instance
            counts = {kind: count for kind, count in row.items() if kind not in ("destination", "method")}
            methods.setdefault((destination, row["method"]), Counter()).update(counts)
    summary.differences = dict(differences)
    summary.by_method = [
        {"destination": destination, "method": method, **counts}
        for (destination, method), counts in sorted(methods.items())
    ]
    return summary


# --- in the workers --------------------------------------------------------------------------------------------------


def _run_tasks(
    batches: Iterator[pa.RecordBatch],
    tasks: Sequence[Task],
    home: str,
    folder: str,
    timeout_s: float | None,
    strict: bool,
    env: Mapping[str, str],
    finished: TextAccumulator,
) -> Iterator[pa.RecordBatch]:
    """Convert numbers of tasks to the results of their processes; for mapInArrow."""
    for (number,) in rows_of(batches):
        task, started = tasks[number], time.monotonic()
        with nullcontext() if task.code is None else task.code() as code:
            arguments = [*task.arguments, *([] if code is None else ["--code", str(code)])]
            status, output, error = _run(arguments, home, folder, timeout_s, env)
        if strict and status not in (SAME, DIFFERENT):
            raise WhatIfError(f"{task.label}: {error or f'it ended with status {status}'}")
        finished.add(((task.label, ""),))
        row = [number, status, output, error, time.monotonic() - started]
        arrays = [pa.array([value], column.type) for value, column in zip(row, _RESULT, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_RESULT)


def _run(
    arguments: Sequence[str], home: str, folder: str, timeout_s: float | None, env: Mapping[str, str]
) -> tuple[int, str | None, str | None]:
    """Run a command of `immortal`: (status, its JSON, otherwise the error)."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "immortal", "--home", home, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder if os.path.isdir(folder) else None,
        env={**os.environ, **env},
        start_new_session=True,  # so that its apps end with it
        preexec_fn=die_with_parent(os.getpid()),  # a dead executor's
    )
    try:
        output, error_output = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return FAILED, None, f"it was not done after {timeout_s:.0f} s: --timeout allows more"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if lines:
        return process.returncode, lines[-1], None
    errors = [line for line in error_output.splitlines() if line.strip()]
    return FAILED, None, "\n".join(errors[-_ERROR_LINES_MAX:]) or f"it ended with status {process.returncode}"
