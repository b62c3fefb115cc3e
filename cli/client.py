"""Commands call and queue: one request from outside; the tasks of a queue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

from immortal.appsdk.client import CallRaised, CallRefused, CallTimeout, connect, start, with_key
from immortal.appsdk.errors import UsageError
from immortal.appsdk.state.tree import to_json, tree
from immortal.cli.options import complete_instance, instance_name, name_argument, pass_registry
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding, redaction
from immortal.protocol.command_line import (
    Commands,
    FailedError,
    counted,
    echo,
    echo_json,
    echo_lines,
    json_option,
    print_table,
)
from immortal.protocol.safe_output import printable, printable_json, printable_json_text


def _instance_and_key(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, list[Any]]:
    """Split "carts[ann]" into the name and the key, as a click callback."""
    name, bracket, key = value.removesuffix("]").partition("[") if value.endswith("]") else (value, "", "")
    return instance_name(ctx, parameter, name) or "", [_argument(key)] if bracket else []


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", callback=_instance_and_key, shell_complete=complete_instance)
@click.argument("method")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the answer.",
)
@click.option("--key", help="Idempotency key: the call is executed once, however often the command is run.")
@click.option("--query", is_flag=True, help="METHOD is a @query: it is answered without being logged.")
@click.option(
    "--start", "start_only", is_flag=True, help="Do not wait for the result: print the call's ID once it is logged."
)
@pass_registry
def call(
    registry: Registry,
    name: tuple[str, list[Any]],
    method: str,
    arguments: tuple[str, ...],
    timeout: float,
    key: str | None,
    query: bool,
    start_only: bool,
) -> None:
    """Call METHOD of an instance, and print what it returns, as JSON.

    Each ARGUMENT is JSON, or else plain text: immortal call counter add 5 word '["a", "b"]'

    For a keyed class, give the key after the name: immortal call 'carts[ann]' add tea 2
    """
    if query and (key is not None or start_only):
        raise click.UsageError(
            "--query can't be combined with --key or --start: a query changes nothing and is not logged"
        )
    called, keys = name
    is_here = any(registry.path(one).exists() for one in (called, f"{called}-1"))
    endpoints = () if is_here else (registry.resolve(called),)  # raises with the known names
    with connect(called, home=registry.home, timeout=timeout, endpoints=endpoints) as instance:
        try:
            instance = instance[keys[0]] if keys else instance
            target: Any = instance.query if query else instance if key is None else _keyed(instance, key)
            asked, given = getattr(target, method), [_argument(text) for text in arguments]
            value = start(asked, *given).id if start_only else asked(*given)
        except (TypeError, UsageError) as error:  # an argument that can't be sent, such as half a character
            raise FailedError(str(error)) from None
        except CallRaised as error:
            raise FailedError(str(error)) from None
        except CallTimeout as error:
            remedy = f"; run it again with --key {key}" if key is not None and error.sent else ""
            raise FailedError(f"{error.reason}{remedy}") from None
    echo(printable_json_text(_as_json(method, value)))


def _as_json(method: str, value: Any) -> str:
    try:
        try:
            return msgspec.json.encode(value).decode()
        except (TypeError, ValueError):  # keys that are arrays, integers of thousands of digits
            return json.dumps(to_json(tree(value)), ensure_ascii=False)
    except RecursionError:
        raise FailedError(f"the result of {method} is nested too deeply to be shown as JSON") from None


def _keyed(instance: Any, key: str) -> Any:
    try:
        return with_key(instance, key)
    except TypeError as error:
        raise click.UsageError(str(error)) from None


def _argument(text: str) -> Any:
    try:
        return decoding.parse_json_argument(text)
    except decoding.TooDeepError as error:
        raise click.UsageError(f"an argument, {text[:20]!r}... of {len(text)} characters: {error}") from None
    except ValueError:
        return text


# queue: the tasks in a queue, and the retry or removal of failed ones.


STATES = ("waiting", "delayed", "running", "done", "dead", "dropped")
TIMEOUT_S = 30.0
WHY_SIZE_MAX = 100  # characters, in the table

Values = dict[str, Any]

_ids_argument = click.argument("tasks", metavar="[TASK]...", nargs=-1, type=click.IntRange(1, (1 << 63) - 1))
_all_option = click.option("--all", "all_of_them", is_flag=True, help="All dead letters.")


@click.group(cls=Commands)
def queue() -> None:
    """Show a queue of tasks, retry its dead letters, drop tasks. The queue must be running."""


@queue.command()
@name_argument
@click.argument("task", required=False, type=click.IntRange(1, (1 << 63) - 1))
@click.option(
    "--state", type=click.Choice(STATES), default="dead", show_default=True, help="List the tasks in this state."
)
@json_option
@pass_registry
def show(registry: Registry, name: str, task: int | None, state: str, as_json: bool) -> None:
    """Show the number of tasks, the workers and the dead letters; or the details of one TASK."""
    if task is not None:
        found = _call_queue(registry, name, "task", task)
        if as_json:
            echo_json({**found, "arguments": _value(found["arguments"]), "result": _value(found["result"])})
        else:
            echo_lines(_task_lines(found))
        return
    overview = _call_queue(registry, name, "overview", state)
    if as_json:
        echo_json(overview)
        return
    echo(f"{name}: " + ", ".join(f"{overview['counts'][one]:,} {one}" for one in STATES))
    if overview["late_replies"] or overview["dead_forgotten"]:
        echo(
            f"late replies dropped: {overview['late_replies']:,}; "
            f"dead letters removed for lack of space: {overview['dead_forgotten']:,}"
        )
    _print_tables(overview)


@queue.command()
@name_argument
@_ids_argument
@_all_option
@pass_registry
def retry(registry: Registry, name: str, tasks: Sequence[int], all_of_them: bool) -> None:
    """Put dead letters back into the queue, with all their tries. Does nothing if one TASK is no dead letter."""
    count = _call_queue(registry, name, "retry", _chosen(tasks, all_of_them))
    echo(f"{name}: {counted(count, 'task')} retried")


@queue.command()
@name_argument
@_ids_argument
@_all_option
@click.option("--reason", default="", help="Reason that callers who wait for the result receive.")
@click.option("--yes", is_flag=True, help="Drop without asking.")
@pass_registry
def drop(registry: Registry, name: str, tasks: Sequence[int], all_of_them: bool, reason: str, yes: bool) -> None:
    """End tasks without a result: waiting, delayed or running ones, and dead letters."""
    chosen = _chosen(tasks, all_of_them)
    if not yes:
        what = "all dead letters" if chosen is None else counted(len(set(chosen)), "task")
        click.confirm(f"Drop {what} of {name} for good?", abort=True)
    dropped = _call_queue(registry, name, "drop", chosen, reason or "dropped by an operator")
    echo(f"{name}: {counted(dropped, 'task')} dropped")


def _chosen(tasks: Sequence[int], all_of_them: bool) -> list[int] | None:
    if all_of_them == bool(tasks):
        raise click.UsageError("either TASKs or --all: 'immortal queue show NAME' lists them")
    return None if all_of_them else list(tasks)


def _call_queue(registry: Registry, name: str, method: str, *arguments: Any) -> Any:
    endpoints = () if registry.path(name).exists() else (registry.resolve(name),)  # raises with the known names
    with connect(name, home=registry.home, timeout=TIMEOUT_S, endpoints=endpoints) as instance:
        try:
            return getattr(instance, method)(*arguments)
        except CallRaised as error:
            raise FailedError(" ".join(map(str, error.arguments))) from None
        except CallRefused:
            raise FailedError(
                f"{name!r} is no queue: it runs another app than immortal.appsdk.patterns.queue:Queue"
            ) from None
        except CallTimeout as error:
            raise FailedError(error.reason) from None


def _value(encoded: bytes) -> Any:
    """Decode arguments or a result for display; None if there are none, hex if they can't be read."""
    if encoded and redaction.may_apply(None):
        return redaction.REDACTED
    try:
        return decoding.decode_shown(encoded) if encoded else None
    except decoding.DecodeError:
        return encoded.hex()


