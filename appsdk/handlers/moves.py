"""Moves of ranges of keys between the shards of a keyed class, and calls that are forwarded to the shard of their key.

A shard *gives* a range: one message has its rows, and from then on the shard forwards the range's calls behind it. So
the other shard has the rows before the first forwarded call, and the calls of each caller stay in order.

A shard that called another one for a range takes a *detour* before it takes the direct way: it goes on as before, with
a fence behind each call. When the last fence has come back, all its calls have arrived, and the direct way is free.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

from msgspec import Struct, field

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import refused
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler, query, rpc
from immortal.appsdk.handlers.definition import blocks, range_of, shard_name
from immortal.appsdk.state.schema import Transient
from immortal.appsdk.state.table import Table
from immortal.appsdk.types.handles import MARK
from immortal.protocol import decoding
from immortal.protocol.client_frames import Caller
from immortal.protocol.messages import RpcType
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.protocol.verdicts import Cause

GIVE_LIMITS = (1024, 1000, 256 << 10)
"""Most ranges, rows, and bytes of rows that a shard gives at once: meanwhile it handles nothing else."""
INDEXED_MAX = 5000  # keys whose ranges are worked out at once
WAITING_SHOWN_MAX = 20
_EVENT_OF_KEY = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+): """)


class Relay(Struct, array_like=True):
    """Call that was forwarded to the instance ``to`` and is not answered yet: its caller's name and number."""

    to: str
    caller: str
    number: int
    method_id: int


class Moves(Struct):
    """Moves of one shard, since the number of shards changed for the first time.

    ``count``: the new number of shards. ``owners``: shards of ranges that have moved already, as far as this shard
    knows. ``detours``: by range, the shard through which calls still go, and the number of the last fence behind them.
    """

    count: int
    owners: dict[int, int] = field(default_factory=dict)
    detours: dict[int, tuple[int, int]] = field(default_factory=dict)
    relays: dict[int, Relay] = field(default_factory=dict)
    fence: int = 0


class Parcel(Struct):
    """Rows and kept signals of ``ranges``, for one shard. Ranges are complete with the last parcel that has rows."""

    ranges: list[int] = []
    rows: list[tuple[str | int, bytes]] = []
    signals: dict[str, list[bytes]] = {}


