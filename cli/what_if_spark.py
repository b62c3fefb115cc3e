"""Command `immortal pipeline what-if --propagate`: what-if --fleet on Spark, in rounds of tasks.

A task is an order or a commit, in a process of its own. The cone of a change is simulated in one process;
docs/decisions/0093 says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from immortal.cli.what_if import what_if
from immortal.coordinator.instances.registry import Registry
from immortal.pipeline.cli import (
    UNREADABLE,
    Run,
    home_argument,
    open_spark,
    require_packages,
    say_unreadable,
    spark_options,
)
from immortal.presenters.what_if import DIFFERENT
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError
from immortal.replay.fleet.bisect import Commit, files_of
from immortal.replay.fleet.outcome import End, FleetOutcome, Seeds
from immortal.replay.plan import ReplayError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from immortal.pipeline.cli import Progress
    from immortal.pipeline.jobs.what_if import Done, Task


_fleet: click.Command = what_if.fleet


@click.command(params=[param for param in _fleet.params if param.name != "as_json"], help=_fleet.help)
@home_argument
@spark_options
@click.pass_context
def propagate(ctx: click.Context, /, home: Path, run: Run, **options: Any) -> None:
    if options["effects"] == "ask":
        raise click.UsageError("--effects ask: there is no terminal to ask at on a cluster")
    require_packages()
    given = ctx.meta["given"]
    passed = {
        str(param.name): [
            part
            for value in (given[param.name] if param.multiple else [given[param.name]])
            for part in ([param.opts[0]] if param.is_flag else [param.opts[0], value])
        ]
        for param in _fleet.params
        if isinstance(param, click.Option) and param.name in given and param.name not in ("page", "tables", "as_json")
    }
    start = partial(ctx.with_resource, open_spark(run, "what-if", "replaying"))
    cluster = Cluster(start, home, dict(options["changes"]), passed, strict=run.strict)
    ctx.obj, ctx.meta["cluster"], ctx.meta["arguments"] = Registry(home), cluster, []
    try:
        ctx.invoke(_fleet, **options, as_json=run.as_json)
    except SystemExit as end:
        if not run.as_json:
            say_unreadable(cluster.unreadable)
        sys.exit(end.code or (UNREADABLE if cluster.unreadable else 0))


class Cluster:
    """Runner of fleet what-ifs on Spark. ``given``: the options of `immortal what-if --fleet`, by parameter."""

    def __init__(
        self,
        start: Callable[[], tuple[SparkSession, Progress]],
        home: Path,
        changes: Mapping[str, str],
        given: Mapping[str, Sequence[str]],
        *,
        strict: bool,
    ) -> None:
        """``start``: starts Spark. Logs that can't be read are left out, and are ``unreadable``; ``strict``: the first
        one is an error. Raises PipelineError.
        """
        from immortal.pipeline.jobs.what_if import choose_apps, log_of

        self._start = start
        self._home = home
        apps, self.unreadable, self._logs = choose_apps(home, {"": "", **changes}, strict=strict)
        texts = {each.log: each.text for each in self.unreadable}
        names = {
            path.stem: texts[log] for path in sorted(home.glob("*.toml")) if (log := log_of(home, path.stem)) in texts
        }
        for name in changes.keys() - apps.keys():
            raise FailedError(f"{name}: {names[name]}")
        self._given = {**given, "unread": [part for name in names for part in ("--without", name)]}

    @cached_property
    def _spark(self) -> tuple[SparkSession, Progress]:
        return self._start()

    @property
    def at_once(self) -> int:
        """Number of tasks that run at the same time."""
        return self._spark[0].sparkContext.defaultParallelism

    def what_if(
        self,
        home: Path | str,
        changes: Mapping[str, str],
        *,
        seeds: Sequence[int],
        check: object,
        details: bool,
        **rest: Any,
    ) -> FleetOutcome:
        """Return what ``immortal.replay.fleet.opening.what_if`` returns. Tasks get the options as they were given.

        In round 0 the changed services are screened; if one does other things, tasks run the cone, each some orders,
        and order 0 to compare with. Raises FailedError.
        """
        more = ["--details"] if details else []
        if len(changes) > 1 and check is None and not details:
            found = self._certain("round 0, services", self._screenings(changes))
            if not any(one.is_different for one in found):
                equal = set.intersection(*(set(one.equal_services) for one in found))
                services = {each.name: each for one in found for each in one.services}
                ordered = [services[name] for name in changes]
                return replace(found[0], services=ordered, equal_services=sorted(equal))
            more += ["--screening", "skip"]
        others = seeds[1:]
        count = min(self.at_once, len(others))
        parts = [others[len(others) * at // count : len(others) * (at + 1) // count] for at in range(count)]
        texts = [f"{part[0]}-{part[-1]}" for part in parts]
        tasks = [self._task(f"orders {text}", [*more, "--seeds", text], "seeds", "details") for text in texts]
        return merged(self._certain("round 1, the cone", tasks or [self._task("the cone", more, "seeds", "details")]))

    def _screenings(self, changes: Mapping[str, str]) -> list[Task]:
        from immortal.pipeline.source import pack

        ranges = [each for each in self._logs.ranges if each.instance in changes]
        packs = [[each.instance for each in some] for some in pack(ranges, self.at_once)]
        tasks = []
        for names in packs:
            told = [part for name in names for part in ("--change", f"{name}={changes[name]}")]
            tasks.append(self._task(", ".join(names), [*told, "--screening", "only"], "changes"))
        return tasks

    def trials(self, repository: Path, commits: Sequence[Commit]) -> Iterator[FleetOutcome | ReplayError]:
        """Try commits, all at once, for :func:`immortal.replay.fleet.bisect.bisect`."""
        files = {commit.id[:10]: partial(files_of, repository.absolute(), commit.id) for commit in commits}
        tasks = [self._task(label, [], "git_range", "code", code=code) for label, code in files.items()]
        yield from self._run("commits", tasks)

    def _task(
        self,
        label: str,
        more: Sequence[str],
        *without: str,
        code: Callable[[], AbstractContextManager[Path]] | None = None,
    ) -> Task:
        from immortal.pipeline.jobs.what_if import Task

        parts = [part for name, given in self._given.items() if name not in without for part in given]
        return Task(label, ["what-if", "--fleet", *parts, *more, "--json"], code)

    def _certain(self, name: str, tasks: Sequence[Task]) -> list[FleetOutcome]:
        """Run tasks of which each must have an outcome. Raises FailedError."""
        outcomes = self._run(name, tasks)
        for each in outcomes:
            if isinstance(each, ReplayError):
                raise FailedError(str(each))
        return [each for each in outcomes if isinstance(each, FleetOutcome)]

    def _run(self, name: str, tasks: Sequence[Task]) -> list[FleetOutcome | ReplayError]:
        from immortal.pipeline.jobs.what_if import run_tasks

        if not tasks:
            return []
        spark, shown = self._spark
        return [_outcome(each) for each in run_tasks(spark, self._home, tasks, watch=partial(shown.say, name))]


def _outcome(done: Done) -> FleetOutcome | ReplayError:
    if done.status in (0, DIFFERENT) and done.output:
        return decoding.decode_json(done.output, type=FleetOutcome)
    text = (done.error or f"it ended with status {done.status}").splitlines()[-1]
    return ReplayError(text.removeprefix("error: ").removeprefix("Error: "))


def merged(parts: Sequence[FleetOutcome]) -> FleetOutcome:
    """Combine outcomes that differ in the orders that were tried; each of ``parts`` has order 0."""
    ends: dict[str, End] = {}
    for number, part in enumerate(parts):
        for one in part.seeds.ends:
            end = ends.setdefault(one.digest, replace(one, count=0, broken=0))
            is_again = number > 0 and one.seed == 0
            end.count += one.count - is_again
            end.broken += one.broken - (is_again and part.broken is not None)
    return replace(parts[0], seeds=Seeds.of(list(ends.values())))
