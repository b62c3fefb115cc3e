"""Command ``python -m appsdk.running.inspection``: shows checkpoints with the class that wrote them, without a run.

    show module:Class FILE                                 the state, as one JSON object
    diff module:Class FILE other:Class FILE [--limit N]    the differences, as a JSON list of {"path", "old", "new"}
    diff-shown FILE FILE [--limit N]                       the same for two outputs of "show", in files: for two classes
                                                           of one name
    rows module:Class FILE OUT                             the state as rows, into the file OUT: a JSON list of table
                                                           and row on each line (:mod:`immortal.appsdk.state.tree`)
    methods module:Class                                   the names of its methods and its peers', as a JSON list of
                                                           [destination, method ID, name, parameters]
    paths module:Class                                     what rules of redaction can name in it and its nodes, as a
                                                           JSON list of [names of the class, ["pay.card", ...]]
    unanswered module:Class FILE                           waits of its handlers that are not in the log, after a
                                                           what-if: a JSON list of {"handler", "arguments", "waits_for"}

The exit status is 0, EXIT_FAILED for a checkpoint that can't be read, EXIT_NOT_RUNNABLE for a class that can't be found
or is no app. Only the class's code that reads its state runs: no handler, no hook, no ``prepare``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.appsdk.calls.codec import resolve_hints
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.dispatch.lifecycle import restoring_class
from immortal.appsdk.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_RUNNABLE, AppError, StateError
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.nodes.nodes import decode_saved
from immortal.appsdk.nodes.reference_counts import Stage
from immortal.appsdk.running.life import print_message
from immortal.appsdk.running.runner import load_or_report
from immortal.appsdk.state.journal import SavedTask, SavedTasks, describe_wait
from immortal.appsdk.state.schema import Envelope, decode_envelope, is_transient
from immortal.appsdk.state.tree import Fields, Row, differences, state_rows, task_rows, to_json, tree
from immortal.appsdk.types.handles import handle_label, read_extension
from immortal.protocol import decoding, redaction
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import opener


class InspectedState(Struct, frozen=True):
    """State in a checkpoint. ``state``: the attributes as trees (:mod:`immortal.appsdk.state.tree`), by name."""

    envelope: Envelope
    state: Fields

    def to_json(self) -> dict[str, Any]:
        return {
            "class": self.envelope.class_name,
            "version": self.envelope.version,
            "sequence_id": self.envelope.sequence_id,
            "state": to_json(self.state),
        }


def inspect_state(main: Definition, blob: bytes) -> InspectedState:
    """Read a checkpoint's blob with the class ``main``, or with the older one of its chain that wrote it.

    Raises StateError, and DefinitionError for a class whose annotations can't be resolved.
    """
    envelope, state = decode_envelope(blob)
    definition = restoring_class(main, envelope)
    schema = definition.state()
    instance = definition.new_instance()
    try:
        schema.restore(instance, envelope, state)
    except ImmortalError:
        raise
    except BaseException as error:
        if not is_user_failure(error):
            raise
        raise StateError(f"{definition.name}.restore raised {type(error).__name__}: {error}") from error
    if schema.serializer == "own" and not _annotated(definition, instance):
        waiting = Fields() if envelope.tasks is None else describe_tasks(definition, envelope.tasks)
        if envelope.nodes is not None:
            waiting.update(describe_nodes(envelope.nodes))
        opaque = Fields({"$opaque": len(state), "check": f"{crc64(bytes(state)):016x}"})
        return InspectedState(envelope, Fields({**opaque, **redacted_state(waiting, definition)}))
    shown = describe_state(definition, instance, envelope.tasks)
    if envelope.nodes is not None:
        shown.update(redacted_state(describe_nodes(envelope.nodes)))
    return InspectedState(envelope, shown)


def describe_state(definition: Definition, instance: object, tasks: SavedTasks | None) -> Fields:
    """Return the attributes of an instance that are its state, as trees, and its waits. Raises StateError."""
    waiting = Fields() if tasks is None else describe_tasks(definition, tasks)
    schema = definition.state()
    names = _annotated(definition, instance) if schema.serializer == "own" else list(schema.fields)
    try:
        state = Fields({**{name: tree(getattr(instance, name)) for name in names}, **waiting})
        return redacted_state(state, definition)
    except RecursionError:
        raise StateError(f"{definition.name}: the state is too deep to be shown") from None


def redacted_state(state: Fields, definition: Definition | None = None) -> Fields:
    """Return a state as people are shown it (:mod:`immortal.protocol.redaction`). Without ``definition`` rules are for
    all classes.
    """
    if not redaction.rules():
        return state
    classes = None if definition is None else class_names(definition)
    attributes = {name: part for name, part in state.items() if not name.startswith("$")}
    shown = Fields({**state, **redaction.redact(attributes, (), classes)})
    if (definition is None or definition.objects) and isinstance(keys := attributes.get("keys"), dict):
        shown["keys"] = {key: redaction.redact(one, (), classes) for key, one in keys.items()}
    for name in {"$waiting", "$queued"} & state.keys():
        shown[name] = [_redacted_task(task, definition) for task in state[name]]
    if "$signals" in state:
        shown["$signals"] = redaction.redact(state["$signals"], (), classes)
    if "$nodes" in state:
        shown["$nodes"] = [redaction.redact(node, (), {node["$class"]}) for node in state["$nodes"]]
    return shown


def class_names(definition: Definition) -> set[str]:
    """Return the names of a class, its bases, and the classes that it upgrades."""
    return {
        name for one in definition.chain for name in (*(cls.__qualname__ for cls in one.cls.__mro__), *one.formerly)
    }


def _redacted_task(task: Fields, definition: Definition | None) -> Fields:
    handler = definition.handlers.get(task["handler"]) if definition else None
    arguments, names = task["arguments"], () if handler is None else handler.signature.parameters
    shown = {"arguments": redaction.arguments(task["handler"], arguments, names)} if type(arguments) is list else {}
    results = [[what, redaction.result(redaction.step_name(what), value)] for what, value in task.get("results", ())]
    return Fields({**task, **shown, **({"results": results} if results else {})})


def rows(main: Definition, blob: bytes) -> Iterator[tuple[str, Row | str]]:
    """Yield the state as rows of tables, and the SDK's rows on async handlers. Raises as :func:`inspect_state`."""
    inspected = inspect_state(main, blob)
    yield from state_rows(inspected.state)
    if inspected.envelope.tasks is not None:
        definition = restoring_class(main, inspected.envelope)
        for table, row in task_rows(inspected.envelope.tasks, partial(_handler_name, definition), _decoded):
            yield table, _redacted_task(Fields(row), definition) if "arguments" in row else row