class Moving:
    """Part of a shard's state that says which ranges it has, and the handlers by which ranges move.

    ``shard``: from 1; 0: the only one of a project without a count. ``moves`` None: the number never changed."""

    _immortal_context: Context
    _immortal_definition: Any

    keys: Table[Any, Any]
    shard: int
    shards: int
    moves: Moves | None = None
    rows_by_range: Transient[Any] = None  # keys of rows, while ranges are given
    indexed_to: Transient[Any] = None  # the last of these keys; None: they are all there, or none is

    # --- routes of calls ----------------------------------------------------------------------------------------------

    def owner(self, number: int) -> int:
        """Return the shard that has a range, as far as this shard knows."""
        found = None if self.moves is None else self.moves.owners.get(number)
        return blocks(self.shards)[number] if found is None else found

    def next_shard(self, number: int) -> int | None:
        """Return the shard through which a message for a range goes; None: it is for this shard, now."""
        assert self.moves is not None
        owner, detour = self.owner(number), self.moves.detours.get(number)
        if detour is None:
            return None if owner == self.shard else owner
        is_last = owner == self.shard and self._immortal_context.source in (None, self._name_of(detour[0]))
        return None if is_last else detour[0]

    def forward(self, handler: Handler[Any, Any], to: int, arguments: tuple[Any, ...], front: int) -> None:
        """Forward a call to the shard ``to``. ``front``: the key's index: 2 if a waiting caller is in front."""
        context, moves = self._immortal_context, self.moves
        assert moves is not None
        number, name = range_of(arguments[front]), self._name_of(to)
        if front:
            caller, call, *rest = arguments
            own = context.tasks.draw_number()
            moves.relays[own] = Relay(name, caller, call, handler.method_id)
            context.tasks.answers.pass_on(name, handler.method_id, RpcType.ASYNC, (context.instance_name, own, *rest))
        else:
            context.tasks.answers.pass_on(name, handler.method_id, RpcType.FORK, arguments)
        if number in moves.detours:
            self._start_detour([number], to)

    def _immortal_relay(self, number: int, raised: bool, value: bytes) -> bool:
        """Pass on the answer to a forwarded call; return False if the call ``number`` was not forwarded."""
        context, moves = self._immortal_context, self.moves
        relay = None if moves is None else moves.relays.get(number)
        if moves is None or relay is None or context.source not in (None, relay.to):
            return False
        del moves.relays[number]
        if MARK in value:
            context.nodes.accounts.count_incoming(value)
            context.carries_handles = True
        if relay.method_id == CANCEL_CALL_METHOD_ID:
            caller = Caller(relay.caller, relay.number, relay.method_id)
            context.tasks.answers.answer_value(caller, decoding.decode(value, type=bool))
        else:
            dropped: Any = SimpleNamespace(method_id=relay.method_id, function=Relay)  # by an upgrade since
            handler = self._immortal_definition.by_method_id.get(relay.method_id, dropped)
            context.tasks.answers.answer(handler, relay.caller, relay.number, raised, value)
        return True

    def _immortal_cancel(self, caller: str, number: int, cancelled: int, reason: str) -> bool:
        """Forward the cancellation of a call that was forwarded; return False if it was not."""
        context, moves = self._immortal_context, self.moves
        relays = () if moves is None else moves.relays.values()
        relay = next((one for one in relays if (one.caller, one.number) == (caller, cancelled)), None)
        if moves is None or relay is None:
            return False
        own = context.tasks.draw_number()
        forwarded = next(number for number, one in moves.relays.items() if one is relay)
        moves.relays[own] = Relay(relay.to, caller, number, CANCEL_CALL_METHOD_ID)
        arguments = context.instance_name, own, forwarded, reason
        context.tasks.answers.pass_on(relay.to, CANCEL_CALL_METHOD_ID, RpcType.ASYNC, arguments)
        return True

    def _name_of(self, shard: int) -> str:
        name = self._immortal_context.instance_name
        return shard_name(name.removesuffix(f"-{self.shard}") if self.shard else name, shard, 2 if shard else 1)

    def _require_shard_as_sender(self) -> None:
        """Check that a message comes from another shard: others must not bring rows or end detours. Raises
        HandlerError."""
        source, base = self._immortal_context.source, self._name_of(0)
        is_shard = source is None or source == base or source.removeprefix(f"{base}-").isdecimal()  # None: not known
        if not is_shard:
            problem = f"what moves keys came from {source or 'a client'}, and only shards of {base} send it"
            raise refused(self._immortal_context, type(self).__qualname__, Cause.ARGUMENTS, problem)

    def _send_to_shard(self, shard: int, handler: Any, *arguments: Any) -> None:
        if shard == self.shard:
            handler.function(self, *arguments)
        else:
            self._immortal_context.tasks.fork(self._name_of(shard), handler)(*arguments)

    def _start_detour(self, ranges: list[int], via: int) -> None:
        """Send messages for ``ranges`` through ``via``, until all that went there have arrived at the owner."""
        assert self.moves is not None
        self.moves.fence += 1
        self.moves.detours.update(dict.fromkeys(ranges, (via, self.moves.fence)))
        self._send_to_shard(via, Moving.immortal_fence, self.shard, self.moves.fence, ranges)

    @rpc
    def immortal_fence(self, origin: int, fence: int, ranges: list[int]) -> None:
        """Forward a fence to the owners by the ways of the calls before it; they send it back to ``origin``."""
        self._require_shard_as_sender()
        for shard, some in _grouped(ranges, self.next_shard).items():
            if shard is None:
                self._send_to_shard(origin, Moving.immortal_fence_returned, fence, some)
            else:
                self._send_to_shard(shard, Moving.immortal_fence, origin, fence, some)

    @rpc
    def immortal_fence_returned(self, fence: int, ranges: list[int]) -> None:
        """End the detours of ``ranges`` on which no call followed this fence."""
        self._require_shard_as_sender()
        assert self.moves is not None
        for number in ranges:
            if self.moves.detours.get(number, (0, 0))[1] == fence:
                del self.moves.detours[number]

    # --- moves --------------------------------------------------------------------------------------------------------

    @rpc
    def immortal_begin(self, before: int, count: int) -> int:
        """Prepare for another number of shards: from here on calls of other ranges are forwarded, not refused.

        Return the version of the class; 0: not yet, since calls still take detours after an earlier move. A range that
        moved now would get calls by two ways, in a wrong order."""
        if (moves := self.moves) is None:
            name = self._immortal_context.instance_name
            self.shard = 0 if self.shards == 1 else self.shard
            moves = self.moves = Moves(self.shards)
            if name != self._name_of(self.shard):
                raise UsageError(f"shard {self.shard} is called {name!r}: its keys move if it is NAME-{self.shard}")
        if moves.count != count:
            moves.count = before  # a shard that had no ranges in later moves must learn the owners
            if not Moving.immortal_settle.function(self):  # type: ignore[attr-defined]
                raise UsageError(f"shard {self.shard} has other ranges than it has as one of {before} shards")
            if moves.detours:
                return 0
            moves.count = count
        return self._version

    @rpc
    def immortal_index(self, after: str | int | None, keys_max: int) -> str | int | None:
        """Index some keys from ``after`` on by their ranges, so that no give has to do that for all of them at once.

        Return the last of these; None: there are no more. This depends on the rows alone, since no index is kept in
        checkpoints: after a recovery the next give makes a new one."""
        if after is None:
            self.rows_by_range, self.indexed_to = {}, None
        some = list(islice(self.keys.keys(after), keys_max))
        last = some[-1] if len(some) == keys_max else None
        if after == self.indexed_to:
            for key in some:
                self.note_key(key)
            self.indexed_to = last
        return last

    @property
    def _version(self) -> int:
        version: int = self._immortal_definition.version
        return version

    @rpc
    def immortal_give(self, version: int, ranges_max: int, rows_max: int, size_bytes_max: int) -> tuple[int, list[str]]:
        """Give some ranges to their new shards; return how many are left, and the handlers for which others wait.

        The limits can be exceeded by the last range, whose rows come in parts of ``size_bytes_max``. ``version``: of
        the class in all shards when the move began: a shard that was upgraded since must not give to older ones."""
        moves, events = self.moves, self._immortal_context.tasks.events
        assert moves is not None
        if version != self._version and self._leaving():
            return 0, [f"the upgrade of all shards to version {self._version}"]
        leaving, waiting, signals = self._leaving(), self._waiting(), _grouped(events.kept, _range_of_event)
        free = [number for number in leaving if number not in waiting and number not in moves.detours]
        if free and (self.rows_by_range is None or self.indexed_to is not None):
            Moving.immortal_index.function(self, None, len(self.keys) + 1)  # type: ignore[attr-defined]
        parcels: dict[int, Parcel] = {}
        rows_count = size_bytes = 0
        is_full = False
        for number in free[:ranges_max]:
            to = moves.owners[number] = leaving.pop(number)
            for key in sorted(self.rows_by_range.pop(number, ())):
                parcel = parcels.setdefault(to, Parcel())
                if (data := self.keys.pop_raw(key)) is not None:  # else it was forgotten
                    parcel.rows.append((key, data))
                    rows_count, size_bytes = rows_count + 1, size_bytes + len(data)
                if size_bytes >= size_bytes_max:
                    self._send_parcel(to, parcels.pop(to))
                    size_bytes, is_full = 0, True
            parcel = parcels.setdefault(to, Parcel())
            parcel.ranges.append(number)
            parcel.signals.update({name: events.take(name) for name in signals.get(number, ())})
            if is_full or rows_count >= rows_max:
                break
        for to, parcel in parcels.items():
            self._send_parcel(to, parcel)
        held = [waiting[number] for number in leaving if number in waiting]
        return len(leaving) - len(held), held[:WAITING_SHOWN_MAX]

    def _send_parcel(self, to: int, parcel: Parcel) -> None:
        self._send_to_shard(
            to, Moving.immortal_receive, self.shard, self._version, parcel.ranges, parcel.rows, parcel.signals
        )

    @rpc
    def immortal_receive(
        self,
        source: int,
        version: int,
        ranges: list[int],
        rows: list[tuple[str | int, bytes]],
        signals: dict[str, list[bytes]],
    ) -> None:
        """Receive rows, and ``ranges`` that are complete with them, from the shard ``source``."""
        self._require_shard_as_sender()
        newer = [one for one in self._immortal_definition.chain if one.version > version]
        for key, data in rows:
            if newer:
                one = newer[-1].upgrades.state().tables["keys"].decode(data)
                for definition in reversed(newer):
                    one = definition.objects.cls.upgrade(one)
                self.keys.settle(key, one)
            else:
                self.keys.put_raw(key, data)
            self.note_key(key)
        for name, values in signals.items():
            self._immortal_context.tasks.events.put(name, values)
        if ranges:
            assert self.moves is not None
            self.moves.owners.update(dict.fromkeys(ranges, self.shard))
            self._start_detour(ranges, source)

    @rpc
    def immortal_settle(self) -> bool:
        """Learn the new owners of all ranges, if this shard has all of its own, and no others; else return False."""
        moves = self.moves
        assert moves is not None
        before, after = self._owners(), blocks(moves.count)
        changed = [number for number, to in enumerate(after) if to != before[number]]
        if any(self.shard in (before[number], after[number]) for number in changed):
            return False
        self.shards, self.rows_by_range = moves.count, None
        moves.owners.clear()
        direct = [number for number in changed if number not in moves.detours]
        for via, ranges in _grouped(direct, before.__getitem__).items():
            self._start_detour(ranges, via)
        return True

    @query
    def immortal_shard(self) -> dict[str, int | list[str]]:
        """Describe this shard for people and scripts."""
        found: dict[str, int | list[str]] = {"shard": self.shard, "shards": self.shards, "keys": len(self.keys)}
        found["ranges"] = self._owners().count(self.shard if self.moves or self.shards > 1 else 0)
        if (moves := self.moves) is not None:
            waiting, leaving = self._waiting(), self._leaving()
            found |= {"count": moves.count, "leaving": len(leaving), "forwarded": len(moves.relays)}
            found |= {"detours": len(moves.detours), "waiting": [waiting[one] for one in leaving if one in waiting]}
        return found

    def _owners(self) -> list[int]:
        """Return the shard of each range, as far as this shard knows."""
        found = list(blocks(self.shards))
        for number, to in () if self.moves is None else self.moves.owners.items():
            found[number] = to
        return found

    def _leaving(self) -> dict[int, int]:
        """Return the new shards of the ranges that this shard has and must give."""
        assert self.moves is not None
        planned = blocks(self.moves.count)
        mine = [number for number, owner in enumerate(self._owners()) if owner == self.shard]
        return {number: planned[number] for number in mine if planned[number] != self.shard}

    def _waiting(self) -> dict[int, str]:
        """Return the ranges that stay because handlers of their keys wait, each with the text of one handler."""
        tasks, definition = self._immortal_context.tasks, self._immortal_definition
        found = {}
        for one in chain(tasks.all_waiting, tasks.limits.queued.values()):
            handler = definition.by_method_id[one.handler.method_id if hasattr(one, "handler") else one.method_id]
            key = definition.codec(handler).decode(one.arguments)[0]
            found[range_of(key)] = f"{handler.name} of {key!r}"
        return found

    def note_key(self, key: Any) -> None:
        """Note the key of a new row."""
        if self.rows_by_range is not None:
            self.rows_by_range.setdefault(range_of(key), set()).add(key)


