"""Finds the fewest inputs of a log that give a value, by delta debugging: each try is a replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import chain
from math import isfinite
from types import NoneType
from typing import Any

from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.tree import Tree
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import rpc_of, shown_arguments
from immortal.protocol import redaction
from immortal.protocol.extensions import RandomDraw
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, decode_trailer
from immortal.replay.fleet.player import NOTHING, LoggedRecord, Place, Player, Slot, first_checkpoint
from immortal.replay.plan import ReplayError
from immortal.replay.result import Sink


def fewest(inputs: list[Place], holds: Callable[[list[Place]], bool], is_late: Callable[[], bool]) -> list[Place]:
    """Return some of ``inputs`` that satisfy ``holds``, none of which can be left out: Zeller's ddmin. If ``is_late``,
    return the fewest so far.
    """
    if not inputs or holds([]):
        return []
    parts = 2
    while len(inputs) > 1:
        size = -(-len(inputs) // parts)
        chunks = [inputs[at : at + size] for at in range(0, len(inputs), size)][::-1]  # the newest first
        rests = ([one for one in inputs if one not in left_out] for left_out in map(set, chunks))
        fewer = ((rest, max(parts - 1, 2)) for rest in rests if parts > 2)
        for some, parts_then in chain(((chunk, 2) for chunk in chunks), fewer):
            if is_late():
                return inputs
            if holds(some):
                inputs, parts = some, parts_then
                break
        else:
            if parts >= len(inputs):
                return inputs
            parts = min(len(inputs), parts * 2)
    return inputs


class PartialRuns:
    """Runs of a log from its oldest checkpoint to the message ``end``, without some of its inputs. An instance's call
    to itself is left out with its cause.
    """

    def __init__(self, source: RecordSource, definition: Definition, end: Place) -> None:
        """Read the log and run it once. Raises ReplayError."""
        self._source = source
        self._definition = definition
        self._route = first_checkpoint(source, None)
        self.begins_at = self._route.checkpoint.sequence_id
        self.slots: dict[Place, Slot] = {}
        self._records: list[tuple[LoggedRecord, list[Place], list[RandomDraw]]] = []
        self._makers: dict[Place, Place] = {}  # of calls to itself
        with closing(Player(source, self._route, definition, Sink())) as player:
            self._note(player, end)

    def _note(self, player: Player, end: Place) -> None:
        """Note all records, and what each call to itself was made by."""
        made: dict[int, Place] = {}
        for value in self._source.values(self.begins_at + 1, end[0]):
            header = decode_header(value)
            record = LoggedRecord(header.sequence_id, value, decode_trailer(value[header.size_bytes :], header.check))
            turn = player.give_logged(record)
            if turn.stopped:
                raise ReplayError(f"the code of the log stops at {turn.stopped}")
            made |= {output.position: output.place for output in turn.outputs if not output.destination}
            slots = {(record.sequence_id, index): slot for index, slot in enumerate(record.slots())}
            slots = {place: slot for place, slot in slots.items() if place <= end}
            self.slots |= slots
            own = {at: slot.position for at, slot in slots.items() if slot.source == ""}
            self._makers |= {at: made[position] for at, position in own.items() if position in made}
            self._records.append((record, list(slots), turn.draws))

    @property
    def inputs(self) -> list[Place]:
        """Inputs that can be left out."""
        return [at for at in self.slots if at not in self._makers and not self._is_initial(at)]

    def value_after(self, kept: list[Place], read_value: Callable[[Player], Tree]) -> Tree:
        """Return the result of ``read_value`` after these inputs alone."""
        there = set(kept)
        with closing(Player(self._source, self._route, self._definition, Sink(), is_new=True)) as player:
            for record, places, draws in self._records:
                if places and self._is_initial(places[0]):
                    player.give_logged(record)
                    continue
                there.update(at for at in places if self._makers.get(at) in there)
                if there.isdisjoint(places):
                    continue
                player.tasks.receive_draws(draws)
                given = [self._slot(at, is_there=at in there) for at in places]
                player.give_slots(record.sequence_id, record.time_ns, given, is_logs=False)
            return read_value(player)

    def _slot(self, at: Place, *, is_there: bool) -> Slot:
        slot = self.slots[at]
        return slot if is_there else Slot(slot.batch, slot.source, slot.position, NOTHING)

    def _is_initial(self, at: Place) -> bool:
        return self.slots[at].batch.kind == BatchKind.INITIAL

    def call_code(self, at: Place) -> str | None:
        """Return an input as a call of ``service`` in a test with :mod:`immortal.testing`; None if it is no call of the
        user's, or an argument has no literal."""
        rpc = rpc_of(self.slots[at].message)
        handler = self._definition.by_method_id.get(rpc.method_id) if rpc.kind == RpcKind.CALL else None
        arguments = shown_arguments(rpc)
        if handler is None or arguments is None:
            return None
        shown = literals(*redaction.arguments(handler.name, arguments, handler.signature.parameters))
        if None in shown:
            return None
        way = "send" if rpc.rpc_type == RpcType.IMPULSE else "begin"
        method = f"{self._definition.cls.__name__}.{handler.function.__name__}"
        return f"service.{way}({', '.join([method, *map(str, shown)])})"


def literals(*values: Any) -> list[str | None]:
    """Return each value as a literal of Python; None for a value without one."""
    return [repr(value) if _is_plain(value) else None for value in values]


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return _is_plain([*value, *value.values()])
    if type(value) is list:
        return all(map(_is_plain, value))
    return isfinite(value) if type(value) is float else type(value) in (int, str, bool, bytes, NoneType)
