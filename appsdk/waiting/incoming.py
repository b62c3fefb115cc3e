"""What comes for calls that wait: their answers, or the word that whoever was called has been expelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from msgspec.structs import astuple

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.failures import encode_failed, reference, refused
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.types.handles import MARK
from immortal.appsdk.waiting.host import Host
from immortal.appsdk.waiting.operations import NOTHING, MulticastCall
from immortal.protocol import decoding
from immortal.protocol.messages import RpcKind
from immortal.protocol.verdicts import Cause, Verdict

WHAT = "an answer"


class _ReturnedValue(msgspec.Struct, array_like=True, gc=False):
    number: int  # of the call
    value: msgspec.Raw


class _ReturnedNothing(msgspec.Struct, array_like=True, gc=False):
    number: int


_take_call_number = decoding.Decoder(list[msgspec.Raw]).decode
_RETURNED_VALUE, _RETURNED_NOTHING, _RAISED = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED
# ... found faster than an enum's attributes
_decode_value = decoding.Decoder(_ReturnedValue).decode
_decode_nothing = decoding.Decoder(_ReturnedNothing).decode


class Incoming:
    """Those of one instance. ``failed``: what comes in place of all that is waited for, encoded; None: what it is."""

    def __init__(self, tasks: Host) -> None:
        self.failed: bytes | None = None
        self._tasks = tasks
        self._calls = tasks.calls
        self._context = tasks.context

    @contextmanager
    def failing(self, verdict: Verdict) -> Iterator[None]:
        """Whoever is woken meanwhile finds that what it waited for has failed, as ``verdict`` says."""
        where = reference(self._context.instance_name, verdict.sequence_id, verdict.message_index)
        self.failed = encode_failed(verdict.type_name or verdict.kind.name.capitalize(), verdict.text, where)
        try:
            yield
        finally:
            self.failed = None

    def answered(self, kind: RpcKind, data: bytes) -> None:
        """An answer has come. One that nobody waits for any more is left alone. Raises HandlerError."""
        context = self._context
        try:
            if kind is _RETURNED_VALUE:
                returned = _decode_value(data)
                number, value = returned.number, bytes(returned.value)
            elif kind is _RETURNED_NOTHING:
                number, value = _decode_nothing(data).number, NOTHING
            else:
                number_raw, *rest = _take_call_number(data)
                number, value = decoding.decode(number_raw, type=int), encoder.encode(rest)
        except (ValueError, IndexError) as error:
            raise refused(context, WHAT, Cause.UNUSABLE, f"an answer that can't be read: {error}") from None
        if (call := self._calls.get(number)) is not None:
            if context.source and not call.went_to(context.source):  # what the instance says itself is true
                if self.failed is None:
                    text = f"an answer of {context.source!r} to call {number}, which went to somebody else"
                    raise refused(context, WHAT, Cause.SENDER, text)
                return
            if (kind is _RAISED or call.result_may_hold_handles) and MARK in data and self.failed is None:
                context.nodes.accounts.arrived(data)
            self._tasks.resolve(call, kind is _RAISED, value)
            self._tasks.drain()
        elif MARK in data and self.failed is None:
            context.nodes.accounts.not_taken(data)

    def expelled(self, scope: Scope, member: str, source: str, value: bytes) -> None:
        """``member`` has been expelled, says ``source``, another member, behind all of its answers before that: who
        waits for the answer of ``member`` to a call of a multicast gets ``value`` in its place. What ``source`` has not
        answered was cancelled, and has ``value`` as all of its answers."""
        done: set[int] = set()
        for call in list(self._calls.values()):
            if not isinstance(call, MulticastCall) or call.scope is None or not call.scope.reaches(*astuple(scope)):
                continue
            of = {one.to: one for one in call.all_of_it}
            if member not in of or call.number in done:
                continue
            is_cancelled = source not in of or of[source].number in self._calls
            ended = of.values() if is_cancelled else [of[member]]
            for one in ended:
                if self._calls.get(one.number) is one:
                    done.add(one.number)
                    self._tasks.later(partial(self._tasks.resolve, one, False, value))

    def whom(self, number: int) -> str | None:
        """The open call of that number went there."""
        call = self._calls.get(number)
        return None if call is None else call.target.destination
