"""Session of one client ID, without I/O: numbered requests that are sent, retransmitted and answered.

A call gets its number when it is first sent, so that a call that was given up earlier leaves no gap. Sent requests stay
here until they are answered, even if nobody waits: the coordinator takes no later one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from immortal.appsdk.client.errors import CallRefused, ClientError, OutcomeUnknown, ReplyGone
from immortal.protocol.client_frames import (
    ASKED_MAX,
    NUMBER_MAX,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    encode_numbers,
    encode_request,
)

OUTSTANDING_MAX = 4096  # of one client ID, not answered; later calls wait. The instance keeps all their replies
OUTSTANDING_SIZE_BYTES_MAX = 8 << 20
REQUEST_SIZE_BYTES_MAX = 256 << 10  # waiting calls are joined into frames of about this size
REQUEST_COUNT_MAX = 256
# A missing reply is asked for, less and less often: it can have been lost with a connection.
POLL_MIN_S = 0.1
POLL_MAX_S = 1.0
PENDING_MIN_S = 0.005  # about a commit
RESENT_BYTES_PER_S = 4 << 20  # ... an ID or key that others can have: requests are sent again, large ones less often


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call. ``method``: its ID, or its name while that is unknown. Use it under the lock of its connection's owner.

    ``outcome``: a Reply or a ClientError once there is one; then ``done`` is called.
    """

    method: int | str
    arguments: bytes
    done: Callable[[Call], None]
    trace_context: str = ""
    client_id: str = ""
    number: int = 0  # 0: not sent yet
    created_ns: int = 0
    message: bytes = b""
    outcome: Reply | ClientError | None = None
    leader: Call | None = None  # the same request, of which this is a repetition
    followers: list[Call] = field(default_factory=list)

    @property
    def sent(self) -> bool:
        return (self.leader or self).number > 0

    def finish(self, outcome: Reply | ClientError) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.message = b""
            self.done(self)
            for follower in self.followers:
                follower.client_id, follower.number = self.client_id, self.number
                follower.finish(outcome)


REQUEST_ACCEPTED = Reply(1, -1)
"""Reply to a question about a request: the instance has it, and there is no reply yet."""
REQUEST_UNKNOWN = Reply(1, -2)
"""Reply to a question about a request: the instance has no such request."""


class Question(Call):
    """Question about request 1 of a session. Outcome: REQUEST_ACCEPTED, REQUEST_UNKNOWN, or the request's.

    ``starts``: the asker only wants to know that the request was taken.
    """

    __slots__ = ("pongs", "starts")

    def __init__(self, starts: bool, done: Callable[[Call], None]) -> None:
        super().__init__(0, b"", done)
        self.starts = starts
        self.pongs = 1


