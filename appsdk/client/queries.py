"""Queries of one client, without I/O: each is asked until it is answered or withdrawn.

A query changes nothing and is in no log, so to ask twice does no harm, and no number must be kept for it. Where the
instance takes none beside its log (an earlier version), it is made as a logged call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from immortal.appsdk.client.errors import ClientError
from immortal.appsdk.client.limits import BUSY_S, QUERIES_SENT_MAX, QUERY_POLL_S
from immortal.appsdk.client.session import Call, refused
from immortal.protocol.client_frames import ClientCode, ClientFrame, ClientFrameType, decode_replies, encode_request

_LATER = frozenset({ClientCode.NOT_READY, ClientCode.BUSY})
"""Why a query is asked again by itself."""


class Queries:
    """Table of open queries. ``log``: makes a call of a query, for an instance that can't answer beside the log."""

    def __init__(self, instance: str, log: Callable[[Call], None]) -> None:
        self.problem = ""  # why the last one was not answered yet
        self._instance = instance
        self._log = log
        self._are_logged = False  # its coordinator knows no others
        self._number = 0
        self._waiting: dict[int, Call] = {}  # by number; not sent
        self._sent: dict[int, Call] = {}
        self._due_s: dict[int, float] = {}  # of those that were sent: when again

    def add(self, call: Call) -> None:
        if self._are_logged:
            self._log(call)
        else:
            self._number += 1
            self._waiting[self._number] = call

    def withdraw(self, call: Call) -> None:
        """Forget a query that no caller waits for any more."""
        for calls in (self._waiting, self._sent):
            for number in [number for number, one in calls.items() if one is call]:
                del calls[number]
                self._due_s.pop(number, None)

    def greeted(self) -> None:
        """Ask anew all that was sent: the coordinator may be another one."""
        self._are_logged = False
        self._due_s = dict.fromkeys(self._sent, 0.0)

    def close(self, error: ClientError) -> None:
        calls = [*self._sent.values(), *self._waiting.values()]
        self._waiting, self._sent, self._due_s = {}, {}, {}
        for call in calls:
            call.finish(error)

    @property
    def due_s(self) -> float | None:
        """Time at which :meth:`frames` has a query to ask again; None: it has none."""
        return min(self._due_s.values(), default=None)

    # --- out ---------------------------------------------------------------------------------------------------------

    def frames(self, client_id: str, resolve: Callable[[Call], bool], now_s: float) -> Iterator[ClientFrame]:
        """Yield the frames of queries that are due. ``resolve``: as in
        :meth:`immortal.appsdk.client.session.Session.requests`.
        """
        for number in [number for number, due_s in self._due_s.items() if now_s >= due_s]:
            yield self._frame(client_id, number, now_s)
        for number, call in list(self._waiting.items()):
            if len(self._sent) >= QUERIES_SENT_MAX:
                return
            if call.outcome is None and not resolve(call) and call.outcome is None:
                continue
            del self._waiting[number]
            if call.outcome is None:
                call.message = encode_request(int(call.method), call.arguments)
                self._sent[number] = call
                yield self._frame(client_id, number, now_s)

    def _frame(self, client_id: str, number: int, now_s: float) -> ClientFrame:
        self._due_s[number] = now_s + QUERY_POLL_S
        message = self._sent[number].message
        return ClientFrame(ClientFrameType.QUERY, client_id, self._instance, number=number, count=1, payload=message)

    # --- in ----------------------------------------------------------------------------------------------------------

    def received(self, frame: ClientFrame, now_s: float) -> bool:
        """Process a frame; False: it is not about queries. Raises RemoteProtocolError."""
        if frame.frame_type is ClientFrameType.ANSWER:
            (reply,) = decode_replies(frame.payload, 1)
            self.problem = ""
            call = self._take(frame.number)
            if call is not None:
                call.finish(reply)
            return True
        if frame.frame_type is not ClientFrameType.REFUSED:
            return False
        if frame.number:
            self._refused(frame, now_s)
            return True
        if frame.code == ClientCode.UNKNOWN and self._sent:  # the only frames that an earlier version does not know
            self._are_logged = True
            sent, self._waiting = {**self._sent, **self._waiting}, {}
            self._sent, self._due_s = {}, {}
            for call in sent.values():
                self._log(call)
            return True
        return False

    def _refused(self, frame: ClientFrame, now_s: float) -> None:
        if frame.number not in self._sent:
            return
        self.problem = frame.reason
        if frame.code in _LATER:
            self._due_s[frame.number] = now_s + BUSY_S
            return
        call = self._take(frame.number)
        if call is None:
            return
        if frame.code == ClientCode.LOGGED_ONLY:
            self._log(call)
        else:
            call.finish(refused(frame.reason))

    def _take(self, number: int) -> Call | None:
        self._due_s.pop(number, None)
        return self._sent.pop(number, None)
