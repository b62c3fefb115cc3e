"""group: who is a member of a named group of ordered multicasts, and how one that is dead is expelled."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from immortal.coordinator.cli.common import operator_name, pass_registry
from immortal.coordinator.cli.handlers import waits_in_words, with_times
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.command_line import Commands, FailedError, echo, echo_json, json_option, print_table
from immortal.protocol.errors import ImmortalError
from immortal.protocol.shown import printable

ASKED_AT_ONCE_MAX = 8
TIMEOUT_S = 10.0
LOOK_EACH_S = 0.2

Values = dict[str, Any]


@click.group(cls=Commands)
def group() -> None:
    """Look at a named group of ordered multicasts, expel a member that is dead. Asks all instances that run here."""


@group.command()
@click.argument("name")
@json_option
@pass_registry
def show(registry: Registry, name: str, as_json: bool) -> None:
    """Show the members of the group NAME, who else sends to it, and who waits for whom since when."""
    found = _asked(registry, name)
    newest = _newest(found)
    silent = [one for one in newest["members"] if one not in found]
    if as_json:
        instances = [{"instance": one, **values} for one, values in found.items()]
        echo_json({"name": name, **_view(newest), "silent": silent, "instances": instances})
        return
    echo(printable(f"{name}: view {newest['view']}, members {', '.join(newest['members'])}"))
    if silent:
        echo(printable(f"not running here: {', '.join(silent)}"))
    rows = [
        (
            printable(one),
            "yes" if values["is_member"] else "no",
            str(values["view"]),
            "\n".join(printable(f"expels {other}") for other in values["expelling"]) or "-",
            str(values["unconfirmed"]),
            "\n".join(map(waits_in_words, values["multicasts"])) or "-",
        )
        for one, values in found.items()
    ]
    print_table(("instance", "member", "view", "does", "unconfirmed", "waits"), rows, right=("view", "unconfirmed"))


@group.command()
@click.argument("name", metavar="GROUP")
@click.argument("member")
@click.option("--yes", is_flag=True, help="Expel without asking.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=30.0, show_default=True, help="In seconds."
)
@pass_registry
def expel(registry: Registry, name: str, member: str, yes: bool, timeout_s: float) -> None:
    """Expel MEMBER from GROUP, without its answer: the others go on, and it is told once it is back.

    A member that runs here does it, in the order of the group. All other members must be up: if more of them are dead,
    expel each. The exit status is 1 if it is not done by --timeout; it goes on all the same.
    """
    found = _asked(registry, name)
    newest = _newest(found)
    members = newest["members"]
    if member not in members:
        raise FailedError(f"{member!r} is no member of {name!r}: {', '.join(members)} are")
    others = [one for one, values in found.items() if values["is_member"] and one != member]
    if not others:
        raise FailedError(
            f"no other member of {name!r} runs here: {', '.join(one for one in members if one != member) or 'none'} "
            f"could expel it, on its own machine"
        )
    if not yes:
        runs = ", which runs," if member in found else ""
        click.confirm(f"Expel {member}{runs} from {name}?", abort=True)
    by = max(others, key=lambda one: int(found[one]["view"]))
    request = {"group": name, "member": member, "who": operator_name()}
    answer = _query(registry, by, "expel", request)
    if not answer["done"]:
        raise FailedError(printable(str(answer["text"])))
    deadline = time.monotonic() + timeout_s
    while True:
        values = _groups(_query(registry, by, "handlers", {})).get(name)
        if values is not None and member not in values["members"]:
            echo(printable(f"{member} is expelled from {name}: view {values['view']}, {', '.join(values['members'])}"))
            return
        if time.monotonic() >= deadline:
            waits = "; ".join(waits_in_words(one) for one in (values or {}).get("multicasts", ())) or "see 'group show'"
            raise FailedError(f"{member!r} is not expelled after {timeout_s:g} s, and {by!r} goes on: {waits}")
        time.sleep(LOOK_EACH_S)


def _asked(registry: Registry, name: str) -> dict[str, Values]:
    """What each instance that runs here says of the group, by instance. Raises FailedError."""
    running = [one for one in registry.names() if control.running(registry.load(one).folder) is not None]

    def ask(one: str) -> dict[str, Values]:
        try:
            return _groups(control.query(registry.load(one).folder, "handlers", TIMEOUT_S, argument={}))
        except ImmortalError:
            return {}  # it has stopped, or its app does not work: `status` says so

    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as pool:
        answers = dict(zip(running, pool.map(ask, running), strict=True))
    found = {one: groups[name] for one, groups in answers.items() if name in groups}
    if not found:
        known = ", ".join(sorted({other for groups in answers.values() for other in groups})) or "none"
        raise FailedError(
            f"no instance that runs in {registry.home} takes part in a group {name!r} (groups here: {known}): start "
            f"one, or see 'immortal status'"
        )
    return found


def _groups(answer: Values) -> dict[str, Values]:
    multicasts = [with_times(one) for one in answer.get("multicasts", ())]
    return {one["name"]: {**one, "multicasts": multicasts} for one in answer.get("groups", ())}


def _newest(found: dict[str, Values]) -> Values:
    return max(found.values(), key=lambda one: (one["view"], one["is_member"]))


def _view(values: Values) -> Values:
    return {"view": values["view"], "members": values["members"]}


def _query(registry: Registry, name: str, verb: str, request: Values) -> Values:
    try:
        answer = control.query(registry.load(name).folder, verb, TIMEOUT_S, argument=request)
    except control.RefusedError as error:
        raise FailedError(error.reason) from None
    if "error" in answer:
        raise FailedError(str(answer["error"]))
    return answer
