"""Report of a verification's findings, as lines for people or as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from immortal.coordinator.core.formatting import CallText, Methods, format_call, format_divergence, method_name
from immortal.coordinator.core.output.output_check import Divergence
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import message_at, record_of, rpc_of
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import Origin
from immortal.replay.app_process import DIFFERENCES_MAX, code_values
from immortal.replay.plan import AppExitedError, place_of
from immortal.replay.result import failure_json, new_failure_lines, new_failure_values
from immortal.replay.verify import Difference, OutputDivergence, VerifySection

CALL_SIZE_MAX = 2000  # characters of a call that is shown whole
_VALUE_SIZE_MAX = 200  # characters of one value of a state


class Report:
    """Report of one section. ``source``: the log with the messages that caused the calls."""

    def __init__(self, name: str, section: VerifySection, source: RecordSource) -> None:
        self._name = name
        self._section = section
        self._source = source
        description = section.result.description
        self._methods: Methods = description.methods if description else {}
        self._mark = "different, since a person is forgotten" if section.result.forgotten else "DIVERGED"

    # --- for people -------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        section, result = self._section, self._section.result
        for note in (*result.notes, *result.forgotten):
            yield f"note: {note}"
        yield (
            f"{self._name}: {self._stretch()}: {result.records:,} records, {result.messages:,} messages replayed in "
            f"{result.duration_s:.2f} s"
        )
        for headline, *trace in new_failure_lines(result.news):  # later differences can follow from these
            yield f"  {self._mark}: {headline}"
            yield from (f"  {line}" for line in trace)
        if not section.outputs:
            yield f"  outputs: the same ({', '.join(self._counts()) or 'none'})"
        for finding in section.outputs:
            yield from (f"  {line}" for line in self._output_lines(finding))
        if result.failure is not None:
            failure = result.failure
            where = f"record {failure.sequence_id}, message {failure.message_index}"
            yield f"  {self._mark}: the handler of {where} raised:"
            yield from (f"    {line}" for line in failure.text.rstrip("\n").split("\n"))
        elif section.state is not None:
            yield from (f"  {line}" for line in self._state_lines())
        elif section.state_is_same:
            yield "  state: the same"
        if section.ended is not None:
            yield f"  {ended_text(section.ended)}"

    def _stretch(self) -> str:
        start, end = self._section.start, self._section.end
        last = self._section.result.last_sequence_id
        is_end = last >= self._source.summary().last_sequence_id
        until = (
            f"{'to the end of the log (' if is_end else 'to '}record {last}{')' if is_end else ''}"
            if end is None
            else f"to checkpoint {end.checkpoint_id} ({place_of(end)})"
        )
        return f"checkpoint {start.checkpoint_id} ({place_of(start)}) {until}"

    def _counts(self) -> Iterator[str]:
        for to, count in sorted(self._section.counts.items()):
            unproved = self._section.unproved.get(to, 0)
            hint = f", of which the last {unproved:,} can't be told: the log has no mark after them" if unproved else ""
            yield f"{count:,} to {to or 'itself'}{hint}"

    def _output_lines(self, finding: OutputDivergence) -> Iterator[str]:
        divergence, difference = finding.divergence, finding.difference
        if divergence is not None:
            yield f"{self._mark}: {self._divergence(finding, divergence)}"
            for position, message in divergence.made:
                origin = self._origin_text(finding.origins.get(position))
                yield f"  now {position}: {self._call(message, finding)}{origin}"
        else:
            to = repr(finding.destination) if finding.destination else "itself"
            yield f"{self._mark}: the log of {to} holds other calls than the replay makes"
        if difference is not None:
            yield f"  the first that differs is number {difference.position}:"
            then, now = self._both(finding.destination, difference)
            yield f"    then: {then}"
            yield f"    now:  {now}{self._origin_text(finding.origins.get(difference.position))}"

    def _divergence(self, finding: OutputDivergence, divergence: Divergence) -> str:
        if not finding.is_surplus:
            return format_divergence(replace(divergence, made=()), self._name, self._methods)
        to = f"the calls to {divergence.destination!r}" if divergence.destination else "the calls to itself"
        return (
            f"{self._name!r} makes more calls than before: by a checkpoint, {to} had reached number "
            f"{divergence.after_position}; the replay makes {divergence.made_position}"
        )

    def _call(self, message: bytes, finding: OutputDivergence) -> str:
        return format_call(message, finding.destination, self._methods)

    def _both(self, destination: str, difference: Difference) -> tuple[str, str]:
        then = format_whole_call(difference.then, destination, self._methods)
        now = format_whole_call(difference.now, destination, self._methods)
        if max(len(then), len(now)) <= CALL_SIZE_MAX:
            return then, now
        place = next((index for index, (one, other) in enumerate(zip(then, now, strict=False)) if one != other), 0)
        start = max(0, place - CALL_SIZE_MAX // 2)
        return _part(then, start), _part(now, start)

    def _origin_text(self, origin: Origin | None) -> str:
        if origin is None:
            return ""
        handler = self._handler(origin)
        where = f"record {origin.sequence_id}, message {origin.message_index}"
        return f"  <- {where}{': ' if handler else ''}{handler}"

    def _handler(self, origin: Origin) -> str:
        """Return the logged message that caused a call, in words; "" if it can't be read."""
        try:
            for value in self._source.values(origin.sequence_id, origin.sequence_id):
                message = message_at(record_of(value).content, origin.message_index)
                return format_call(message, "", self._methods) if message is not None else ""
        except ImmortalError:
            pass  # trimmed meanwhile: the report omits it
        return ""

    def _state_lines(self) -> Iterator[str]:
        finding = self._section.state
        if finding is None:
            return
        end = self._section.end
        where = f"of checkpoint {end.checkpoint_id}" if end is not None else "at the end"
        if finding.problem is not None:
            yield f"{self._mark}: the state {where} differs: {finding.problem}"
            return
        yield f"{self._mark}: the state {where} differs:"
        for difference in finding.differences[:DIFFERENCES_MAX]:
            then, now = (_value(difference, side) for side in ("old", "new"))
            yield f"  {difference['path']}: then {then}, now {now}"
        if len(finding.differences) > DIFFERENCES_MAX:
            yield "  ... and more"

    # --- plain values -----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        section, result = self._section, self._section.result
        state = section.state
        return {
            "from_checkpoint": section.start.checkpoint_id,
            "to_checkpoint": None if section.end is None else section.end.checkpoint_id,
            "last_record": result.last_sequence_id,
            "records": result.records,
            "messages": result.messages,
            "same": section.is_same,
            "code": code_values(result.code),
            "outputs": {to or self._name: count for to, count in sorted(section.counts.items())},
            "unproved": {to or self._name: count for to, count in sorted(section.unproved.items())},
            "output_divergences": [self._output_json(finding) for finding in section.outputs],
            "state_is_same": section.state_is_same,
            "state": [] if state is None else list(state.differences[:DIFFERENCES_MAX]),
            "state_problem": None if state is None else state.problem,
            "failed_now": new_failure_values(result.news),
            "failure": failure_json(result),
            "app_ended_at": None if section.ended is None else section.ended.sequence_id,
            "warnings": result.warnings,
            "notes": [*result.notes, *result.forgotten],
        }

    def _output_json(self, finding: OutputDivergence) -> dict[str, Any]:
        divergence, difference = finding.divergence, finding.difference
        described: dict[str, Any] = {"destination": finding.destination or self._name}
        if divergence is not None:
            described |= {
                "record": divergence.sequence_id,
                "after_position": divergence.after_position,
                "position": divergence.position,
                "made_position": divergence.made_position,
                "is_surplus": finding.is_surplus,
                "made": [
                    {"position": position, "call": self._call(message, finding), **self._origin_json(finding, position)}
                    for position, message in divergence.made
                ],
            }
        if difference is not None:
            then, now = self._both(finding.destination, difference)
            described["difference"] = {
                "position": difference.position,
                "then": then,
                "now": now,
                **self._origin_json(finding, difference.position),
            }
        return described

    def _origin_json(self, finding: OutputDivergence, position: int) -> dict[str, Any]:
        origin = finding.origins.get(position)
        if origin is None:
            return {}
        by = {"record": origin.sequence_id, "message": origin.message_index, "handler": self._handler(origin)}
        return {"made_by": by}


def ended_text(ended: AppExitedError) -> str:
    return f"the app ended here, as before: at record {ended.sequence_id}, the last in the log"


def format_whole_call(message: bytes, destination: str, methods: Methods) -> str:
    """Format a call like :func:`format_call`, with all of its arguments, however large."""
    rpc = rpc_of(message)
    name = method_name(rpc.method_id, rpc.kind, destination, methods)
    return CallText.from_rpc(rpc, is_msgpack=name is not None, size_max=None, name=name).with_method(name)


def _part(text: str, start: int) -> str:
    front = "..." if start else ""
    rest = "..." if len(text) > start + CALL_SIZE_MAX else ""
    return f"{front}{text[start : start + CALL_SIZE_MAX]}{rest}"


def _value(difference: Mapping[str, Any], side: str) -> str:
    if side not in difference:
        return "nothing"
    text = repr(difference[side])
    return text if len(text) <= _VALUE_SIZE_MAX else f"{text[: _VALUE_SIZE_MAX - 3]}..."
