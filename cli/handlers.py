"""Commands handlers and group: ``async def`` handlers that wait; named groups of ordered multicasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from immortal.cli.options import InstanceCommandGroup, ask_coordinator, name_argument, pass_registry, pass_settings_of
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.presenters.operations import (
    _second,
    describe_wait_end,
    format_caller,
    format_next_run,
    format_step,
    format_wait,
    format_waits,
    place_in_words,
    retry_problem,
    with_times,
)
from immortal.presenters.status import operator_name
from immortal.protocol import decoding
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
from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import printable
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX

REQUEST_TIMEOUT_S = 60.0  # the app answers between two records, and an order is first made durable

Values = dict[str, Any]


@click.group(cls=InstanceCommandGroup, invoke_without_command=True, subcommand_metavar="[COMMAND [ARGS]...]")
@name_argument
@json_option
@click.pass_context
def handlers(ctx: click.Context, name: str, as_json: bool) -> None:
    """List waiting 'async def' handlers of NAME: what each waits for, since when, and at which line.

    The instance must be running. Each handler has an ID that is never used again. At most the 1,000 oldest are shown.
    Scheduled handlers follow, with the time of their next run.
    """
    if ctx.invoked_subcommand is None:
        _list(ctx.ensure_object(Registry).load(name), as_json)
    elif as_json:
        raise click.UsageError("--json can't be combined with a subcommand: 'explain' has its own --json")


_pass_settings = pass_settings_of(Registry.load)
_id_argument = click.argument("wanted", metavar="ID", type=click.IntRange(1, (1 << 63) - 1))


def _list(settings: InstanceSettings, as_json: bool) -> None:
    answer = _request(settings, "handlers", {})
    found = [with_times(one) for one in answer["handlers"]]
    multicasts = [with_times(one) for one in answer.get("multicasts", ())]
    schedules = [with_times(one) for one in answer.get("schedules", ())]
    if as_json:
        more = {"multicasts": multicasts, "schedules": schedules}
        echo_json({"count": answer["count"], "handlers": found} | {key: value for key, value in more.items() if value})
        return
    for one in multicasts:
        echo(format_waits(one))
    if not found:
        echo(f"no handler of {settings.name} waits")
    else:
        rows = [_row(one) for one in found]
        print_table(("ID", "handler", "called by", "since", "waits for", "at"), rows, right=("ID",))
        if answer["count"] > len(found):
            echo(f"... and {answer['count'] - len(found):,} more")
    if schedules:
        rows = [(one["handler"], one["schedule"], format_next_run(one)) for one in schedules]
        print_table(("runs by itself", "schedule", "next"), rows)


@handlers.command()
@_id_argument
@json_option
@_pass_settings
def explain(settings: InstanceSettings, wanted: int, as_json: bool) -> None:
    """Explain a handler: its arguments, its cause, what it has done, what it waits for, and what would end the wait."""
    found = _request(settings, "handlers", {"task": wanted})["handler"]
    if found is None:
        raise FailedError(
            f"no handler {wanted} of {settings.name!r} waits: it has ended, or there never was one; 'immortal handlers "
            f"{settings.name}' lists those that do"
        )
    if as_json:
        echo_json(with_times(found))
        return
    echo_lines(_lines(settings.name, with_times(found)))


def _reason(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if len(value) > REASON_CHARACTERS_MAX:
        raise click.UsageError(f"--reason has {len(value)} characters: {REASON_CHARACTERS_MAX} at most were expected")
    return value


_reason_option = click.option(
    "--reason", default="", metavar="TEXT", callback=_reason, help="Reason that the handler and its caller receive."
)


@handlers.command()
@_id_argument
@_reason_option
@_pass_settings
def cancel(settings: InstanceSettings, wanted: int, reason: str) -> None:
    """Cancel a handler: Cancelled is raised at the line where it waits, so that it can clean up.

    The cancellation is logged and survives crashes. A caller that waits for the answer gets CallCancelled. Exit status:
    1 if the handler no longer waits.
    """
    _order(settings, "cancel", {"task": wanted, "reason": reason})


@handlers.command()
@_id_argument
@_reason_option
@_pass_settings
def terminate(settings: InstanceSettings, wanted: int, reason: str) -> None:
    """End a handler that ignores its cancellation.

    No further code of it runs, not even a 'finally'. The termination is logged and survives crashes. A caller that
    waits for the answer gets CallCancelled. Exit status: 1 if the handler no longer waits.
    """
    _order(settings, "terminate", {"task": wanted, "reason": reason})


@handlers.command()
@_id_argument
@click.argument("event")
@click.argument("value", default="null")
@_pass_settings
def signal(settings: InstanceSettings, wanted: int, event: str, value: str) -> None:
    """Send EVENT with VALUE (JSON) to a handler that waits for it.

    Like immortal.signal(EVENT, VALUE), but only for this handler, even if others wait for the same event. Exit status:
    1 if the handler does not wait for EVENT, or VALUE has the wrong type.
    """
    _order(settings, "signal", {"task": wanted, "event": event, "value": json_argument("VALUE", value)})


def json_argument(name: str, text: str) -> Any:
    """Decode a value that a person typed. Raises click.UsageError."""
    try:
        return decoding.parse_json_argument(text)
    except ValueError as error:
        raise click.UsageError(
            f"{name} {text[:100]!r} is not JSON: {error}; a string needs its own quotes: '\"yes\"'"
        ) from None


@handlers.command("retry-effect")
@_id_argument
@_pass_settings
def retry_effect(settings: InstanceSettings, wanted: int) -> None:
    """Retry the effects of a handler now, instead of after their retry delay.

    The attempt counts as the next one of its Retry. Exit status: 1 if no effect waits for its next attempt.
    """
    answer = _request(settings, "retry-effect", {"task": wanted, "who": operator_name()})
    if problem := retry_problem(settings.name, answer):
        raise FailedError(printable(problem))
    echo(f"{settings.name}: {answer['text']}")


# --- asking the coordinator ------------------------------------------------------------------------------------------


def _order(settings: InstanceSettings, verb: str, request: Values) -> None:
    answer = _request(settings, verb, {**request, "who": operator_name()})
    text = f"{answer['text']} (record {answer['record']}:{answer['message']})"
    if not answer["done"]:
        raise FailedError(printable(text))
    echo(f"{settings.name}: {text}")


def _request(settings: InstanceSettings, verb: str, request: Values) -> Values:
    not_running = (
        f"{settings.name!r} does not run, and only its app knows what its handlers wait for: start it with "
        f"'immortal run {settings.name}'; without it, 'immortal replay {settings.name} --state' shows who waits"
    )
    return ask_coordinator(settings, verb, request, timeout_s=REQUEST_TIMEOUT_S, not_running=not_running)


# --- contents of a handler -------------------------------------------------------------------------------------------


def _row(handler: Values) -> tuple[str, ...]:
    waits = "\n".join(map(format_wait, handler["waits"])) or "-"
    if handler["cancelled"]:
        waits = f"cancelled {_second(handler['cancelled'][-1]['time'])}, and goes on\n{waits}"
    at = "\n".join(place_in_words(frames[-1]) for frames in handler["at"] if frames) or "-"
    return (
        str(handler["id"]),
        f"{handler['handler']}{handler['arguments']}",
        format_caller(handler),
        _second(handler["since"]),
        waits,
        at,
    )


def _lines(name: str, handler: Values) -> Iterator[str]:
    yield f"handler {handler['id']}: {handler['handler']}{handler['arguments']}"
    yield f"  since      {handler['since']}" + (
        f", begun anew {handler['generation']} times" if handler["generation"] else ""
    )
    called = f", its call {handler['call_number']}" if handler["caller"] is not None else ""
    yield f"  called by  {format_caller(handler)}{called}"
    if handler["record"] is not None:
        place = f"message {handler['message']} of record {handler['record']}"
        yield f"  begun by   {place}: 'immortal log show {name} --from {handler['record']} --to {handler['record']}'"
    for cancelled in handler["cancelled"]:
        reason = f": {cancelled['reason']}" if cancelled["reason"] else ""
        yield f"  cancelled  {cancelled['time']} by {cancelled['who']}{reason}; it goes on"
    yield ""
    count = handler["steps_count"]
    yield f"  {counted(count, 'step')} so far{':' if count else ''}"
    if count > len(handler["steps"]):
        yield f"    ... the last {len(handler['steps'])}:"
    for step in handler["steps"]:
        yield f"    {format_step(step)}"
    yield ""
    yield "  waits for:"
    for wait in handler["waits"]:
        yield f"    {format_wait(wait)}"
        yield f"      {describe_wait_end(name, handler['id'], wait)}"
    for frames in handler["at"]:
        yield ""
        yield "  at:"
        for frame in frames:
            yield f"    {frame['file']}:{frame['line']}, in {frame['function']}"
            if frame["text"]:
                yield f"      {frame['text']}"


# group: the members of a named group of ordered multicasts, and the expulsion of a dead one.


ASKED_AT_ONCE_MAX = 8
TIMEOUT_S = 10.0
LOOK_EACH_S = 0.2


@click.group(cls=Commands)
def group() -> None:
    """Show a group of ordered multicasts, or expel a dead member. Asks all instances that run here."""


@group.command()
@click.argument("name")
@json_option
@pass_registry
def show(registry: Registry, name: str, as_json: bool) -> None:
    """Show the members and senders of the group NAME, and which instance waits for which."""
    found = _group_answers(registry, name)
    newest = _newest(found)
    silent = [one for one in newest["members"] if one not in found]
    if as_json:
        instances = [{"instance": one, **values} for one, values in found.items()]
        echo_json(
            {
                "name": name,
                "view": newest["view"],
                "members": newest["members"],
                "silent": silent,
                "instances": instances,
            }
        )
        return
    echo(f"{name}: view {newest['view']}, members {', '.join(newest['members'])}")
    if silent:
        echo(f"not running here: {', '.join(silent)}")
    rows = [
        (
            printable(one),
            "yes" if values["is_member"] else "no",
            str(values["view"]),
            "\n".join(printable(f"expels {other}") for other in values["expelling"]) or "-",
            str(values["unconfirmed"]),
            "\n".join(map(format_waits, values["multicasts"])) or "-",
        )
        for one, values in found.items()
    ]
    print_table(("instance", "member", "view", "does", "unconfirmed", "waits"), rows, right=("view", "unconfirmed"))


@group.command()
@click.argument("name", metavar="GROUP")
@click.argument("member")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Seconds to wait."
)
@pass_registry
def expel(registry: Registry, name: str, member: str, yes: bool, timeout_s: float) -> None:
    """Expel a dead MEMBER from GROUP, so that the other members can continue.

    Another member that runs here carries it out. All other members must be running; if several are dead, expel each of
    them. MEMBER learns of it when it is back. Exit status: 1 if the expulsion is not complete after --timeout; it then
    continues in the background.
    """
    found = _group_answers(registry, name)
    newest = _newest(found)
    members = newest["members"]
    if member not in members:
        raise FailedError(f"{member!r} is not a member of {name!r} (members: {', '.join(members)})")
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
    settings = registry.load(by)
    request = {"group": name, "member": member, "who": operator_name()}
    answer = ask_coordinator(settings, "expel", request, timeout_s=TIMEOUT_S)
    if not answer["done"]:
        raise FailedError(printable(str(answer["text"])))
    deadline = time.monotonic() + timeout_s
    while True:
        values = _groups(ask_coordinator(settings, "handlers", {}, timeout_s=TIMEOUT_S)).get(name)
        if values is not None and member not in values["members"]:
            echo(f"{member} is expelled from {name}: view {values['view']}, {', '.join(values['members'])}")
            return
        if time.monotonic() >= deadline:
            waits = "; ".join(format_waits(one) for one in (values or {}).get("multicasts", ())) or "see 'group show'"
            raise FailedError(f"{member!r} is not expelled after {timeout_s:g} s, and {by!r} goes on: {waits}")
        time.sleep(LOOK_EACH_S)


def _group_answers(registry: Registry, name: str) -> dict[str, Values]:
    """Ask each instance that runs here about the group; return answers by instance. Raises FailedError."""
    running = [one for one in registry.names() if control.running(registry.load(one).folder) is not None]

    def ask(instance: str) -> dict[str, Values]:
        try:
            return _groups(control.query(registry.load(instance).folder, "handlers", TIMEOUT_S, argument={}))
        except ImmortalError:
            return {}  # it has stopped, or its app does not work: `status` reports it

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
