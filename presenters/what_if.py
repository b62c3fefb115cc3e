"""Findings of a what-if, as text and as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.formatting import CallText, Methods, format_call, format_counted_method, method_name
from immortal.coordinator.log.record_contents import message_at, record_of
from immortal.protocol import redaction
from immortal.protocol.command_line import counted, table_lines
from immortal.protocol.safe_output import printable_lines
from immortal.replay import AppCommand, RecordSource, ReplayError
from immortal.replay.app_process import Code, code_values, diff_states, unanswered
from immortal.replay.comparison import Key, Kind, Side
from immortal.replay.findings import Finding
from immortal.replay.result import (
    MessageOutcome,
    OutcomeChanges,
    format_failure,
    place_in_words,
    too_little_text,
    verdict_values,
)
from immortal.replay.verify_report import ended_text
from immortal.replay.what_if import Unknown, WhatIf, not_worked_out

Values = dict[str, Any]


SAME, FAILED, DIFFERENT = 0, 1, 3  # exit statuses
INITIAL_METHOD_ID = -1
TRACEBACK_LINES_MAX = 8
VALUE_SIZE_MAX = 60  # characters shown of a value in the state


_WAITING = ("$waiting", "$queued")  # handlers, in a state


@dataclass(eq=False)
class Report:
    """Report on a what-if. ``blob_paths``: files of the states at the end. ``reader``: the log, for the inputs shown.
    ``at_least``: number of messages that must have been compared for the verdict "no difference".
    """

    _name: str
    _apps: Mapping[Side, AppCommand]
    _outcome: WhatIf
    _reader: RecordSource
    _limit: int
    _blob_paths: Mapping[Side, Path]
    at_least: int = 0

    def __post_init__(self) -> None:
        outcome, blob_paths = self._outcome, self._blob_paths
        self.state_problem: str | None = None
        self.state: list[Values] = []
        self.unanswered: list[Values] = []
        if set(outcome.results) == set(Side) and not any(result.failure for result in outcome.results.values()):
            try:
                if any(result.blob_check is None for result in outcome.results.values()):
                    raise ReplayError("an app without a Hello gives no state in a what-if of an upgrade")
                self.state = self._state_differences(blob_paths)
                self.unanswered = self._unanswered(blob_paths[Side.NEW])
            except ReplayError as error:
                self.state_problem = str(error)

    @property
    def exit_status(self) -> int:
        if self._exception(Side.OLD) is not None:
            return FAILED
        outcome = self._outcome
        if outcome.upgrade_now_error or self._exception(Side.NEW) is not None or self._end_differs:
            return DIFFERENT
        if outcome.findings.total or outcome.fates or self.state:
            return DIFFERENT
        return SAME if self.state_problem is None and self._most("messages") >= self.at_least else FAILED

    @property
    def _end_differs(self) -> bool:
        ends = [(error.sequence_id, error.exit_status) for error in self._outcome.ends.values()]
        return len(ends) == 1 or len(set(ends)) > 1

    @property
    def warnings(self) -> list[str]:
        """Warnings of the SDK about the new code."""
        new = self._outcome.results.get(Side.NEW)
        return [] if new is None else new.warnings

    def _state_differences(self, blob_paths: Mapping[Side, Path]) -> list[Values]:
        """Return the differences of the states, at most ``limit`` + 1."""
        results = self._outcome.results
        old, new = ((result.blob_size_bytes, result.blob_check) for result in (results[Side.OLD], results[Side.NEW]))
        if old == new:
            return []
        if any(result.description is None for result in results.values()):  # no SDK app: its state is bytes
            found: Values = {"path": ""}
            for side in Side:
                found[side.value] = (
                    f"{results[side].blob_size_bytes} bytes with CRC {results[side].blob_check or 0:016x}"
                )
            return [found]
        (old_class, old_path, old_code), (new_class, new_path, new_code) = (
            (self._class(side), blob_paths[side], self._apps[side].code) for side in Side
        )
        limit = self._limit + 1
        return diff_states(old_class, old_path, new_class, new_path, limit=limit, old_code=old_code, new_code=new_code)

    def _unanswered(self, blob_path: Path) -> list[Values]:
        """Return the new code's handlers that wait for answers which the log lacks; none if the states are equal."""
        if not self.state or self._outcome.results[Side.NEW].description is None:
            return []
        return unanswered(self._class(Side.NEW), blob_path, self._apps[Side.NEW].code)

    @cached_property
    def not_worked_out(self) -> list[Unknown]:
        return list(not_worked_out(self._name, self._outcome, len(self.unanswered)))

    @property
    def _state_is_known(self) -> bool:
        """True if an equal state proves that there is no difference."""
        return self.state_problem is None and not any(one.hides_state for one in self.not_worked_out)

    def _class(self, side: Side) -> str:
        app = self._apps[side]
        return self._outcome.results[side].label if app.by_hand else app.name

    def _code(self, side: Side) -> Code | None:
        result = self._outcome.results.get(side)
        return None if result is None else result.code

    # --- calls in words ----------------------------------------------------------------------------------------------

    @cached_property
    def _methods(self) -> Methods:
        """Method names of both sides; for a method that both name, the new side's name."""
        methods: dict[tuple[str, int], str] = {("", INITIAL_METHOD_ID): "the initial message"}
        for side in Side:
            result = self._outcome.results.get(side)
            if result is not None and result.description is not None:
                methods |= result.description.methods
        return methods

    def _call(self, destination: str, call: CallText | None) -> str | None:
        if call is None:
            return None
        return call.with_method(self._method(destination, call))

    def _method(self, destination: str, call: CallText) -> str | None:
        return method_name(call.method_id, call.kind, destination, self._methods)

    def _message(self, key: Key) -> bytes | None:
        """Read the logged message of a key; None if keys are places of calls, or the log holds it no longer."""
        if self._outcome.by_position:
            return None
        try:
            value = next(self._reader.values(key[0], key[0]), None)
        except LogError:  # the log was trimmed meanwhile
            return None
        return None if value is None else message_at(record_of(value).content, key[1])

    def _input(self, key: Key) -> str | None:
        message = self._message(key)
        return None if message is None else format_call(message, "", self._methods)

    @cached_property
    def _groups(self) -> list[tuple[Key | None, list[Finding]]]:
        """First findings, grouped by execution, each group with the key of the input that began it; None if all of
        its findings are of that input itself.
        """
        groups: dict[Key, list[Finding]] = {}
        for finding in self._outcome.findings.first:
            message = self._message(finding.key)
            began = None if message is None else self._outcome.executions.input_of(message)
            groups.setdefault(began or finding.key, []).append(finding)
        return [
            (None if self._outcome.by_position or all(one.key == key for one in found) else key, found)
            for key, found in groups.items()
        ]

    def _exception(self, side: Side) -> Values | None:
        result = self._outcome.results.get(side)
        if side is Side.NEW and self._outcome.upgrade_error:
            return {"record": None, "message": None, "input": None, "text": self._outcome.upgrade_error}
        if result is None or result.failure is None:
            return None
        failure = result.failure
        return {
            "record": failure.sequence_id,
            "message": failure.message_index,
            "input": self._input((failure.sequence_id, failure.message_index)),
            "text": failure.text,
        }

    # --- plain values, for JSON --------------------------------------------------------------------------------------

    def values(self) -> Values:
        outcome, findings = self._outcome, self._outcome.findings
        return {
            "instance": self._name,
            "old_app": self._apps[Side.OLD].name,
            "new_app": self._apps[Side.NEW].name,
            **{f"{side.value}_code": code_values(self._code(side)) for side in Side},
            "from_checkpoint": outcome.route.checkpoint.checkpoint_id,
            "to": outcome.route.last_sequence_id,
            "records": self._most("records"),
            "messages": self._most("messages"),
            "same": self.exit_status == SAME,
            "equal": outcome.equal_count,
            "differences": {kind.value: findings.count(kind) for kind in Kind},
            "by_method": self._by_method(),
            "first": [self._finding_values(finding, began) for began, found in self._groups for finding in found],
            "by_position": outcome.by_position,
            "fates": [self._fates_values(fates) for fates in outcome.fates],
            "exception": self._exception(Side.NEW),
            "old_exception": self._exception(Side.OLD),
            "unanswered": self.unanswered,
            "state": self.state[: self._limit],
            "state_has_more": len(self.state) > self._limit,
            "state_problem": self.state_problem,
            "state_known": self._state_is_known,
            "not_worked_out": [{**asdict(one), "why": one.why.value} for one in self.not_worked_out],
            "notes": outcome.notes,
            "upgrade_now_error": outcome.upgrade_now_error,
            "app_ended_at": {side.value: error.sequence_id for side, error in outcome.ends.items()},
        }

    def _most(self, count: str) -> int:
        return max((getattr(result, count) for result in self._outcome.results.values()), default=0)

    def _by_method(self) -> list[Values]:
        rows = [
            {
                "destination": destination,
                "method": format_counted_method(method_id, rpc_kind, destination, self._methods),
                **{kind.value: counts[kind] for kind in Kind},
            }
            for (destination, method_id, rpc_kind), counts in self._outcome.findings.counts.items()
        ]
        return sorted(rows, key=lambda row: (row["destination"], row["method"]))

    def _finding_values(self, finding: Finding, began: Key | None) -> Values:
        where: Values = {"record": finding.key[0], "message": finding.key[1], "input": self._input(finding.key)}
        if began is not None:
            where["execution"] = {"record": began[0], "message": began[1], "input": self._input(began)}
        if self._outcome.by_position:
            where = {"place": finding.key[0]}
        return {
            "kind": finding.kind.value,
            **where,
            "destination": finding.destination,
            "old": self._call(finding.destination, finding.old),
            "new": self._call(finding.destination, finding.new),
        } | ({"arguments": self._pairs(finding)} if finding.arguments else {})

    def _pairs(self, finding: Finding) -> list[Values]:
        call = finding.new or finding.old
        pairs = [asdict(one) for one in finding.arguments]
        if call is None or not redaction.may_apply(self._method(finding.destination, call)):
            return pairs
        return [one | {side.value: one[side.value] and redaction.REDACTED for side in Side} for one in pairs]

    def _fates_values(self, fates: OutcomeChanges) -> Values:
        first = fates.first
        return {
            "method": fates.method,
            "fate": fates.fate.value,
            "count": fates.count,
            "first": {
                "record": first.sequence_id,
                "message": first.message_index,
                "input": self._input(first.key[:2]),
                "old": verdict_values(fates.then),
                "new": verdict_values(fates.now),
            },
        }

    # --- for people --------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        outcome, findings = self._outcome, self._outcome.findings
        old, new = self._apps[Side.OLD].name, self._apps[Side.NEW].name
        yield f"what if {new} had handled the log of {self._name!r}, instead of {old}?"
        start = outcome.route.checkpoint
        begin = f"taken after record {start.sequence_id}" if start.sequence_id >= 0 else "the first one"
        yield (
            f"from checkpoint {start.checkpoint_id} ({begin}) to record {outcome.route.last_sequence_id}:"
            f" {counted(self._most('records'), 'record')} with {counted(self._most('messages'), 'message')}"
        )
        yield from (f"{side.value} code: {code}" for side in Side if (code := self._code(side)) is not None)
        yield from (f"note: {note}" for note in outcome.notes)
        yield from printable_lines(outcome.upgrade_now_error)
        if outcome.by_position:
            yield "note: the apps do not tell which input made which call: calls are compared by position"
        yield from (f"not worked out: {one.text}" for one in self.not_worked_out)
        if findings.first:
            yield ""
            for began, found in self._groups:
                if began is not None:
                    yield f"{self._input(began) or 'a handler'}, which began at record {began[0]}, message {began[1]}:"
                yield from (f"{'  ' if began else ''}{self._finding_line(finding)}" for finding in found)
            if findings.total > len(findings.first):
                yield f"and {findings.total - len(findings.first):,} more"
            yield ""
            yield from self._table()
        for fates in outcome.fates:
            yield ""
            yield from self._fates_lines(fates)
        for side in Side:
            yield from self._exception_lines(side)
        yield from self._end_lines()
        if self.unanswered:
            yield ""
            yield from self._unanswered_lines()
        if self.state or self.state_problem:
            yield ""
            yield from self._state_lines()
        yield ""
        yield self._verdict()

    def _finding_line(self, finding: Finding) -> str:
        old, new = (self._call(finding.destination, call) for call in (finding.old, finding.new))
        to = f"to {finding.destination!r}" if finding.destination else "to itself"
        if self._outcome.by_position:
            where = f"call {finding.key[0]} {to}"
        else:
            made_by = self._input(finding.key) or "an input"
            where = f"record {finding.key[0]}, message {finding.key[1]}: {made_by} -> {to}"
        if old is None:
            return f"{where}: would be {new} in addition"
        return f"{where}: was {old}; would not be" if new is None else f"{where}: was {old}; would be {new}"

    def _table(self) -> Iterator[str]:
        kinds = [kind.value for kind in Kind]
        rows = (
            (method["destination"] or "itself", method["method"], *(f"{method[kind]:,}" for kind in kinds))
            for method in self._by_method()
        )
        return table_lines(("destination", "method", *kinds), rows, right=kinds)

    def _fates_lines(self, fates: OutcomeChanges) -> Iterator[str]:
        first, method = fates.first, fates.method or "a message"
        calls = "a call" if fates.count == 1 else f"{fates.count:,} calls"
        made = self._input(first.key[:2])
        where = f"{'' if fates.count == 1 else 'the first is '}{place_in_words(first)}{f': {made}' if made else ''}"
        what = "would fail that did not" if fates.fate is MessageOutcome.FAILS else fates.fate.would_be
        was = "" if fates.then is None else f"; was {format_failure(fates.then)}"
        would_be = "" if fates.now is None else f"; would be {format_failure(fates.now)}"
        yield f"{calls} of {method} {what}: {where}{was}{would_be}"
        if fates.now is not None:
            yield from printable_lines(fates.now.trace.rstrip("\n"), indent="    ")[-TRACEBACK_LINES_MAX:]

    def _exception_lines(self, side: Side) -> Iterator[str]:
        exception = self._exception(side)
        if exception is None:
            return
        yield ""
        first, *rest = exception["text"].rstrip("\n").split("\n")
        if exception["record"] is None:
            yield f"the {side.value} code can't take over the state: {first}"
            yield from rest
            return
        call = f": {exception['input']}" if exception["input"] else ""
        yield f"the {side.value} code fails at record {exception['record']}, message {exception['message']}{call}"
        trace = [line for line in rest if line.startswith("    ")]
        yield from trace[-TRACEBACK_LINES_MAX:] or [f"    {first}"]
        yield "nothing after it was compared"

    def _end_lines(self) -> Iterator[str]:
        ends = self._outcome.ends
        if not ends:
            return
        yield ""
        if not self._end_differs:
            yield ended_text(ends[Side.OLD])
            return
        for side in Side:
            if side in ends:
                yield from f"{ends[side]}".split("\n")
            else:
                yield f"{self._apps[side].name} continues there"
        yield "only what comes before is compared"

    def _unanswered_lines(self) -> Iterator[str]:
        for one in self.unanswered[: self._limit]:
            yield f"{call_text(one)} waits for an answer that the log does not have: {one['waits_for']}"
        if len(self.unanswered) > self._limit:
            yield f"and {len(self.unanswered) - self._limit:,} more"

    def _state_lines(self) -> Iterator[str]:
        if self.state_problem:
            yield f"the states at the end can't be compared: {self.state_problem}"
            return
        yield "the state at the end:"
        for difference in self.state[: self._limit]:
            old, new = (_value_text(difference, side) for side in Side)
            yield f"  {difference['path'] or 'all of it'}: was {old}; would be {new}"
        if len(self.state) > self._limit:
            yield "  and more"

    def _verdict(self) -> str:
        outcome = self._outcome
        if self._end_differs:
            return f"different: where the app ends; before that {self._calls_verdict()}"
        if self.exit_status == SAME:
            return (
                f"no difference in {counted(self._most('messages'), 'message')}: {outcome.equal_count:,} calls are the"
                " same, and so is the state"
            )
        if self._exception(Side.OLD) is not None:
            new = outcome.results.get(Side.NEW)
            end = f"; the new code goes on to record {new.last_sequence_id}" if new and not new.failure else ""
            return f"can't be told: the old code itself fails{end}"
        if outcome.upgrade_now_error:
            before = self._calls_verdict() if outcome.findings.total or self.state else "no difference before"
            return f"different: the new code can't take over the newest state, with what waits now; {before}"
        return f"{self._calls_verdict()}{self._fates_verdict()}"

    def _fates_verdict(self) -> str:
        counts = dict.fromkeys(MessageOutcome, 0)
        for fates in self._outcome.fates:
            counts[fates.fate] += fates.count
        said = [f"{count:,} {fate.would_be}" for fate, count in counts.items() if count]
        return f"; of the calls that came in {', '.join(said)}" if said else ""

    def _calls_verdict(self) -> str:
        outcome, findings = self._outcome, self._outcome.findings
        if self._exception(Side.NEW) is not None:
            if self._outcome.upgrade_error:
                return "different: the new code can't take over the state"
            before = f"{findings.total:,} different" if findings.total else "none different"
            return f"different: the new code fails; of the calls before that {before}, {outcome.equal_count:,} the same"
        if not findings.total and not self.state and outcome.fates:
            state = "the states can't be compared" if self.state_problem else "so is the state"
            return f"different: what fails; all {outcome.equal_count:,} calls made are the same, {state}"
        if self.exit_status == FAILED and self.state_problem is None:
            return too_little_text(self._most("messages"), self.at_least)
        if not findings.total and not self.state and self._end_differs and not self.state_problem:
            return f"all {outcome.equal_count:,} calls are the same, and so is the state"
        if not findings.total and not self.state:
            return f"can't be told: {outcome.equal_count:,} calls are the same, the states can't be compared"
        if not findings.total:
            return f"different: the state; all {outcome.equal_count:,} calls are the same"
        state = " and the state" if self.state else f"; {self._equal_state()}"
        return f"different: {counted(findings.total, 'call')}{state}; {outcome.equal_count:,} calls are the same"

    def _equal_state(self) -> str:
        if self.state_problem:
            return "the states can't be compared"
        return "with the log's inputs the state is the same" if self._state_is_known else "the state is not known"


def _value_text(difference: Values, side: Side) -> str:
    if side.value not in difference:
        return "absent"
    path, value = difference["path"], difference[side.value]
    if path in _WAITING and isinstance(value, list):
        return _clipped(f"[{', '.join(map(call_text, value))}]")
    if path.partition("[")[0] in _WAITING and isinstance(value, dict) and "handler" in value:
        return _clipped(call_text(value))
    return _clipped(json.dumps(value, ensure_ascii=False))


def call_text(task: Values) -> str:
    """Return a waiting handler as a call: ``ride(17)``."""
    arguments = ", ".join(json.dumps(each, ensure_ascii=False) for each in task["arguments"])
    return f"{task['handler']}({_clipped(arguments)})"


def _clipped(text: str) -> str:
    return text if len(text) <= VALUE_SIZE_MAX else f"{text[: VALUE_SIZE_MAX - 3]}..."
