"""`immortal pipeline`: jobs over the logs of a whole fleet. Modules that need Spark are imported when a job runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from immortal.pipeline.errors import one_line_error
from immortal.protocol import distribution
from immortal.protocol.command_line import (
    Commands,
    FailedError,
    RecordPlace,
    counted,
    echo,
    echo_json,
    echo_lines,
    json_option,
)
from immortal.protocol.files import opener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from immortal.pipeline.jobs.sources import Fleet, Unreadable

Function = TypeVar("Function", bound=Callable[..., Any])

FOUND = 3
"""Exit status of a job that found violations."""
UNREADABLE = 4
"""Exit status of a job that found nothing, but could not read some logs."""
_UNREADABLE_SHOWN_MAX = 20
_UPDATES_PER_SECOND = 2.0
_ENDED_SHOWN_MAX = 5

_PACKAGES = ("pyspark", "pyarrow", "numpy", "pandas", "matplotlib", "jinja2", "packaging")
_SPARKS_OWN = ("pyspark", "py4j")


class _Group(Commands):
    """Group of commands that end with an error of one line, also if the JVM reports thousands."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _SPARKS_OWN:
                raise
            raise FailedError(str(one_line_error(error))) from None


@dataclass(frozen=True, slots=True)
class Run:
    """Options of all jobs."""

    master: str
    strict: bool
    settings: dict[str, str]
    as_json: bool
    lineage: bool = False


def spark_options(job: Function) -> Any:
    """Give a job the option ``run``."""

    @functools.wraps(job)
    def function(
        *arguments: Any,
        master: str,
        strict: bool,
        settings: dict[str, str],
        env: Path | None,
        lineage: bool,
        as_json: bool,
        **more: Any,
    ) -> Any:
        if env is not None:
            require_packages()
            from immortal.pipeline.packing import with_archive

            settings = with_archive(env, settings)
        return job(*arguments, run=Run(master, strict, settings, as_json, lineage), **more)

    function = click.option(
        "--conf", "settings", multiple=True, callback=_settings, metavar="NAME=VALUE", help="Spark setting; repeatable."
    )(json_option(function))
    function = click.option(
        "--env",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Archive of 'immortal pipeline pack' that executors import from.",
    )(function)
    function = click.option("--lineage", is_flag=True, help="Report the run to OpenLineage.")(function)
    function = click.option("--strict", is_flag=True, help="Stop at the first log that can't be read.")(function)
    return click.option("--master", default="local[*]", show_default=True, help="Spark master to run on.")(function)


def _settings(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    settings = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r}; expected a name and a value, as in spark.driver.memory=4g")
        settings[name] = setting
    return settings


