"""Dead letters as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from immortal.coordinator.core.interfaces import Letter
    from immortal.coordinator.log import LogReader
    from immortal.protocol.verdicts import Verdict

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from immortal.coordinator.log import LogReader

Values = dict[str, Any]


def dead_letter_rows(reader: LogReader, count_max: int) -> list[Values]:
    """The oldest, with why as text. Raises LogError."""
    found = (_values(letter, reader) for letter in itertools.islice(reader.letters(), count_max))
    return [{**values, "method": _method(values), "why": _why(values)} for values in found]


def _values(letter: Letter, reader: LogReader) -> Values:
    from immortal.presenters.records import rpc_of, time_text

    verdict = letter.verdict
    rpc = rpc_of(verdict.message)
    return {
        "id": f"{verdict.sequence_id}:{verdict.message_index}",
        "time": time_text(letter.time_ns),
        "time_ns": letter.time_ns,
        "method": verdict.method or None,
        "method_id": rpc and rpc.method_id,
        "from": _source(verdict, reader),
        "kind": verdict.kind.name.lower(),
        "cause": verdict.cause.name.lower() if verdict.cause else None,
        "type": verdict.type_name or None,
        "text": verdict.text,
    }


def _source(verdict: Verdict, reader: LogReader) -> str | None:
    """Return the sender: an instance, "~" and a client's ID, or "an impulse"; None if its record is trimmed."""
    from immortal.coordinator.core.errors import LogError
    from immortal.coordinator.log import verify_value
    from immortal.protocol.trailer import BatchKind

    sequence_id = verdict.sequence_id
    try:
        value = next(reader.values(sequence_id, sequence_id), None)
        batches = [] if value is None else verify_value(value, sequence_id, reader.identity.committer_id)[1].batches
    except LogError:
        return None
    index = verdict.message_index
    for batch in batches:
        if index < batch.count:
            return "an impulse" if batch.kind == BatchKind.IMPULSES else batch.name or reader.identity.instance_name
        index -= batch.count
    return None


def _method(values: Values) -> str:
    return values["method"] or ("-" if values["method_id"] is None else f"method {values['method_id']}")


def _why(values: Values) -> str:
    raised = ": ".join(part for part in (values["type"], values["text"]) if part)
    return f"{values['kind']}: {raised}" if raised else values["kind"]