def _clipped(text: str) -> str:
    text = printable(text)
    return text if len(text) <= WHY_SIZE_MAX else f"{text[: WHY_SIZE_MAX - 3]}..."


def _cells(values: Values, *keys: str) -> list[str]:
    return [printable(str(values[key])) for key in keys]


def _print_tables(overview: Values) -> None:
    if overview["functions"]:
        numbers = ("waiting", "delayed", "running", "workers")
        print_table(
            ("function", *numbers, "limit by key"),
            [(*_cells(one, "name", *numbers), _limit(one["limit"])) for one in overview["functions"]],
            right=numbers,
        )
    if overview["workers"]:
        columns = ("id", "state", "task", "done", "disabled_count")
        print_table(
            ("worker", "state", "task", "done", "disabled", "why"),
            [
                (*_cells(one | {"task": one["task"] or "-"}, *columns), _clipped(one["why"]))
                for one in overview["workers"]
            ],
            right=("task", "done", "disabled"),
        )
    if overview["tasks"]:
        print_table(
            ("task", "state", "function", "key", "tries", "submitted", "why"),
            [
                (
                    *_cells(one, "id", "state", "function", "key", "attempts"),
                    time_text(one["submitted_ns"])[:19] + "Z",
                    _clipped(one["reason"]),
                )
                for one in overview["tasks"]
            ],
            right=("task", "tries"),
        )


def _limit(limit: Values | None) -> str:
    if limit is None:
        return "-"
    parts = [f"{limit['running_max']} at once"] if limit["running_max"] else []
    if limit["starts_max"]:
        parts.append(f"{limit['starts_max']} in {limit['period_ns'] / 1e9:g} s")
    return ", ".join(parts)


def _task_lines(found: Values) -> Iterator[str]:
    task = found["task"]
    rows = {
        "function": task["function"],
        "state": task["state"],
        "why": task["reason"],
        "key": task["key"],
        "dedup": task["dedup"],
        "priority": str(task["priority"]),
        "submitted": time_text(task["submitted_ns"]),
        "due": time_text(task["due_ns"]) if task["state"] == "delayed" else "",
        "ended": time_text(task["ended_ns"]) if task["ended_ns"] else "",
        "worker": task["worker"],
        "tries": f"{task['attempts']}, {found['tries_left']} of {found['tries']} left",
        "timeout": f"{found['timeout_ns'] / 1e9:g} s",
        "arguments": printable_json(_value(found["arguments"])) if found["arguments"] else "",
        "result": printable_json(_value(found["result"])) if found["result"] else "",
    }
    yield f"task {task['id']}"
    for title, text in rows.items():
        if text:
            yield f"  {title:<9}  {text}"
    for failure in found["failures"]:
        when = time_text(failure["ended_ns"])
        yield f"  try {failure['attempt']} at {when}, worker {failure['worker']}: {failure['reason']}"
