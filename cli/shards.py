"""Command shards: the instances that have the keys of a keyed class; moves keys to another number of them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from immortal.appsdk.client import ClientError, connect
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.definition import shard_name
from immortal.appsdk.handlers.moves import change_count, shard_numbers
from immortal.cli.options import timeout_option
from immortal.cli.project import TIMEOUT_S, background, project_of, project_option, up
from immortal.coordinator.project.project import COUNT_MAX, SHARD_VARIABLE
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option, print_table
from immortal.protocol.files import acquire_lock, describe_lock_holder, opened

PAUSE_S = 0.2
LOCK_FILE_NAME = ".shards.lock"
_NUMBERS = ("ranges", "keys", "leaving", "forwarded")


@click.command()
@click.argument("name")
@click.option("--count", type=click.IntRange(1, COUNT_MAX), help="Move the keys to this number of shards.")
@project_option
@timeout_option(TIMEOUT_S, "Seconds to wait for handlers whose keys can't move before they have ended.")
@json_option
@click.pass_context
def shards(
    ctx: click.Context, name: str, count: int | None, path: Path | None, timeout_s: float, as_json: bool
) -> None:
    """Show the shards of a keyed class, or move its keys to another number of them while calls go on.

    NAME is a table in immortal.toml, which runs under 'immortal up'. With --count its new shards are started, and the
    file is changed. If this is interrupted, the same command goes on.

    Exit status: 0 if all keys are at their shards, 1 if some wait.
    """
    project, registry = project_of(ctx, path)

    def start() -> None:
        project.set_count(name, after, before)
        ctx.invoke(up, path=path, timeout_s=TIMEOUT_S, upgrade=False, keep=False)

    def pause() -> bool:
        time.sleep(PAUSE_S)
        return time.monotonic() < deadline_s

    with contextlib.ExitStack() as stack:
        clients: dict[int, Any] = {}
        if count is not None:
            if background(project) is None:
                raise FailedError("the project does not run: 'immortal up' starts it")
            lock = stack.enter_context(opened(project.home / LOCK_FILE_NAME, os.O_RDWR | os.O_CREAT))
            try:
                acquire_lock(lock, timeout_s)  # two moves at once would mix their counts
            except BlockingIOError:
                raise FailedError(f"{describe_lock_holder(lock)} moves keys of this project: wait for it") from None
        table = project.table(name)
        before, deadline_s = table.count_before or table.count, time.monotonic() + timeout_s
        if count not in (None, table.count) and before != table.count:
            raise FailedError(f"the keys of {name!r} move from {before} shards to {table.count}: finish that first")
        after = count or table.count

        def client(shard: int) -> Any:
            if shard not in clients:
                connector = connect(_name(name, shard), home=registry.home, timeout=timeout_s)
                clients[shard] = stack.enter_context(connector)
            return clients[shard]

        def call(shard: int, handler: Any, *arguments: Any) -> Any:
            return getattr(client(shard), handler.name)(*arguments)

        try:
            if count is not None and count != before:
                with contextlib.redirect_stdout(sys.stderr):
                    waiting = change_count(call, start, pause, before, count)
                if waiting:
                    raise FailedError(f"call this again: some keys stay until this has ended: {', '.join(waiting)}")
                for one in project.set_count(name, count):
                    ends = f"'immortal stop {one}', 'immortal unregister {one}'"
                    echo(f"{one} has no keys and forwards calls; once no code counts it as a shard: {ends}", err=True)
            numbers = sorted({*shard_numbers(before), *shard_numbers(after)})
            found = [client(shard).query.immortal_shard() | {"name": _name(name, shard)} for shard in numbers]
        except (ClientError, UsageError) as error:
            if SHARD_VARIABLE not in project.service(_name(name, shard_numbers(before)[0])).environment:
                raise FailedError(f"the class of {name!r} is not keyed, so it has no shards") from None
            raise FailedError(str(error)) from None
    if as_json:
        echo_json(found)
        return
    print_table(
        ("shard", *_NUMBERS), [[str(one.get(key, 0)) for key in ("name", *_NUMBERS)] for one in found], right=_NUMBERS
    )
    for text in (text for one in found for text in one.get("waiting", ())):
        echo(f"its range stays until it has ended: {text}")


def _name(name: str, shard: int) -> str:
    return shard_name(name, shard, 2 if shard else 1)