def _paths(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> list[str]:
    """Return the given paths; without any, the registry's home, which stands for all its instances."""
    home = getattr(ctx.find_root().obj, "home", None)
    if not values and home is None:
        raise click.MissingParameter(ctx=ctx, param=parameter)
    return list(values) or [str(home)]


paths_argument = click.argument("paths", nargs=-1, metavar="[PATH]...", callback=_paths)
limit_option = click.option(
    "--limit", type=click.IntRange(min=0), default=10, show_default=True, help="Findings to print in full, at most."
)
decode_option = click.option(
    "--decode", metavar="MODULE:CLASS", help="Class to decode calls with; or one by instance: NAME=MODULE:CLASS,..."
)


def require_packages(packages: Sequence[str] = _PACKAGES, extra: str = "spark") -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise FailedError(f"the pipeline needs {', '.join(missing)}: {distribution.add_extra(extra)}")


def _open(paths: list[str], run: Run) -> Fleet:
    """Open the logs that ``paths`` name, before Spark starts, which takes a while."""
    require_packages()
    from immortal.pipeline.jobs.sources import open_fleet

    return open_fleet(paths, strict=run.strict)


@contextmanager
def open_spark(
    run: Run, name: str, step: str, inputs: Iterable[str], outputs: Iterable[str] = ()
) -> Iterator[tuple[SparkSession, Progress]]:
    """Open a session for one job. Its JVM ends with it, unless the session existed before.

    ``inputs``, ``outputs``: the folders and URLs that it reads and writes.
    """
    from pyspark.sql import SparkSession

    from immortal.pipeline.session import session

    was_running = SparkSession.getActiveSession() is not None
    with ExitStack() as stack:
        if run.lineage:
            from immortal.pipeline.lineage import reported

            stack.enter_context(reported(name, inputs, outputs))
        shown = stack.enter_context(progress())
        spark = session(run.master, f"immortal pipeline {name}", **run.settings)
        try:
            shown.watch(spark)
            shown.show_step(step)
            yield spark, shown
        finally:
            if not was_running:
                spark.stop()


@click.group(cls=_Group)
def pipeline() -> None:
    """Run Spark jobs over the logs of a whole fleet.

    A PATH is a log folder, a registry's home, an export, or the URL of a database (postgresql://HOST/DATABASE) or an
    archive (s3://BUCKET/PATH or similar). A URL means all logs there; with #NAME at its end, one log. The default is
    this registry's home.

    Exit status: 0 if nothing was found, 1 if the job failed, 2 for wrong usage, 3 if something was found, 4 if nothing
    was found but some logs can't be read.
    """


@pipeline.command()
@paths_argument
@click.option("--to", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="Output folder.")
@click.option("--tables", metavar="NAME,...", help="raw, records, messages, outputs, checkpoints.  [default: all]")
@click.option(
    "--delta", "url", metavar="URL", help="Also copy the export to Delta tables: s3://BUCKET/PATH, file:///PATH, ..."
)
@spark_options
def export(paths: list[str], folder: Path, tables: str | None, url: str | None, run: Run) -> None:
    """Export new records to Parquet, by instance and day. The output is compared with the logs before it commits."""
    fleet = _open(paths, run)
    from immortal.pipeline.jobs import export as job
    from immortal.pipeline.report.text import export_lines

    names = [name.strip() for name in tables.split(",")] if tables is not None else None
    store = None
    if url is not None:
        require_packages(("deltalake", "obstore"), "delta")
        from immortal.pipeline.jobs.delta import open_store

        store = open_store(url)
    job.prepare(fleet, folder, names)
    with open_spark(run, "export", "exporting", fleet.sources, filter(None, [str(folder), url])) as (spark, shown):
        report = job.export(spark, fleet, folder, names, shown.show_step, store)
    _finish(run, asdict(report), export_lines(report, folder), report.unreadable)


@pipeline.command()
@paths_argument
@click.option(
    "--tolerance-ms",
    type=click.IntRange(min=0),
    default=1_000,
    show_default=True,
    help="Allowed difference between clocks, in ms.",
)
@click.option("--streams", is_flag=True, help="List every stream.")
@limit_option
@spark_options
def audit(paths: list[str], tolerance_ms: int, streams: bool, limit: int, run: Run) -> None:
    """Check delivery: every message once, in order, after its cause, and unchanged.

    Exit status: 0 if so, 3 if not, 4 if some logs can't be read.
    """
    fleet = _open(paths, run)
    from immortal.pipeline.jobs import audit as job
    from immortal.pipeline.report.text import audit_lines

    with open_spark(run, "audit", "auditing", fleet.sources) as (spark, _):
        report = job.audit(spark, fleet, tolerance_ms=tolerance_ms)
    lines = audit_lines(report, limit, all_streams=streams)
    _finish(run, report.to_json(limit), lines, report.unreadable, found=report.violation_count)


@pipeline.command()
@paths_argument
@limit_option
@spark_options
def verify(paths: list[str], limit: int, run: Run) -> None:
    """Recompute all checksums of records and checkpoints, in parallel.

    Exit status: 0 if all is sound, 3 if something is damaged, 4 if some logs can't be read.
    """
    fleet = _open(paths, run)
    from immortal.pipeline.jobs import verify as job
    from immortal.pipeline.report.text import verify_lines

    with open_spark(run, "verify", "verifying", fleet.sources) as (spark, _):
        report = job.verify(spark, fleet)
    lines = verify_lines(report, limit)
    _finish(run, report.to_json(limit), lines, report.unreadable, found=report.problem_count)


@pipeline.command()
@paths_argument
@decode_option
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts.")
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, help="Methods and pairs to print, at most."
)
@spark_options
def stats(paths: list[str], decode: str | None, page: Path | None, top: int, run: Run) -> None:
    """Report calls, bytes and times from sending to logging, by service, method, minute and pair of services."""
    fleet = _open(paths, run)
    from immortal.pipeline.jobs import stats as job
    from immortal.pipeline.report.text import stats_lines

    with open_spark(run, "stats", "counting", fleet.sources) as (spark, _):
        found = job.stats(spark, fleet, decode=decode)
    if page is not None:
        from immortal.pipeline.report.pages import stats_page

        _write(page, stats_page(found))
    _finish(run, asdict(found), stats_lines(found, top), found.unreadable)


