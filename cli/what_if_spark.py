"""Command `immortal pipeline what-if --propagate`: what-if --fleet on Spark, in rounds of tasks.

A task screens changed services, or runs the cone in some orders, of the code of one commit: a process of its own. The
cone is simulated in one process; docs/decisions/0093 says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import islice, pairwise
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
    print_unreadable,
    require_packages,
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
    from immortal.pipeline.jobs.what_if import Done


_fleet = what_if.fleet
# Spark's commands have --json.
_NOT_HERE = ("as_json", "orders", "live", "duration_ns", "consequences", "memory_limit_mib", "shadow")


@click.command(params=[param for param in _fleet.params if param.name not in _NOT_HERE], help=_fleet.help)
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
    start = partial(ctx.with_resource, open_spark(run, "what-if", "replaying", [str(home)]))
    cluster = Cluster(start, home, options, passed, strict=run.strict)
    ctx.obj, ctx.meta["cluster"], ctx.meta["arguments"] = Registry(home), cluster, []
    try:
        ctx.invoke(_fleet, **options, as_json=run.as_json)
    except SystemExit as end:
        if not run.as_json:
            print_unreadable(cluster.unreadable)
        sys.exit(end.code or (UNREADABLE if cluster.unreadable else 0))


Code = Callable[[], AbstractContextManager[Path]] | None
"""Makes the folder of changed code where a task runs; None: it is that of --code."""


class Cluster:
    """Runner of fleet what-ifs on Spark, in rounds of tasks that get the options as they were given.

    In round 0 the changed services are screened; where one does other things, round 1 runs the cone.
    """

    def __init__(
        self,
        start: Callable[[], tuple[SparkSession, Progress]],
        home: Path,
        options: Mapping[str, Any],
        given: Mapping[str, Sequence[str]],
        *,
        strict: bool,
    ) -> None:
        """``start``: starts Spark. ``options``: values by parameter; ``given``: the same as arguments.

        Logs that can't be read are left out, and are ``unreadable``; ``strict``: the first one is an error. Raises
        PipelineError, FailedError.
        """
        from immortal.pipeline.jobs.what_if import choose_apps, log_of

        self._start = start
        self._home = home
        self._changes = dict(options["changes"])
        self._seeds: int = options["seeds"]
        self._details = bool(options["details"] or options["page"] or options["tables"])
        self._is_screened = options["check"] is None and not self._details
        apps, self.unreadable, self._logs = choose_apps(home, {"": "", **self._changes}, strict=strict)
        texts = {each.log: each.text for each in self.unreadable}
        places = {path.stem: log_of(home, path.stem) for path in sorted(home.glob("*.toml"))}
        unread = {name: texts[log] for name, log in places.items() if log in texts}
        for name in self._changes.keys() - apps.keys():
            raise FailedError(f"{name}: {unread[name]}")
        without = [part for name in unread for part in ("--without", name)]
        others = [name for name in given if name not in ("changes", "code", "details", "git_range")]
        self._code = given.get("code", [])
        self._command = ["what-if", "--fleet", "--json", *(part for name in others for part in given[name]), *without]

    @cached_property
    def _spark(self) -> tuple[SparkSession, Progress]:
        return self._start()

    @cached_property
    def _packs(self) -> list[list[str]]:
        """Changed services that one task screens; none if they are not."""
        from immortal.pipeline.source import pack

        ranges = [each for each in self._logs.ranges if self._is_screened and each.instance in self._changes]
        return [[each.instance for each in some] for some in pack(ranges, self._processors)]

    @property
    def _processors(self) -> int:
        return self._spark[0].sparkContext.defaultParallelism

    @property
    def at_once(self) -> int:
        """Number of commits that are tried at once."""
        return max(1, self._processors // max(1, len(self._packs)))

    def what_if(self, *given: Any, **options: Any) -> FleetOutcome:
        """Return what ``immortal.replay.fleet.opening.what_if`` does. Raises FailedError."""
        (outcome,) = self._outcomes({"": None})
        if isinstance(outcome, ReplayError):
            raise FailedError(str(outcome))
        return outcome

    def trials(self, repository: Path, commits: Sequence[Commit]) -> list[FleetOutcome | ReplayError]:
        """Try commits, for :func:`immortal.replay.fleet.bisect.bisect`."""
        return self._outcomes({f"{one.id[:10]} ": partial(files_of, repository.absolute(), one.id) for one in commits})

    def _outcomes(self, codes: Mapping[str, Code]) -> list[FleetOutcome | ReplayError]:
        """Return the outcome of each code, or why there is none. ``codes``: by a label."""
        screenings = {", ".join(names): (names, "") for names in self._packs}
        found = self._round("round 0, services", codes, screenings, partial(_screened, list(self._changes)))
        left = {label: code for label, code in codes.items() if label not in found}
        count = max(1, min(self._processors // max(1, len(left)), self._seeds - 1))  # order 0 is in each
        starts = [1 + (self._seeds - 1) * number // count for number in range(count + 1)]
        texts = [f"{first}-{end - 1}" for first, end in pairwise(starts)] if self._seeds > 1 else ["0-0"]
        orders = {f"orders {text}": (list(self._changes), text) for text in texts}
        found |= self._round("round 1, the cone", left, orders, merged)
        return [found[label] for label in codes]

    def _round(
        self,
        name: str,
        codes: Mapping[str, Code],
        parts: Mapping[str, tuple[Sequence[str], str]],
        join: Callable[[Sequence[FleetOutcome]], FleetOutcome | None],
    ) -> dict[str, FleetOutcome | ReplayError]:
        """Run ``parts`` (names of services, orders) for each code; return what ``join`` made of the outcomes, or why
        there is none, by label; nothing where ``join`` returned None.
        """
        from immortal.pipeline.jobs.what_if import Task, run_tasks

        tasks = []
        for label, code in codes.items():
            for part, (names, orders) in parts.items():
                changes = [each for name in names for each in ("--change", f"{name}={self._changes[name]}")]
                more = [
                    "--orders",
                    orders,
                    *(["--details"] if self._details else []),
                    *(self._code if code is None else []),
                ]
                tasks.append(Task(f"{label}{part}", [*self._command, *changes, *more], code))
        if not tasks:
            return {}
        spark, shown = self._spark
        env = {"PYTHONHASHSEED": "0"}  # else each starts a process of its own for it
        done = map(_outcome, run_tasks(spark, self._home, tasks, env=env, watch=partial(shown.show_step, name)))
        found: dict[str, FleetOutcome | ReplayError] = {}
        for label in codes:
            outcomes = list(islice(done, len(parts)))
            errors = [each for each in outcomes if isinstance(each, ReplayError)]
            joined = errors[0] if errors else join([each for each in outcomes if isinstance(each, FleetOutcome)])
            if joined is not None:
                found[label] = joined
        return found


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


def _screened(names: Sequence[str], parts: Sequence[FleetOutcome]) -> FleetOutcome | None:
    """Combine outcomes of first rounds, in the order of ``names``; None if one found a difference."""
    if any(part.is_different for part in parts):
        return None
    services = {each.name: each for part in parts for each in part.services}
    equal = set.intersection(*(set(part.equal_services) for part in parts))
    return replace(parts[0], services=[services[name] for name in names], equal_services=sorted(equal))
