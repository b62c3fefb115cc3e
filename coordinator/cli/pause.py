"""pause, resume: an instance whose app gets no input for a while."""

from __future__ import annotations

from typing import Any

import click

from immortal.coordinator.cli.common import name_argument, operator_name, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.protocol.shown import printable

Values = dict[str, Any]


@click.command()
@name_argument
@json_option
@pass_registry
def pause(registry: Registry, name: str, as_json: bool) -> None:
    """Let a running instance take no more input: it is logged, and waits until the instance is resumed.

    What the app was given before, it finishes. A restart ends the pause.
    """
    answer = _ask(registry, name, "pause")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "paused": answer["paused"]})
    else:
        echo(printable(f"{name}: {paused_in_words(answer)}"))


@click.command()
@name_argument
@json_option
@pass_registry
def resume(registry: Registry, name: str, as_json: bool) -> None:
    """Let an instance that is paused go on with what its log has for it."""
    answer = _ask(registry, name, "resume")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "was_paused": answer["paused"]})
    else:
        echo(printable(f"{name}: {resumed_in_words(answer)}"))


def _ask(registry: Registry, name: str, verb: str) -> Values:
    folder = registry.load(name).folder
    try:
        answer = control.query(folder, verb, argument={"who": operator_name()})
    except control.NotRunningError as error:
        if error.is_elsewhere:
            raise
        raise FailedError(f"{name!r} does not run, so there is nothing to {verb}: 'immortal run {name}'") from None
    except control.RefusedError as error:
        raise FailedError(error.reason) from None
    if "error" in answer:
        raise FailedError(str(answer["error"]))
    return answer


def paused_in_words(answer: Values) -> str:
    """What came of a pause."""
    if answer["changed"]:
        return "paused; what comes in is logged, and waits until it is resumed"
    return f"it is paused already, by {_by_and_since(answer['paused'])}"


def resumed_in_words(answer: Values) -> str:
    """What came of a resume."""
    if answer["changed"]:
        return f"resumed; it was paused by {_by_and_since(answer['paused'])}"
    return "it was not paused: there is nothing to resume"


def _by_and_since(paused: Values) -> str:
    from immortal.coordinator.cli.records import time_text

    return f"{paused['by']} since {time_text(paused['since_ns'])}"
