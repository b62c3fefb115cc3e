"""Calls that are sent for somebody who waits, and the answers to those who wait here.

A call that waits for an answer has the RPC type ASYNC, and [caller's name ("" is oneself), number of the call,
arguments ...] as its arguments. The answer goes to the caller with the same method ID: RETURNED_VALUE [number, value],
RETURNED_NOTHING [number] or RAISED [number, name of the exception, its arguments, its attributes].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import answer_of
from immortal.appsdk.calls.outbox import Send, encode_call, make_writer
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.multicast import common_method_id
from immortal.appsdk.waiting.operations import NOTHING, Call, MulticastCall
from immortal.protocol import decoding
from immortal.protocol.client import CLIENTS, Caller
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.verdicts import Verdict

_RETURNED_VALUE, _RETURNED_NOTHING = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING
# ... found faster than an enum's attributes


class Answers:
    """Those of one instance, and its calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._senders: dict[tuple[str, int, RpcKind], Send] = {}

    def send_call(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Raises UsageError."""
        target = call.target
        caller = self._context.instance_name if target.destination else ""
        if target.destination and not caller:
            raise UsageError(
                f"{call}: the log does not say what this instance is called, so the answer could not come back: a log "
                f"that an older version of the coordinator has begun; start the instance with a new log"
            )
        if (send := target.send) is None:
            send = target.send = self._sender(target.destination, target.handler, RpcKind.CALL)
        send((caller, call.number, *target.wrapped(arguments)))

    def send_multicast(self, calls: Sequence[MulticastCall]) -> None:
        """Once all ``calls`` have begun. Raises UsageError."""
        if any(call.sent is None for call in calls):
            return
        handler, own_name = calls[0].target.handler, self._context.instance_name
        name = handler.function.__qualname__
        messages = []
        for call in calls:
            parameters, method_id = handler.signature.parameters, call.target.method_id
            write = make_writer(name, method_id, RpcType.ASYNC, parameters=parameters, context=self._context)
            front = "" if call.to == own_name else own_name, call.number
            messages.append(encode_call(write, (*front, *call.target.wrapped(call.sent or ()))))
        method_id = common_method_id(call.target.method_id for call in calls)
        self._context.multicasts.send(name, method_id, [call.to for call in calls], messages, calls[0].scope)

    def _sender(self, destination: str, handler: Handler[Any, Any], kind: RpcKind) -> Send:
        key = (destination, handler.method_id, kind)
        if (send := self._senders.get(key)) is None:
            outbox, name = self._context.outbox, handler.function.__qualname__
            parameters = ("$caller", "$call", *handler.signature.parameters) if kind == RpcKind.CALL else ()
            made: Send = outbox.make_sender(destination, name, handler.method_id, kind, parameters)
            send = self._senders[key] = made
        return send

    def answer(self, handler: Handler[Any, Any], caller: str, number: int, raised: bool, value: bytes) -> None:
        to, front = self.addressed(caller, number)
        if raised:
            name, arguments, attributes = decoding.decode(value, type=list[msgspec.Raw])
            self._sender(to, handler, RpcKind.RAISED)((*front, name, arguments, attributes))
        elif value == NOTHING:
            self._sender(to, handler, _RETURNED_NOTHING)(front)
        else:
            self._sender(to, handler, _RETURNED_VALUE)((*front, msgspec.Raw(value)))

    def answer_value(self, caller: Caller, value: bool) -> None:
        """Of a call of a method of the SDK's own."""
        self._send(caller, _RETURNED_VALUE, value)

    def answer_verdict(self, verdict: Verdict, caller: Caller) -> None:
        """Its call has failed: tell ``caller`` how."""
        self._send(caller, RpcKind.RAISED, *answer_of(verdict, self._context.instance_name))

    def _send(self, caller: Caller, kind: RpcKind, *values: Any) -> None:
        to, front = self.addressed(caller.name, caller.number)
        self._context.outbox.make_sender(to, "the answer to a call", caller.method_id, kind)((*front, *values))

    @staticmethod
    def addressed(caller: str, number: int) -> tuple[str, tuple[Any, ...]]:
        """Where an answer goes, and what its arguments begin with: all answers to clients go one way."""
        return (CLIENTS, (caller, number)) if caller.startswith(CLIENTS) else (caller, (number,))
