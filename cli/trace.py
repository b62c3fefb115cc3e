"""Command trace: logs as traces for viewers, also beside running coordinators."""

from __future__ import annotations

import gzip
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import IO, cast

import click

from immortal.cli.options import Moment, complete_instance, instance_names, pass_registry, settings_with_log
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time
from immortal.coordinator.log.record_contents import first_record_at
from immortal.protocol.command_line import Commands, FailedError, counted, echo
from immortal.protocol.files import removed_on_error
from immortal.protocol.timings import FOLDER_NAME
from immortal.replay.app_process import methods_of
from immortal.replay.trace import exporters
from immortal.replay.trace.causes import ReplayedCauses, ShadowReplay
from immortal.replay.trace.exporters import to_endpoint
from immortal.replay.trace.follower import Follower, Positions, ShadowFollower
from immortal.replay.trace.messages import Source, Timings, by_time
from immortal.replay.trace.spans import Spans

_PROBLEMS_SHOWN_MAX = 10


_names_argument = click.argument(
    "names",
    metavar="NAME...",
    nargs=-1,
    required=True,
    callback=instance_names,
    shell_complete=complete_instance,
)


@click.group(cls=Commands)
def trace() -> None:
    """Export logs as traces, for Perfetto or OpenTelemetry."""


@trace.command()
@_names_argument
@click.option("--from", "first", type=Moment(), help="First record to export, or a time (UTC by default).")
@click.option("--to", "last", type=Moment(), help="Last record to export, or a time.")
@click.option("--perfetto", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Perfetto trace.")
@click.option("--otlp", metavar="FILE|URL", help="OTLP as JSON, to a file or an HTTP endpoint.")
@click.option("--causes", is_flag=True, help="Replay the logs to find which message made which call.")
@pass_registry
def export(
    registry: Registry,
    names: tuple[str, ...],
    first: int | Time | None,
    last: int | Time | None,
    perfetto: Path | None,
    otlp: str | None,
    causes: bool,
) -> None:
    """Export the messages of NAME... as a trace.

    Only logs are read, so running instances are not disturbed. Open the file of --perfetto in https://ui.perfetto.dev;
    if its name ends in .gz, it is compressed. --otlp takes a file, or the URL of a collector such as
    http://127.0.0.1:4318. With several NAMEs, give times instead of records.

    Exit status: 0 if all was exported, 1 if records were left out.
    """
    if (perfetto is None) == (otlp is None):
        raise click.UsageError("give one of --perfetto FILE and --otlp FILE|URL")
    if len(names) > 1 and (isinstance(first, int) or isinstance(last, int)):
        raise click.UsageError("record numbers belong to one log: with several NAMEs, --from and --to take times")
    with ExitStack() as stack:
        sources = [_source(registry, name, first, last, stack) for name in names]
        for source in sources:
            folder = registry.load(source.instance).folder / FOLDER_NAME
            source.timings = Timings(folder, source.reader.identity.committer_id)
        known = _causes(registry, sources, stack) if causes else None
        spans = Spans(known)
        messages = by_time(sources)
        if perfetto is not None:
            with _new_file(perfetto) as file, removed_on_error(perfetto):
                count = exporters.write(messages, spans, file)
            echo(f"{counted(count, 'message')} in {perfetto}: open it in https://ui.perfetto.dev")
        elif otlp is not None and "://" in otlp:
            count = exporters.send_all(spans.all_of(messages), exporters.to_endpoint(otlp))
            echo(f"{counted(count, 'span')} sent to {otlp}")
        elif otlp is not None:
            with _new_file(Path(otlp)) as binary, removed_on_error(Path(otlp)):
                count = exporters.send_all(spans.all_of(messages), exporters.into_file(binary))
            echo(f"{counted(count, 'span')} in {otlp}")
    for source in sources:
        for problem in source.timings.problems if source.timings is not None else ():
            echo(f"note: {source.instance}: {problem}", err=True)
    problems = [problem for source in sources for problem in source.problems]
    for problem in problems[:_PROBLEMS_SHOWN_MAX]:
        echo(f"left out: {problem}", err=True)
    if len(problems) > _PROBLEMS_SHOWN_MAX:
        echo(f"left out: {len(problems) - _PROBLEMS_SHOWN_MAX} more", err=True)
    sys.exit(1 if problems else 0)


def _source(
    registry: Registry, name: str, first: int | Time | None, last: int | Time | None, stack: ExitStack
) -> Source:
    settings = settings_with_log(registry, name)
    methods = methods_of(settings.app, None)
    reader = stack.enter_context(own_logs.open_reader(settings, check=False))
    if isinstance(first, Time):
        first = first_record_at(reader, first.ns)
    if isinstance(last, Time):
        last = first_record_at(reader, last.ns + 1) - 1
    return Source(reader, methods or {}, first, last)


def _causes(registry: Registry, sources: list[Source], stack: ExitStack) -> ReplayedCauses:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="immortal-trace-"))
    found = ReplayedCauses(Path(folder))
    stack.callback(found.close)
    for source in sources:
        for note in found.learn(source, registry.load(source.instance)):
            echo(f"note: {note}", err=True)
    return found


def _new_file(path: Path) -> IO[bytes]:
    try:
        return cast("IO[bytes]", gzip.open(path, "xb", compresslevel=3)) if path.suffix == ".gz" else open(path, "xb")
    except FileExistsError:
        raise FailedError(f"{path} is there already: give another name, or remove it first") from None


@trace.command()
@_names_argument
@click.option("--otlp", metavar="URL", required=True, help="Endpoint, such as http://127.0.0.1:4318.")
@click.option("--from", "first", type=Moment(), help="First record to send, or a time.  [default: the next record]")
@click.option(
    "--resume", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="File with the position of the last run: continue from it, and update it.",
)  # fmt: skip
@click.option("--causes", is_flag=True, help="Replay each log in a copy of its app, to find what made each call.")
@pass_registry
def follow(
    registry: Registry,
    names: tuple[str, ...],
    otlp: str,
    first: int | Time | None,
    resume: Path | None,
    causes: bool,
) -> None:
    """Send new spans of NAME... to an endpoint, until Ctrl-C or SIGTERM.

    Only logs are read: the instances are not disturbed, and this command can be started and stopped at any time. If
    the endpoint is down, the command waits for it.
    """
    if len(names) > 1 and isinstance(first, int):
        raise click.UsageError("record numbers belong to one log: with several NAMEs, --from takes a time")
    over = threading.Event()
    with ExitStack() as stack:
        positions = Positions(resume)
        sources = [_source(registry, name, first, None, stack) for name in names]
        for source in sources:
            known = positions.next_of(source)
            if known is not None:
                source.first = known
            elif source.first is None:
                source.first = source.reader.last_sequence_id() + 1
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *of: over.set())
        follower: Follower | ShadowFollower
        how = to_endpoint(otlp), positions, over.wait, lambda text: echo(text, err=True)
        if causes:
            follower = ShadowFollower([ShadowReplay(one, registry.load(one.instance)) for one in sources], *how)
        else:
            follower = Follower(sources, *how)
        echo(f"following {', '.join(names)}", err=True)
        follower.run()
    echo(f"{counted(follower.sent, 'span')} sent to {otlp}", err=True)
