"""Command dead-letters: failed calls that no caller waits for; show, retry, drop them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import (
    InstanceCommandGroup,
    app_name,
    ask_coordinator,
    message_id,
    name_argument,
    pass_settings_of,
    settings_with_log,
)
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.interfaces import Letter
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.operator import control
from immortal.pipeline.arguments import ArgumentDecoder, decoder_for
from immortal.presenters.operations import letter_method, letter_values, letter_why
from immortal.presenters.records import describe_message
from immortal.presenters.status import operator_name
from immortal.protocol import redaction
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, echo_lines, json_option, print_table
from immortal.protocol.files import opener, removed_on_error
from immortal.protocol.safe_output import printable, printable_json

REQUEST_TIMEOUT_S = 60.0  # there can be many, and they are answered once they are on disk
WHY_SIZE_MAX = 100  # characters, in the table

Values = dict[str, Any]
MessageId = tuple[int, int]


@click.group(cls=InstanceCommandGroup, invoke_without_command=True, subcommand_metavar="[COMMAND [ARGS]...]")
@name_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON, without the messages ('export' includes them).")
@click.pass_context
def dead_letters(ctx: click.Context, name: str, as_json: bool) -> None:
    """List failed calls to NAME that nobody waits for: forks and impulses.

    They are read from the log, so the instance need not run. The ID of each is SEQ:INDEX: the number of its record,
    and of the message in that record.
    """
    if ctx.invoked_subcommand is None:
        _list(settings_with_log(ctx.ensure_object(Registry), name), as_json)
    elif as_json:
        raise click.UsageError(
            "--json can't be combined with a subcommand: 'show' has its own --json, and 'export' prints JSON"
        )


_pass_settings = pass_settings_of(settings_with_log)

_app_option = click.option(
    "--app",
    metavar="MODULE:CLASS",
    callback=app_name,
    help="Class that decodes the arguments.  [default: the instance's own]",
)
_ids_argument = click.argument("ids", metavar="[ID]...", nargs=-1, callback=message_id)
_all_option = click.option("--all", "all_of_them", is_flag=True, help="All dead letters.")


def _list(settings: InstanceSettings, as_json: bool) -> None:
    with own_logs.open_reader(settings) as reader:
        found = [letter_values(letter, reader) for letter in reader.letters()]
        _print_problems(reader)
    if as_json:
        echo_json(found)
    elif not found:
        echo(f"{settings.name} has no dead letters")
    else:
        _print_table(found)


@dead_letters.command()
@click.argument("wanted", metavar="ID", callback=message_id)
@_app_option
@json_option
@_pass_settings
def show(settings: InstanceSettings, wanted: MessageId, app: str | None, as_json: bool) -> None:
    """Show a dead letter: caller, time, reason, arguments and traceback."""
    with own_logs.open_reader(settings) as reader:
        letter = reader.letter((*wanted, 0, 0))
        if letter is None:
            raise _unknown(settings, wanted)
        found = _whole(letter, reader, decoder_for(app, settings.app))
    if as_json:
        echo_json(found)
        return
    echo_lines(_lines(found))


@dead_letters.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@_app_option
@_pass_settings
def export(settings: InstanceSettings, file: Path | None, app: str | None) -> None:
    """Write all dead letters as JSON Lines to a new FILE, or to stdout."""
    decoder = decoder_for(app, settings.app)
    with contextlib.ExitStack() as opened:
        reader = opened.enter_context(own_logs.open_reader(settings))
        try:
            out = None if file is None else opened.enter_context(open(file, "x", encoding="ascii", opener=opener))
        except FileExistsError:
            raise click.UsageError(f"{file} is there already: give another name, or remove it first") from None
        if file is not None:
            opened.enter_context(removed_on_error(file))
        for letter in reader.letters():
            echo(json.dumps(_whole(letter, reader, decoder)), file=out)
        _print_problems(reader)


@dead_letters.command()
@_ids_argument
@_all_option
@_pass_settings
def retry(settings: InstanceSettings, ids: Sequence[MessageId], all_of_them: bool) -> None:
    """Give dead letters to the app again, each as a new input in the log.

    The instance must be running. Exit status: 1 if one of them could not be retried.
    """
    answer = _request(settings, "letters-retry", _chosen(settings, ids, all_of_them))
    retried, refused = answer.get("retried", 0), answer.get("refused") or {}
    echo(f"{settings.name}: {counted(retried, 'dead letter')} retried")
    for one, reason in refused.items():
        echo(f"{one} is not retried: {reason}", err=True)
    if refused:
        sys.exit(1)


@dead_letters.command()
@_ids_argument
@_all_option
@click.option("--yes", is_flag=True, help="Drop without asking.")
@_pass_settings
def drop(settings: InstanceSettings, ids: Sequence[MessageId], all_of_them: bool, yes: bool) -> None:
    """Remove dead letters permanently. The instance must be running."""
    chosen = _chosen(settings, ids, all_of_them)
    if control.running(settings.folder) is None:
        raise FailedError(_not_running(settings))
    if not yes:
        what = "all dead letters" if all_of_them else counted(len(chosen["keys"]), "dead letter")
        click.confirm(f"Drop {what} of {settings.name} for good?", abort=True)
    answer = _request(settings, "letters-drop", chosen)
    echo(f"{settings.name}: {counted(answer.get('dropped', 0), 'dead letter')} dropped")


# --- asking the coordinator ------------------------------------------------------------------------------------------


def _chosen(settings: InstanceSettings, ids: Sequence[MessageId], all_of_them: bool) -> Values:
    if all_of_them == bool(ids):
        raise click.UsageError("give either IDs or --all: 'immortal dead-letters NAME' lists them")
    if all_of_them:
        return {"all": True}
    with own_logs.open_reader(settings) as reader:
        known = reader.summary().letters
    for one in ids:
        if (*one, 0, 0) not in known:
            raise _unknown(settings, one)
    return {"keys": [[*one, 0, 0] for one in dict.fromkeys(ids)]}


def _request(settings: InstanceSettings, verb: str, request: Values) -> Values:
    request = {**request, "who": operator_name()}
    return ask_coordinator(settings, verb, request, timeout_s=REQUEST_TIMEOUT_S, not_running=_not_running(settings))


def _not_running(settings: InstanceSettings) -> str:
    return (
        f"{settings.name!r} is not running, and only its coordinator can change its dead letters: start it with"
        f" 'immortal run {settings.name}'"
    )


def _unknown(settings: InstanceSettings, wanted: MessageId) -> FailedError:
    return FailedError(
        f"{settings.name!r} has no dead letter {wanted[0]}:{wanted[1]}: 'immortal dead-letters {settings.name}' lists"
        " them"
    )


# --- contents of a letter --------------------------------------------------------------------------------------------


def _print_problems(reader: LogReader) -> None:
    for problem in reader.problems:
        echo(f"warning: {problem}", err=True)


def _whole(letter: Letter, reader: LogReader, decoder: ArgumentDecoder | None) -> Values:
    verdict = letter.verdict
    message = describe_message(verdict.message, decoder)
    described = letter_values(letter, reader)
    if described["method"] is None:
        described["method"] = message["method"]
    is_redacted = redaction.may_apply(described["method"])
    data = redaction.REDACTED if is_redacted else verdict.message.hex()
    return {**described, "message": message, "message_hex": data, "trace": verdict.trace}


# --- for people ------------------------------------------------------------------------------------------------------


def _print_table(letters: list[Values]) -> None:
    rows = []
    for values in letters:
        why = printable(letter_why(values))
        clipped = why if len(why) <= WHY_SIZE_MAX else f"{why[: WHY_SIZE_MAX - 3]}..."
        cells = (values["id"], values["time"][:19] + "Z", letter_method(values), values["from"] or "-", clipped)
        rows.append(list(map(printable, cells)))
    print_table(("ID", "when", "method", "from", "why"), rows)


def _lines(letter: Values) -> Iterator[str]:
    message = letter["message"]
    yield f"dead letter {letter['id']}"
    rows = {
        "when": letter["time"],
        "method": letter_method(letter),
        "from": letter["from"] or "-",
        "why": letter_why(letter),
    }
    if "arguments" in message:
        rows["arguments"] = printable_json(message["arguments"])
    if "bytes" in message:
        rows["bytes"] = message["bytes"]
    if "problem" in message:
        rows["note"] = message["problem"]
    width = max(map(len, rows))
    for title, text in rows.items():
        yield f"  {title.ljust(width)}  {text}"
    if letter["trace"]:
        yield ""
        yield from (f"  {line}".rstrip() for line in letter["trace"].rstrip("\n").split("\n"))
