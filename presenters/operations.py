"""Plain values and texts for operators: waiting handlers, dead letters, peers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import Letter
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.operator import control
from immortal.protocol.safe_output import printable
from immortal.protocol.trailer import BatchKind
from immortal.protocol.verdicts import Verdict

Values = dict[str, Any]
Peer = dict[str, Any]


def retry_problem(name: str, answer: Values) -> str:
    """Return the reason why no effect was retried; "" if one was."""
    if "retried" not in answer:
        return f"the app of {name!r} uses an SDK that is too old to retry effects: restart it with this one"
    return "" if answer["retried"] else str(answer["text"])


def with_times(value: Any) -> Any:
    """Return ``value`` with each time, in ns since the Unix epoch, also as text."""
    if isinstance(value, list):
        return [with_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    times = {key[:-3]: time_text(one) for key, one in value.items() if key.endswith("_ns") and one is not None}
    return {key: with_times(one) for key, one in value.items()} | times


def format_waits(one: Values) -> str:
    """Format one wait of an ordered multicast, which has its times as text."""
    return printable(f"since {_second(one['since'])} it waits for {one['for']}: {one['what']} ({one['count']} wait)")


def format_next_run(schedule: Values) -> str:
    """Format the time of a schedule's next run, which has its times as text."""
    return "not begun" if schedule["due_ns"] is None else _second(schedule["due"])


def format_caller(handler: Values) -> str:
    caller = handler["caller"]
    if caller is None:
        return "nobody waits"
    if caller == "":
        return "itself"
    return f"client {caller[1:]}" if caller.startswith("~") else str(caller)


def format_wait(wait: Values) -> str:
    kind, since = wait["kind"], _second(wait["since"])
    if kind == "timer":
        return f"until {_second(wait['due'])}, since {since}"
    if kind == "effect":
        tries = f", attempt {wait['attempt']}" if wait["attempt"] > 1 else ""
        failed = f"; the attempt before failed: {wait['failure']}" if wait["failure"] else ""
        return f"{wait['for']}{tries}, since {since}{failed}"
    return f"{wait['for']}, since {since}"


def place_in_words(frame: Values) -> str:
    return f"{frame['file']}:{frame['line']}  {frame['text']}"


def format_step(step: Values) -> str:
    if not step["step"]:
        return f"{step['time']}  cancelled"
    return f"{step['time']}  {step['what']} {step_end(step)}"


def step_end(step: Values) -> str:
    """Return a text of a step's end, such as "gave 5"."""
    if not step["step"]:
        return f"by an operator: {step['reason']}"
    if step["raised"]:
        return f"raised {step['value']}"
    return "is over" if step["what"].startswith("timer for ") else f"gave {step['value']}"


def describe_wait_end(name: str, number: int, wait: Values) -> str:
    kind = wait["kind"]
    if kind == "call":
        to = wait["to"]
        if not to:
            return "ends when a handler of the same instance answers (in this list, called by itself)"
        return f"ends when {to} answers: 'immortal handlers {to}', 'immortal peers show {name}'"
    if kind == "timer":
        return f"ends at {wait['due']}"
    if kind == "event":
        command = f"'immortal handlers {name} signal {number} EVENT VALUE'"
        return f"ends with immortal.signal({wait['event']!r}, ...), or {command}"
    if kind == "effect":
        if not wait["failure"]:
            return "ends with its result, or when no attempt is left"
        now = f"'immortal handlers {name} retry-effect {number}' makes the next attempt now"
        return f"ends with its result, or when no attempt is left; {now}"
    return "-"


def _second(time: str) -> str:
    return f"{time[:19]}Z"


# Dead letters.


def dead_letter_rows(reader: LogReader, count_max: int) -> list[Values]:
    """Return the oldest dead letters, at most ``count_max``, each with its reason as text. Raises LogError."""
    found = (letter_values(letter, reader) for letter in itertools.islice(reader.letters(), count_max))
    return [{**values, "method": letter_method(values), "why": letter_why(values)} for values in found]


def letter_values(letter: Letter, reader: LogReader) -> Values:
    from immortal.presenters.records import rpc_of  # loads what decodes arguments

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


def letter_method(values: Values) -> str:
    return values["method"] or ("-" if values["method_id"] is None else f"method {values['method_id']}")


def letter_why(values: Values) -> str:
    raised = ": ".join(part for part in (values["type"], values["text"]) if part)
    return f"{values['kind']}: {raised}" if raised else values["kind"]


# Peers: the knowledge of each, and what a reset would lose.


def consequences(name: str, peer: str, known: Peer) -> Iterator[str]:
    """Yield lines that say, with figures, what a reset of ``peer`` can lose or execute twice."""
    acknowledged, made, received = known["acknowledged"], known["made"], known["received"]
    yield f"this makes {name} forget which log {peer} has (committer {known['committer_id']}):"
    if acknowledged is not None:
        yield (
            f"  {name} to {peer}: the first {acknowledged} calls, which {peer} acknowledged, are not sent again: those"
            f" that its log lacks are lost"
        )
        waiting = "" if made is None else f" ({made - acknowledged} of {made})"
        yield (
            f"    calls not acknowledged{waiting} are sent to the new log of {peer}; calls that it already has are"
            f" executed twice"
        )
    if received is not None:
        yield (
            f"  {peer} to {name}: {name} has received {received} calls; a new log of {peer} starts at call 1, so"
            f" calls that it makes again are executed twice"
        )
    yield f"  if {peer} still has its old log, complete, nothing is lost or executed twice"


def live_peers(settings: InstanceSettings) -> dict[str, Peer] | None:
    """Ask the running coordinator for its peers; None if none runs."""
    if control.running(settings.folder) is None:
        return None
    try:
        found: dict[str, Peer] = control.query(settings.folder, "peers")["peers"]
    except control.NotRunningError:
        return None  # the coordinator has just stopped
    return found