HANDLERS: list[Handler[Any, Any]] = [one for one in vars(Moving).values() if isinstance(one, Handler)]


def _grouped(items: Iterable[Any], group_of: Any) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for one in items:
        found.setdefault(group_of(one), []).append(one)
    return found


def _range_of_event(name: str) -> int:
    """Return the range of the key in the full name of an event, see :func:`immortal.event`; -1: it has none."""
    key = _EVENT_OF_KEY.match(name)
    return -1 if key is None else range_of(ast.literal_eval(key[1]))


def shard_numbers(count: int) -> list[int]:
    return [0] if count == 1 else list(range(1, count + 1))


def change_count(
    call: Callable[..., Any], start: Callable[[], object], pause: Callable[[], bool], before: int, count: int
) -> list[str]:
    """Move all ranges from ``before`` shards to ``count``; return the handlers for which some still wait.

    ``call(shard, handler, *arguments)`` calls a handler of a shard. ``start`` starts the new shards. ``pause`` waits
    for a moment, or returns False: then the rest stays for the next call of this function. Raises UsageError."""

    def begin(shards: Iterable[int]) -> set[int]:
        while not all(versions := {call(shard, Moving.immortal_begin, before, count) for shard in shards}):
            if not pause():
                raise UsageError("calls of an earlier move are still on their way: try again later")
        return versions

    begin(shard_numbers(before))
    start()
    shards = sorted({*shard_numbers(before), *shard_numbers(count)})
    if len(versions := begin(shards)) > 1:
        raise UsageError(f"the shards have the versions {sorted(versions)}: upgrade all of them first")
    for shard in shards:
        after = None
        while (after := call(shard, Moving.immortal_index, after, INDEXED_MAX)) is not None:
            pass
    while True:
        given = [call(shard, Moving.immortal_give, *versions, *GIVE_LIMITS) for shard in shards]
        waiting = [text for _, texts in given for text in texts]
        if not any(left for left, _ in given):
            settled = not waiting and all(call(shard, Moving.immortal_settle) for shard in shards)
            if settled or not pause():
                return waiting