def _write(path: Path, text: str) -> None:
    with open(path, "w", opener=opener) as file:
        file.write(text)


@pipeline.command()
@click.argument("instance")
@click.argument("place", metavar="RECORD[:MESSAGE]", type=RecordPlace())
@paths_argument
@decode_option
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG picture.")
@click.option("--dot", type=click.Path(dir_okay=False, path_type=Path), help="Write a Graphviz file.")
@click.option("--lag", type=click.IntRange(min=0), default=1, show_default=True, help="Records an app may lag behind.")
@click.option(
    "--within-ms", type=click.IntRange(min=0), default=1_000, show_default=True, help="Time in which calls are sent."
)
@click.option(
    "--horizon-s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Time to follow the message for."
)
@click.option("--limit", type=click.IntRange(min=1), default=1_000, show_default=True, help="Nodes to show, at most.")
@spark_options
def trace(
    instance: str,
    place: tuple[int, int | None],
    paths: list[str],
    decode: str | None,
    svg: Path | None,
    dot: Path | None,
    lag: int,
    within_ms: int,
    horizon_s: float,
    limit: int,
    run: Run,
) -> None:
    """Follow a message of INSTANCE across services.

    Logs do not record which message made which call. Each call is shown with the number of messages that may have made
    it; "exact" means one.
    """
    fleet = _open(paths, run)
    from immortal.pipeline.jobs import trace as job
    from immortal.pipeline.report.pages import trace_dot, trace_lines, trace_svg

    job.check_instance(fleet, instance)
    with open_spark(run, "trace", "following", fleet.sources) as (spark, _):
        found = job.trace(
            spark,
            fleet,
            instance,
            *place,
            lag_records=lag,
            within_ms=within_ms,
            horizon_s=horizon_s,
            nodes_max=limit,
            decode=decode,
        )
    if svg is not None:
        _write(svg, trace_svg(found))
    if dot is not None:
        _write(dot, trace_dot(found))
    _finish(run, asdict(found), trace_lines(found), found.unreadable)


@pipeline.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Archive file (.tar.gz).")
@click.option("--code", type=click.Path(exists=True, path_type=Path), help="Folder or wheel with your own modules.")
def pack(out: Path, code: Path | None) -> None:
    """Pack this environment's packages for Spark executors: '--master spark://... --env ARCHIVE'."""
    require_packages()
    from immortal.pipeline import packing

    count = packing.pack(out, code)
    echo(f"{out}: {counted(count, 'package')}, {out.stat().st_size >> 20} MiB")


