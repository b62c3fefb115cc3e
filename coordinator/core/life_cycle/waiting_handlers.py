"""Waiting handlers: an operator's questions about them go to the app, orders to them go into the log.

An order is an impulse of the instance to itself. It is answered once the app has obeyed it: after the record that holds
it, the app is asked what came of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import OperatorAnswered
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.input.back_pressure import Impulses
from immortal.coordinator.core.interfaces import AuditEntry, Token
from immortal.coordinator.core.life_cycle.session import WORKS
from immortal.coordinator.core.state import CoreState
from immortal.protocol.messages import MessageType
from immortal.protocol.readers import Message
from immortal.protocol.system_methods import (
    HandlersQuestion,
    decode_handlers_answer,
    encode_handlers_question,
    encode_order,
)

OPEN_MAX = 64  # questions and orders that are not answered: an app that is busy for long is asked no more


@dataclass(slots=True, eq=False, repr=False)
class _Ordered:
    """An order in the log."""

    token: Token
    sequence_id: int
    message_index: int


@dataclass(slots=True, eq=False, repr=False)
class WaitingHandlers:
    """Questions and orders about handlers that wait."""

    state: CoreState
    impulses: Impulses
    _ticket: int = 0
    _asked: dict[int, tuple[Token, _Ordered | None]] = field(default_factory=dict)  # by ticket
    _ordered: deque[_Ordered] = field(default_factory=deque)  # what they have come to is not asked yet

    @property
    def has_work(self) -> bool:
        """True if an order's result is still to be asked for: :meth:`advance` may do something."""
        return bool(self._ordered)

    def ask(self, event: ev.HandlersAsked) -> None:
        if problem := self._problem():
            self._answer(event.token, {"refused": problem})
        else:
            self._send(event.token, None, event.task, event.retries)

    def order(self, event: ev.HandlerOrdered) -> None:
        problem = self._problem() or self.state.log_capacity.full or self._paused()
        if problem:
            self._answer(event.token, {"refused": problem})
            return
        order = event.order
        group = self.impulses.log_own(1, encode_order(order))
        index = sum([batch.count for batch in group.batches[:-1]])
        group.transaction.audit.append(AuditEntry(self.state.now_ns, order.who, order.in_words()))
        self._ordered.append(_Ordered(event.token, self.state.log.open_sequence_id, index))

    def _problem(self) -> str:
        name, session = self.state.name, self.state.session
        if session.phase not in WORKS:
            return (
                f"the app of {name!r} does not work now (phase: {session.phase.value}), and only it knows what "
                f"its handlers wait for: try again once it does"
            )
        if MessageType.HANDLERS_ASKED not in session.extensions:
            return f"the app of {name!r} has an SDK that does not tell of its handlers: restart it with this one"
        if len(self._asked) + len(self._ordered) >= OPEN_MAX:
            return f"the app of {name!r} has not answered {OPEN_MAX} questions yet: it is busy"
        return ""

    def _paused(self) -> str:
        """Return why an order must wait for somebody to resume; "" if it need not."""
        name, pause = self.state.name, self.state.pause
        if not pause.is_paused:
            return ""
        return f"{name!r} is paused by {pause.by}, and its handlers get no order until 'immortal resume {name}'"

    def advance(self) -> None:
        """Ask the app about the orders whose records it has been given."""
        while self._ordered and self._ordered[0].sequence_id <= self.state.session.fed_sequence_id:
            one = self._ordered.popleft()
            self._send(one.token, one)

    def _send(self, token: Token, ordered: _Ordered | None, task: int = 0, retries: bool = False) -> None:
        self._ticket += 1
        self._asked[self._ticket] = token, ordered
        place = (-1, 0) if ordered is None else (ordered.sequence_id, ordered.message_index)
        question = HandlersQuestion(self._ticket, task, *place, retries)
        self.state.outbox.send_control(MessageType.HANDLERS_ASKED, encode_handlers_question(question))

    def answered(self, message: Message) -> None:
        """Pass the app's answer on to the operator. Raises RemoteProtocolError."""
        answer = decode_handlers_answer(message.data)
        asked = self._asked.pop(answer.ticket, None)
        if asked is None:
            raise AppProtocolError(
                f"the app sent Handlers (92) for the question {answer.ticket}, which it was not asked, or has answered"
            )
        token, ordered = asked
        place = {} if ordered is None else {"record": ordered.sequence_id, "message": ordered.message_index}
        self._answer(token, {**answer.value, **place})

    def app_lost(self) -> None:
        """Answer all operators, since the app is gone. Orders in the log are obeyed by its successor."""
        asked, ordered = self._asked, self._ordered
        self._asked, self._ordered = {}, deque()
        for token, one in asked.values():
            if one is None:
                self._answer(token, {"refused": "the app has ended before it could answer: try again"})
            else:
                ordered.append(one)
        for one in ordered:
            text = (
                f"the order is in the log, as record {one.sequence_id}, or about to be, and the app has ended before "
                f"it said what that came to: the next one obeys it ('immortal handlers {self.state.name}')"
            )
            self._answer(
                one.token, {"done": None, "text": text, "record": one.sequence_id, "message": one.message_index}
            )

    def _answer(self, token: Token, answer: Mapping[str, object]) -> None:
        self.state.effects.append(OperatorAnswered(token, answer))
