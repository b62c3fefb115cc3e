"""call: one request from outside, from the command line."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from immortal.appsdk.client import CallRaised, CallTimeout, connect, with_key
from immortal.appsdk.state.tree import to_json, tree
from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError, echo
from immortal.protocol.shown import printable_json_text


@click.command(context_settings={"ignore_unknown_options": True})
@name_argument
@click.argument("method")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the reply.",
)
@click.option("--key", help="With it the call is one request, however often the command is run.")
@click.option("--query", is_flag=True, help="METHOD is a @query: it is asked between two handlers, and not logged.")
@pass_registry
def call(
    registry: Registry,
    name: str,
    method: str,
    arguments: tuple[str, ...],
    timeout: float,
    key: str | None,
    query: bool,
) -> None:
    """Call METHOD of an instance, and print what it returns, as JSON.

    Each ARGUMENT is JSON; what is none is taken as text: immortal call counter add 5 word '["a", "b"]'
    """
    if query and key is not None:
        raise click.UsageError("a query takes no --key: it is asked anew each time, and changes nothing")
    endpoints = () if registry.path(name).exists() else (registry.resolve(name),)  # which says what there is
    with connect(name, home=registry.home, timeout=timeout, endpoints=endpoints) as instance:
        target: Any = instance.query if query else instance if key is None else _keyed(instance, key)
        try:
            value = getattr(target, method)(*(_argument(text) for text in arguments))
        except TypeError as error:  # an argument that can't be sent, such as half a character
            raise FailedError(str(error)) from None
        except CallRaised as error:
            raise FailedError(str(error)) from None
        except CallTimeout as error:
            remedy = f"; run it again with --key {key}" if key is not None and error.sent else ""
            raise FailedError(f"{error.reason}{remedy}") from None
    echo(printable_json_text(_as_json(method, value)))


def _as_json(method: str, value: Any) -> str:
    """Raises FailedError."""
    try:
        try:
            return msgspec.json.encode(value).decode()
        except (TypeError, ValueError):  # keys that are arrays, integers of thousands of digits
            return json.dumps(to_json(tree(value)), ensure_ascii=False)
    except RecursionError:
        raise FailedError(f"what {method} returned is nested too deeply to be shown as JSON") from None


def _keyed(instance: Any, key: str) -> Any:
    try:
        return with_key(instance, key)
    except TypeError as error:
        raise click.UsageError(str(error)) from None


def _argument(text: str) -> Any:
    try:
        return decoding.given_json(text)
    except decoding.TooDeepError as error:
        raise click.UsageError(f"an argument, {text[:20]!r}... of {len(text)} characters: {error}") from None
    except ValueError:
        return text
