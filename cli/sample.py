"""Command sample: makes a small fleet for tests out of a recorded one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from immortal.cli.options import Moment, check_folder, pass_registry, trust_pickle_option
from immortal.cli.what_if import function_name, in_child, times_of
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time
from immortal.protocol.command_line import echo, echo_json, echo_lines, json_option, table_lines


class _Sample(click.Command):
    """Command that runs in a process of its own, with the same arguments."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        own = list(args)
        context = super().make_context(info_name, args, parent, **extra)
        context.meta["arguments"] = own
        return context


class _Share(click.ParamType):  # type: ignore[type-arg]
    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+|\d*\.\d+)%", value)
        if found is None or not 0 < float(found[1]) <= 100:
            self.fail(f"{value!r}: a percentage was expected, such as 1% or 0.5%", param, ctx)
        return float(found[1]) / 100


@click.command(cls=_Sample)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--share", type=_Share(), default=1.0, metavar="PERCENT", help="Share of the inputs to keep, such as 1%.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="ARGUMENT",
    help="Keep --share of this argument's values, each with all its inputs; repeatable.",
)
@click.option("--keep", callback=function_name, metavar="MODULE:FUNCTION", help="Function that selects the inputs.")
@click.option(
    "--redact",
    callback=function_name,
    metavar="MODULE:FUNCTION",
    help="Function that replaces the arguments of an input, or the result of an effect.",
)
@click.option("--from", "begin", type=Moment(), metavar="TIME", help="Leave out inputs before this time.")
@click.option("--to", "end", type=Moment(), metavar="TIME", help="Leave out inputs after this time.")
@trust_pickle_option
@json_option
@pass_registry
@click.pass_context
def sample(
    ctx: click.Context,
    registry: Registry,
    folder: Path,
    share: float,
    keys: tuple[str, ...],
    keep: str | None,
    redact: str | None,
    begin: int | Time | None,
    end: int | Time | None,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Make a small fleet for tests in FOLDER from recorded inputs.

    The services' own code handles some inputs from outside again, from the first start on, with the recorded times and
    results of effects. Nothing is sent, and logs are only read.

    Exit status: 0 if the fleet is complete, 1 if a text that --redact replaced is in the new logs.
    """
    if keys and share == 1.0:
        raise click.UsageError("--key needs --share, such as --share 1% --key customer")
    check_folder("FOLDER", folder.absolute())
    if (status := in_child(ctx)) is not None:
        sys.exit(status)
    from immortal.appsdk.testing.sample import sample_fleet
    from immortal.replay.fleet.opening import load_function
    from immortal.replay.fleet.player import seal_process

    begin_ns, to_ns = times_of(begin, end)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        seal_process(0)
        functions = [None if text is None else load_function(text) for text in (keep, redact)]
        made = sample_fleet(
            registry.home,
            folder,
            keep=functions[0],
            share=share,
            keys=keys,
            redact=functions[1],
            begin_ns=begin_ns,
            to_ns=to_ns,
            trust_pickle=trust_pickle,
        )
    if as_json:
        echo_json(msgspec.to_builtins(made))
    else:
        echo(f"from {time_text(made.begin_ns)} to {time_text(made.end_ns)}:")
        heads = ["service", "inputs", "of", "messages", "of", "bytes of records", "of"]
        rows = [[name, *(f"{n:,}" for n in numbers)] for name, *numbers in map(msgspec.structs.astuple, made.services)]
        echo_lines(table_lines(heads, rows, right=heads[1:]))
        echo_lines(f"note: {note}" for note in made.notes)
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        echo(f"replays unchanged with the present code: {size_bytes:,} bytes in {folder}")
    echo_lines((f"not redacted: {one}" for one in made.left), err=True)
    sys.exit(1 if made.left else 0)