def _apps(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse --app values by instance; "" stands for all others."""
    apps = {}
    for value in values:
        name, equals, app = value.rpartition("=")
        module, colon, attribute = app.partition(":")
        if not (module and colon and attribute) or (equals and not name):
            raise click.BadParameter(f"{value!r}; expected MODULE:CLASS, or NAME=MODULE:CLASS for one instance")
        apps[name] = app
    return apps


class _WhatIf(click.Command):
    """Command what-if; with --propagate it is `immortal what-if --fleet`, with Spark's options beside its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if "--propagate" not in args:
            return super().make_context(info_name, args, parent, **extra)
        own = [arg for arg in args if arg != "--propagate"]
        command: click.Command = importlib.import_module("immortal.cli.what_if_spark").propagate
        context = command.make_context(f"{info_name} --propagate", list(own), parent, **extra)
        context.meta["given"], _, _ = command.make_parser(context).parse_args(own)
        return context


def _home(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path:
    home = value or getattr(ctx.find_root().obj, "home", None)
    if home is None:
        raise click.MissingParameter("a registry's home is needed", ctx=ctx, param_type="argument", param_hint="HOME")
    return Path(home)


home_argument = click.argument(
    "home", required=False, type=click.Path(file_okay=False, exists=True, path_type=Path), callback=_home
)


@pipeline.command("what-if", cls=_WhatIf)
@home_argument
@click.option(
    "--app",
    "apps",
    required=True,
    multiple=True,
    callback=_apps,
    metavar="[NAME=]MODULE:CLASS",
    help="Code to try; repeatable.",
)
@click.option("--code", type=click.Path(path_type=Path), help="Folder or wheel to import the code from.")
@click.option("--old-app", metavar="MODULE:CLASS", help="Code to compare with.  [default: the instance's own]")
@click.option("--upgrade", is_flag=True, help="Let the new code upgrade the state first.")
@click.option("--trust-pickle", is_flag=True, help="Also read pickled states of logs that HOME did not make.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=3_600.0,
    show_default=True,
    help="Time limit for one instance, in seconds.",
)
@click.option(
    "--propagate",
    is_flag=True,
    expose_value=False,  # _WhatIf has seen to it
    help="Follow changed calls through all services: see what-if --propagate --help.",
)
@spark_options
def what_if(
    home: Path,
    apps: dict[str, str],
    code: Path | None,
    old_app: str | None,
    upgrade: bool,
    trust_pickle: bool,
    timeout_s: float,
    run: Run,
) -> None:
    """Compare what other code would have done with all logs in HOME.

    Exit status: 0 if nothing would be different, 3 if something would, 4 if some logs can't be tried, 1 if none can.
    """
    require_packages()
    from immortal.pipeline.jobs import what_if as job
    from immortal.pipeline.report.text import what_if_lines

    options = [*(["--old-app", old_app] if old_app else []), *(["--upgrade"] if upgrade else [])]
    options += ["--trust-pickle"] if trust_pickle else []
    chosen, unreadable, _ = job.choose_apps(home, apps, code, strict=run.strict)
    with open_spark(run, "what-if", "replaying", [str(home)]) as (spark, _):
        result = job.what_if(spark, home, chosen, code=code, options=options, timeout_s=timeout_s, strict=run.strict)
    result.unreadable = unreadable
    _finish(run, asdict(result), what_if_lines(result), unreadable, status=result.exit_status)


def _finish(
    run: Run,
    values: Any,
    lines: Iterator[str],
    unreadable: Sequence[Unreadable],
    *,
    found: int = 0,
    status: int | None = None,
) -> NoReturn:
    if run.as_json:
        echo_json(values)
    else:
        echo_lines(lines)
        print_unreadable(unreadable)
    sys.exit(status if status is not None else FOUND if found else UNREADABLE if unreadable else 0)


def print_unreadable(unreadable: Sequence[Unreadable]) -> None:
    if unreadable:
        echo(f"NOT READ, or not to the end: {counted(len(unreadable), 'log')}")
    echo_lines(f"  {each.log}: {each.text}" for each in unreadable[:_UNREADABLE_SHOWN_MAX])
    if len(unreadable) > _UNREADABLE_SHOWN_MAX:
        echo(f"  and {len(unreadable) - _UNREADABLE_SHOWN_MAX:,} more; --json lists all")


# Progress of Spark's jobs on stderr; nothing is shown if stderr is no terminal.


class Progress:
    """Status line: the step that ``show_step`` named, and how many of Spark's tasks are done, or which."""

    def __init__(self) -> None:
        self._step = "starting Spark"
        self._finished: Callable[[], Sequence[str]] = list
        self._spark: SparkSession | None = None

    def show_step(self, step: str, finished: Callable[[], Sequence[str]] = list) -> None:
        self._step = step
        self._finished = finished

    def watch(self, spark: SparkSession) -> None:
        self._spark = spark

    def __rich__(self) -> str:
        """Return the line as it is now: rich asks again and again."""
        if self._spark is None:
            return self._step
        try:
            tracker = self._spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # Spark is stopping, or runs elsewhere; the count is only decoration
            return self._step
        known = [stage for stage in stages if stage is not None]
        done, total = sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)
        finished = ", ".join(self._finished()[-_ENDED_SHOWN_MAX:])
        text = f"{self._step}: {done} of {total} tasks" if total else self._step
        return f"{text} ({finished})" if finished else text


@contextmanager
def progress() -> Iterator[Progress]:
    shown = Progress()
    with ExitStack() as stack:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(shown, refresh_per_second=_UPDATES_PER_SECOND))
        yield shown


if __name__ == "__main__":
    pipeline()