def describe_tasks(definition: Definition, saved: SavedTasks) -> Fields:
    """Describe waiting async handlers, under names that no attribute has."""
    shown = Fields()
    if saved.tasks:
        shown["$waiting"] = [_shown_task(definition, task) for task in saved.tasks]
    if saved.queued:
        shown["$queued"] = [_shown_task(definition, call) for call in saved.queued]
    if saved.signals:
        signals = {name: [_decoded(value) for value in values] for name, values in saved.signals.items()}
        shown["$signals"] = signals
    if saved.schedules:
        shown["$schedules"] = {
            _handler_name(definition, method_id): tree(datetime_of(due_ns))
            for method_id, due_ns in saved.schedules.items()
        }
    return shown


def describe_nodes(data: bytes) -> Fields:
    """Describe the nodes of an instance, their holders, and the foreign handles it holds. Raises StateError."""
    saved = decode_saved(data)
    nodes = [
        Fields({"$number": one.number, "$class": one.class_name, **_decoded(one.state)})
        for one in sorted(saved.nodes, key=lambda one: one.number)
    ]
    grants = [
        Fields(handle=handle_label(one.key), node=one.node, stage=Stage(one.stage).name, holders=tree(one.holders))
        for one in saved.grants
    ]
    held = [
        Fields(handle=handle_label(one.key), owner=one.owner, copies=one.count, ended=one.ended)
        for one in sorted(saved.held, key=lambda one: (one.owner, one.key))
    ]
    return Fields({"$nodes": nodes, "$handles": Fields(of_nodes=grants, held=held)})


def unanswered(main: Definition, blob: bytes) -> list[Fields]:
    """Describe waits of async handlers that have no counterpart in the log (:mod:`immortal.appsdk.running.tracing`).

    Raises StateError.
    """
    envelope, _ = decode_envelope(blob)
    definition = restoring_class(main, envelope)
    return [
        _redacted_task(
            Fields(
                handler=_handler_name(definition, task.method_id),
                arguments=_decoded(task.arguments),
                waits_for=describe_wait(pending),
            ),
            definition,
        )
        for task in (envelope.tasks.tasks if envelope.tasks else [])
        for pending in task.pending
        if pending.number < 0 and pending.what.startswith(("call ", "effect "))
    ]


def _shown_task(definition: Definition, task: SavedTask) -> Fields:
    shown = Fields(
        handler=_handler_name(definition, task.method_id),
        arguments=_decoded(task.arguments),
        since=tree(datetime_of(task.started_ns)),
        waits_for=[describe_wait(pending) for pending in task.pending],
        results=[[describe_wait(entry), _decoded(entry.value)] for entry in task.entries],
    )
    if task.caller is not None:
        shown["caller"] = task.caller
    return shown


def _handler_name(definition: Definition, method_id: int) -> str:
    handler = definition.by_method_id.get(method_id)
    return f"method {method_id}" if handler is None else handler.name


def _decoded(data: bytes) -> Any:
    try:
        decoding.check_shown(data)
        return tree(decoding.decode(data, ext_hook=read_extension))
    except decoding.DecodeError as error:
        return f"{len(data)} bytes: {error}"


def _annotated(definition: Definition, instance: object) -> list[str]:
    """Return the annotated attributes that a class with its own form of checkpoints has restored."""
    hints = resolve_hints(definition.cls)
    return [name for name in hints if name in vars(instance) and not is_transient(hints[name])]


