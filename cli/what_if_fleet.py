"""what-if --fleet: runs changed code over the logs of all services that its changed calls reach."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import click
import msgspec

from immortal.cli.options import Moment, instance_name, pass_registry, trust_pickle_option
from immortal.coordinator.config.values import check_app
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.moment import Time
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.protocol.errors import ImmortalError

DIFFERENT = 3  # the exit status
_HASH_SEED = "PYTHONHASHSEED"


class _Change(click.ParamType):  # type: ignore[type-arg]
    """NAME=MODULE:CLASS, as (name, app)."""

    name = "name=module:class"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, app = value.partition("=")
        if not equals:
            self.fail(f"{value!r}: a service and its new class were expected, such as shop=shop_v2:Shop", param, ctx)
        try:
            return str(instance_name(click.get_current_context(), click.Argument(["name"]), name)), check_app(app)
        except ImmortalError as error:
            self.fail(str(error), param, ctx)


def _function(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and ":" not in value and value not in ("fail", "by-key"):
        raise click.BadParameter(f"{value!r}: a function was expected, as module:function")
    return value


@click.command("what-if --fleet")
@click.option(
    "--change",
    "changes",
    type=_Change(),
    multiple=True,
    required=True,
    metavar="NAME=MODULE:CLASS",
    help="A service, and the code to try in its place; may be given more than once.",
)
@click.option(
    "--code",
    type=click.Path(exists=True, path_type=Path),
    help="A folder or a wheel: the code to try is taken from there.",
)
@click.option("--from", "begin", type=Moment(), metavar="TIME", help="Begin at the newest checkpoint before that time.")
@click.option("--to", "end", type=Moment(), metavar="TIME", help="Handle no record of a later time.")
@click.option(
    "--effects",
    default="fail",
    show_default=True,
    callback=_function,
    metavar="fail|by-key|MODULE:FUNCTION",
    help="What comes for effects that the logs have no result of.",
)
@click.option(
    "--answer", callback=_function, metavar="MODULE:FUNCTION", help="Answers new calls to services without a log."
)
@click.option(
    "--check", callback=_function, metavar="MODULE:FUNCTION", help="What is to hold for the services' states."
)
@click.option(
    "--handler-limit",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the messages of a record may take; then a handler fails.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Try so many orders.")
@trust_pickle_option
@json_option
@pass_registry
@click.pass_context
def fleet(
    ctx: click.Context,
    registry: Registry,
    changes: tuple[tuple[str, str], ...],
    code: Path | None,
    begin: int | Time | None,
    end: int | Time | None,
    effects: str,
    answer: str | None,
    check: str | None,
    handler_limit: float,
    seeds: int,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compare what the whole fleet did with what it would have done with other code of some services.

    Changed calls travel: the other services' own code handles them, and answers. Inputs from outside are the recorded
    ones; nothing is sent, and logs are only read. The exit status is 0 if nothing would be different, 3 if something
    would, 1 if it could not be tried.
    """
    if os.environ.get(_HASH_SEED) != "0":  # the order of sets is that of the apps; and what ends the process is told
        sys.exit(_in_child(ctx))
    from immortal.replay.fleet.opening import load_function, what_if
    from immortal.replay.fleet.outcome import outcome_lines
    from immortal.replay.fleet.player import seal_process

    times = []
    for option, moment in (("--from", begin), ("--to", end)):
        if isinstance(moment, int):
            raise FailedError(f"{option} {moment}: a time was expected, such as 2026-05-01T12:00")
        times.append(None if moment is None else moment.ns)
    functions = {
        name: None if text is None else load_function(text) for name, text in (("answer", answer), ("check", check))
    }
    # What handlers print, they print for each run.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        seal_process(handler_limit)
        outcome = what_if(
            registry.home,
            dict(changes),
            code=code,
            begin_ns=times[0],
            to_ns=times[1],
            effects=effects if effects in ("fail", "by-key") else load_function(effects),
            answer=functions["answer"],
            check=functions["check"],
            seeds=seeds,
            trust_pickle=trust_pickle,
        )
    if as_json:
        echo_json(msgspec.to_builtins(outcome))
    else:
        for line in outcome_lines(outcome):
            echo(line)
    sys.exit(DIFFERENT if outcome.is_different else 0)


def _in_child(ctx: click.Context) -> int:
    home = str(ctx.find_root().params["home"])
    command = [sys.executable, "-P", "-m", "immortal", "--home", home, "what-if", "--fleet", *ctx.meta["arguments"]]
    done = subprocess.run(command, env={**os.environ, _HASH_SEED: "0"}, capture_output=True, check=False)
    for output, is_error in ((done.stdout, False), (done.stderr, True)):
        for line in output.decode("utf-8", "replace").splitlines():
            echo(line, err=is_error)
    if done.returncode < 0 or done.returncode not in (0, 1, 2, DIFFERENT):
        raise FailedError(
            f"the code ended the process of the what-if (status {done.returncode}): what it did so far is lost; try"
            " --to with an earlier time"
        )
    return done.returncode