class Session:
    """Numbered requests of one client ID. ``keeps_replies``: the coordinator is never told to release a reply.

    ``renew``: returns another client ID, if the numbers of this one have become invalid; None: the ID is the user's.
    """

    def __init__(
        self, client_id: str, instance: str, *, keeps_replies: bool, renew: Callable[[], str] | None = None
    ) -> None:
        self.client_id = client_id
        self.keeps_replies = keeps_replies
        self.error: ClientError | None = None  # why no call is possible any more
        self.poll_due_s: float | None = None
        self.resend_due_s: float | None = None
        self.resend_after = 0
        self._instance = instance
        self._renew = renew
        self.waiting: deque[Call] = deque()  # not sent yet
        self.outstanding: dict[int, Call] = {}  # by number, in order
        self._outstanding_bytes = 0
        self._next_number = 1
        self._answered = 0  # the highest number that was ever answered
        self._poll_s = POLL_MIN_S
        self._pending_s = PENDING_MIN_S
        self._questions: list[Question] = []
        self._second: Call | None = None  # the request about request 1
        self._pings_count = 0  # pings without a PONG yet
        self._pinged = 0  # the last number before the last ping; 0: missing requests are being sent again

    def add(self, call: Call) -> None:
        if self.error is not None:
            call.finish(self.error)
        else:
            self.waiting.append(call)

    @property
    def first(self) -> Call | None:
        """Request 1, if this process has it."""
        return self.outstanding.get(1) or (self.waiting[0] if self.waiting and self._next_number == 1 else None)

    def follow(self, call: Call, first: Call) -> None:
        """Give ``call`` the reply of ``first``, and combine what the two know about the request."""
        if not first.method:
            first.method = call.method
        if not (first.arguments or first.message):
            first.arguments = call.arguments
        call.leader = first
        first.followers.append(call)

    def attach(self, call: Call, number: int) -> None:
        """Give ``call`` the reply of request ``number``, which was sent, possibly by another process."""
        if self.error is not None:
            call.finish(self.error)
            return
        call.client_id, call.number = self.client_id, number
        if (there := self.outstanding.get(number)) is not None:
            call.leader = there
            there.followers.append(call)
            return
        self.outstanding = dict(sorted({**self.outstanding, number: call}.items()))
        self._next_number = max(self._next_number, number + 1)
        self.poll_due_s = 0.0

    def add_second(self, call: Call) -> None:
        """Add request 2, about request 1, which was sent, possibly by another process."""
        if self._second is not None and self._second.outcome is None:
            call.leader = self._second
            self._second.followers.append(call)
            return
        if self._next_number > 2:
            self.attach(call, 2)
            return
        self._second = call
        if not self.waiting:  # else that is the first
            self.attach(Call(0, b"", lambda call: None), 1)
        self.add(call)

    def ask_status(self, question: Question) -> None:
        if self.error is not None:
            question.finish(self.error)
            return
        if not self.waiting:
            self.attach(Call(0, b"", lambda call: None), 1)
        question.leader = self.outstanding.get(1) or self.waiting[0]
        question.leader.followers.append(question)
        if not question.starts:
            # Earlier PONGs can be in flight. And a reply that is asked for comes after the PONG, so it is here by the
            # second one.
            question.pongs = self._pings_count + 2
        self._questions.append(question)
        self.poll_due_s = 0.0

    @property
    def was_sent(self) -> bool:
        """True if request 1 was sent, possibly by another process."""
        return self._next_number > 1

    def ponged(self, accepted: int, now_s: float, *, is_pending: bool) -> None:
        """Process a pong: the coordinator has the requests up to ``accepted``. ``is_pending``: a crash can undo it."""
        self._pings_count = max(0, self._pings_count - 1)
        first = self.outstanding.get(1)
        is_unknown = accepted == 0 and first is not None and not first.message
        questions = [question for question in self._questions if question.outcome is None]
        self._questions = []
        for question in questions:
            question.pongs -= accepted > 0 and not (is_pending and question.starts)
            if is_unknown:
                question.finish(REQUEST_UNKNOWN)
            elif question.pongs <= 0:
                question.finish(REQUEST_ACCEPTED)
            else:
                self._questions.append(question)
        if is_unknown:
            self.fail(
                OutcomeUnknown(
                    f"{self._instance!r} has no request of {self.client_id!r}: it was never sent, or is not known any "
                    f"more"
                )
            )
        elif self._questions and accepted > 0:
            self.poll_due_s = now_s + self._pending_s if is_pending else 0.0
            self._pending_s = min(self._pending_s * 2, POLL_MAX_S) if is_pending else PENDING_MIN_S

    def withdraw(self, call: Call) -> bool:
        """Forget ``call`` if it was not sent yet; return True if so."""
        if call.sent or call.followers:
            return False
        leader = call.leader
        if leader is not None and call in leader.followers:
            leader.followers.remove(call)
        if isinstance(call, Question) and call.starts and leader is not None and leader in self.waiting:
            self.withdraw(leader)
        if call in self.waiting:
            self.waiting.remove(call)
        return True

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.outstanding)

    # --- output ------------------------------------------------------------------------------------------------------

    def unresolved(self) -> Iterator[Call]:
        """Yield the calls that were sent, possibly by another process, and whose method is known only by name."""
        return (call for call in self.outstanding.values() if isinstance(call.method, str))

    def requests(self, resolve: Callable[[Call], bool], created_ns: int, now_s: float) -> Iterator[ClientFrame]:
        """Yield new calls, as many as can be sent now.

        ``resolve``: gives a call its method's ID; returns False if that is unknown, or the call has ended."""
        while self.waiting and len(self.outstanding) < OUTSTANDING_MAX:
            first = self._next_number
            batch: list[Call] = []
            size_bytes = 0
            while (
                self.waiting
                and len(batch) < REQUEST_COUNT_MAX
                and size_bytes < REQUEST_SIZE_BYTES_MAX
                and self._outstanding_bytes < OUTSTANDING_SIZE_BYTES_MAX
            ):
                call = self.waiting[0]
                if call.outcome is None and not resolve(call) and call.outcome is None:
                    break
                if call.outcome is not None:
                    self.waiting.popleft()
                    continue
                message = encode_request(int(call.method), call.arguments)
                if batch and (
                    size_bytes + len(message) > REQUEST_SIZE_BYTES_MAX or call.trace_context != batch[0].trace_context
                ):
                    break
                self.waiting.popleft()
                call.message, call.arguments = message, b""
                call.client_id, call.number, call.created_ns = self.client_id, self._next_number, created_ns
                self._next_number += 1
                self.outstanding[call.number] = call
                self._outstanding_bytes += len(message)
                size_bytes += len(message)
                batch.append(call)
            if not batch:
                return
            if self.poll_due_s is None:
                self._poll_s = POLL_MIN_S
                self.poll_due_s = now_s + self._poll_s
            yield self._request(first, batch)

    def _request(self, first: int, calls: list[Call]) -> ClientFrame:
        return ClientFrame(
            ClientFrameType.REQUEST,
            self.client_id,
            self._instance,
            number=first,
            acknowledged=self._acknowledged(),
            count=len(calls),
            time_ns=calls[0].created_ns,
            payload=b"".join([call.message for call in calls]),
            reason=calls[0].trace_context,
        )

    def _acknowledged(self) -> int:
        if self.keeps_replies:
            return 0
        return next(iter(self.outstanding), self._next_number) - 1

    def resend_all(self, after: int = 0) -> Iterator[ClientFrame]:
        """Retransmit all outstanding requests with numbers above ``after``: the connection can be another one."""
        self._pings_count = 0
        yield from self._resend(after, NUMBER_MAX)

    def _resend(self, after: int, last: int) -> Iterator[ClientFrame]:
        batch: list[Call] = []
        size_bytes = 0
        for number, call in list(self.outstanding.items()):
            if not after < number <= last or not call.message:
                continue
            if batch and (
                number != batch[-1].number + 1
                or call.trace_context != batch[0].trace_context
                or len(batch) >= REQUEST_COUNT_MAX
                or size_bytes + len(call.message) > REQUEST_SIZE_BYTES_MAX
            ):
                yield self._request(batch[0].number, batch)
                batch, size_bytes = [], 0
            batch.append(call)
            size_bytes += len(call.message)
        if batch:
            yield self._request(batch[0].number, batch)

    def polls(self, created_ns: int, now_s: float) -> Iterator[ClientFrame]:
        """Poll for outstanding replies, after a pause that grows.

        Others can have used this ID. A question by number alone could then return the reply to a call of theirs, if
        this request was lost on its way. So all requests that can be sent again are.
        """
        if self.keeps_replies:
            last = self._pinged
            for call in self.outstanding.values():
                if call.arguments and isinstance(call.method, int):  # the request of a key that was sent before
                    call.message, call.arguments = encode_request(call.method, call.arguments), b""
                    call.created_ns, last = created_ns, max(last, call.number)
                    self._outstanding_bytes += len(call.message)
            yield from self._resend(0, last)
        yield self.ping(now_s)

    def ping(self, now_s: float) -> ClientFrame:
        """Return the ping of :meth:`polls`, which is no request."""
        self._poll_s = min(self._poll_s * 2, POLL_MAX_S)
        resent_s = self._outstanding_bytes / RESENT_BYTES_PER_S if self.keeps_replies else 0.0
        self.poll_due_s = now_s + self._poll_s + resent_s if self.outstanding else None
        self._pinged = self._next_number - 1
        self._pings_count += 1
        unknown = (number for number, call in self.outstanding.items() if not (self.keeps_replies and call.message))
        asked = list(islice(unknown, ASKED_MAX))
        method = self.outstanding[asked[0]].method if self.keeps_replies and len(asked) == 1 else 0
        if isinstance(method, str):  # it is unknown whether the request calls that method
            asked = []
        return ClientFrame(
            ClientFrameType.PING,
            self.client_id,
            self._instance,
            acknowledged=self._acknowledged(),
            count=len(asked),
            payload=encode_numbers(asked),
            reason=str(method) if isinstance(method, int) and method > 0 else "",
        )

    # --- input -------------------------------------------------------------------------------------------------------

    def replied(self, reply: Reply) -> None:
        call = self.outstanding.pop(reply.number, None)
        if call is None:
            return  # a second copy
        self._outstanding_bytes -= len(call.message)
        self._answered = max(self._answered, reply.number)
        self._poll_s = POLL_MIN_S
        if not self.outstanding:
            self.poll_due_s = None
        if reply.kind == ReplyKind.GONE:
            call.finish(
                ReplyGone(
                    f"request {reply.number} of client {self.client_id!r} to {self._instance!r} was done, and its "
                    f"reply is not kept any more"
                )
            )
        elif reply.kind == ReplyKind.LOST:
            call.finish(
                OutcomeUnknown(
                    f"whether request {reply.number} of client {self.client_id!r} to {self._instance!r} was done is "
                    f"not known: the log was cut by hand since"
                )
            )
        else:
            call.finish(reply)

    def is_behind(self, accepted: int) -> bool:
        """Return True if the coordinator has fewer requests (up to ``accepted``) than were sent before it was asked."""
        if accepted >= self._pinged:
            return False
        self._pinged = 0
        return True

    def was_forgotten(self, accepted: int) -> bool:
        return accepted < self._answered

    def restart(self, error: ClientError) -> None:
        """Restart with new numbers: sent calls end with ``error``; others get the new client ID, if there is one."""
        outstanding, self.outstanding = self.outstanding, {}
        self._outstanding_bytes = self._answered = 0
        self._next_number = 1
        self._pinged = 0
        self.poll_due_s = self.resend_due_s = None
        if self._renew is not None:
            self.client_id = self._renew()
        else:
            self.fail(error)
        for call in outstanding.values():
            call.finish(error)

    def refuse_waiting(self, error: ClientError) -> None:
        """End with ``error`` the calls that were not sent; later calls can succeed."""
        waiting, self.waiting = self.waiting, deque()
        for call in waiting:
            call.finish(error)

    def fail(self, error: ClientError) -> None:
        """End all calls, and all later ones, with ``error``."""
        self.error = error
        outstanding, self.outstanding = self.outstanding, {}
        self.poll_due_s = self.resend_due_s = None
        for call in outstanding.values():
            call.finish(error)
        self.refuse_waiting(error)


def refused(reason: str) -> CallRefused:
    return CallRefused(f"the call was refused: {reason}")