# --- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's module is no part of the answer
        status, answer = _answer(options)
    if status == EXIT_DONE:
        print(json.dumps(answer))  # noqa: T201 (for a program)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m immortal.appsdk.running.inspection", description="Read checkpoints of an app."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="the state in a checkpoint, as JSON")
    compare = commands.add_parser("diff", help="what differs between two checkpoints, as JSON")
    waiting = commands.add_parser("unanswered", help="what its handlers wait for and the log does not have, as JSON")
    shown = commands.add_parser("diff-shown", help="what differs between two states that were shown, as JSON")
    table = commands.add_parser("rows", help="the state as rows of tables, into a file")
    methods = commands.add_parser("methods", help="the names of its methods, as JSON")
    paths = commands.add_parser("paths", help="what rules of redaction can name, as JSON")
    for command in (methods, paths):
        command.add_argument("target", metavar="module:Class", help="the class below immortal.Immortal")
    for command, sides in ((show, [""]), (table, [""]), (compare, ["old_", "new_"]), (waiting, [""])):
        for side in sides:
            command.add_argument(f"{side}target", metavar="module:Class", help="the class below immortal.Immortal")
            command.add_argument(f"{side}file", metavar="FILE", type=Path, help="the blob of a checkpoint")
    table.add_argument("out", metavar="OUT", type=Path, help="a file, which is written")
    for side in ("old", "new"):
        shown.add_argument(f"{side}_file", metavar="FILE", type=Path, help="what 'show' has printed")
    for command in (compare, shown):
        command.add_argument("--limit", metavar="N", type=_positive, help="the first N differences only")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 was expected")
    return int(text)


def _answer(options: argparse.Namespace) -> tuple[int, Any]:
    if options.command in ("methods", "paths"):
        return (_methods if options.command == "methods" else _paths)(options.target)
    if options.command == "diff-shown":
        old, new = (
            redacted_state(Fields(decoding.load_json(file.read_bytes())["state"]))
            for file in (options.old_file, options.new_file)
        )
        return EXIT_DONE, [difference.to_json() for difference in islice(differences(old, new), options.limit)]
    sides = ("old_", "new_") if options.command == "diff" else ("",)
    read = []
    for side in sides:
        target, file = getattr(options, f"{side}target"), getattr(options, f"{side}file")
        if (cls := load_or_report(target)) is None:
            return EXIT_NOT_RUNNABLE, None
        try:
            definition, blob = definition_of(cls), file.read_bytes()
            if options.command == "unanswered":
                return EXIT_DONE, to_json(unanswered(definition, blob))
            if options.command == "rows":
                return EXIT_DONE, _write_rows(definition, blob, options.out)
            read.append(inspect_state(definition, blob))
        except OSError as error:
            print_message(target, f"the checkpoint can't be read: {file}: {error.strerror}")
            return EXIT_FAILED, None
        except AppError as error:
            print_message(target, f"{file}: {error}")
            return EXIT_NOT_RUNNABLE if error.exit_status == EXIT_NOT_RUNNABLE else EXIT_FAILED, None
    if options.command == "show":
        return EXIT_DONE, read[0].to_json()
    found = islice(differences(read[0].state, read[1].state), options.limit)
    return EXIT_DONE, [difference.to_json() for difference in found]


def _write_rows(definition: Definition, blob: bytes, out: Path) -> int:
    count = 0
    with open(out, "w", encoding="utf-8", opener=opener) as file:
        for table, row in rows(definition, blob):
            shown = row if isinstance(row, str) else {name: to_json(value) for name, value in row.items()}
            file.write(json.dumps([table, shown]) + "\n")
            count += 1
    return count


def _methods(target: str) -> tuple[int, Any]:
    if (cls := load_or_report(target)) is None:
        return EXIT_NOT_RUNNABLE, None
    try:
        names = all_method_names(definition_of(cls))
    except AppError as error:
        print_message(target, str(error))
        return EXIT_NOT_RUNNABLE, None
    return EXIT_DONE, [[*key, name, redaction.parameter_names(name)] for key, name in names.items()]


def _paths(target: str) -> tuple[int, Any]:
    if (cls := load_or_report(target)) is None:
        return EXIT_NOT_RUNNABLE, None
    definition = definition_of(cls)
    own = [[sorted(class_names(definition)), [path for one in definition.chain for path in _paths_of(one)]]]
    return EXIT_DONE, [*own, *([[cls.__qualname__], [*resolve_hints(cls), *dir(cls)]] for cls in definition.nodes)]


def _paths_of(definition: Definition) -> Iterator[str]:
    objects = (definition.objects or definition).cls
    yield from resolve_hints(objects)
    yield from (f"{name}.{redaction.RESULT}" for name in dir(objects))
    for name, handler in definition.handlers.items():
        yield from (f"{name}.{parameter}" for parameter in handler.signature.parameters)


if __name__ == "__main__":
    sys.exit(main())
