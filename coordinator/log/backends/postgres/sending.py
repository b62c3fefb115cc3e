"""Appends on their way to the server: several at a time on one connection, each a transaction of its own.

What is sent does not wait for the answer to what was sent before (libpq's pipeline mode); answers come in the same
order. An append is done when the server has said so and, behind that, that its transaction is over: until then its
commit may fail, or warn that no standby has it.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import errors, pq

from immortal.coordinator.log.backends.postgres.durability import SETTINGS
from immortal.coordinator.log.backends.postgres.statements import PREPARE, PREPARED, encoded

_ARGUMENTS_COUNT = 16
_BINARY = [pq.Format.BINARY] * _ARGUMENTS_COUNT


class Answer(NamedTuple):
    """What immortal.append says; all but the first where it was not done: how the head is."""

    is_done: bool
    epoch: int = 0
    appends_count: int = 0
    last_sequence_id: int = -1
    holder: str = ""


class Sender:
    """Of ``connection``, which is for other queries whenever all appends are answered.

    Raises psycopg.Error, after which nobody knows what became of those that are not answered. One thread at a time.

    ``looks``: behind each append, in the same round trip, the server's settings are asked for. They may have changed
    since the append was begun, and its commit may not have waited for what it was to wait for.
    """

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], *, looks: bool) -> None:
        connection.execute(PREPARE)
        if looks:
            connection.execute(b"PREPARE immortal_settings AS " + SETTINGS.encode())
        self._connection = connection
        self._looks = looks
        self.settings = ""  # behind the append that was answered last, as durability.SETTINGS has them
        self._pgconn = connection.pgconn
        self._unanswered_count = 0
        self._result: pq.abc.PGresult | None = None  # of what is answered now, as far as it is known
        self._results: list[pq.abc.PGresult | None] = []  # of the oldest append, and of the settings behind it
        self._is_unsent = False  # a part of what was sent: the server reads slowly

    def send(self, arguments: Sequence[object]) -> None:
        """An append, behind all before it. It waits for nothing: see :attr:`events`."""
        pgconn = self._pgconn
        if not self._unanswered_count:
            pgconn.enter_pipeline_mode()
        self._unanswered_count += 1
        pgconn.send_query_prepared(PREPARED, encoded(arguments), _BINARY)
        pgconn.pipeline_sync()
        if self._looks:
            pgconn.send_query_prepared(b"immortal_settings", None)
            pgconn.pipeline_sync()
        self._is_unsent = bool(pgconn.flush())

    def answer(self) -> Answer | None:
        """To the oldest append that is not answered; None: there is nothing yet."""
        pgconn = self._pgconn
        if self._is_unsent:
            self._is_unsent = bool(pgconn.flush())
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:  # no more of what was asked, but for the end of its transaction
                if pgconn.status != pq.ConnStatus.OK:
                    raise psycopg.OperationalError(pgconn.get_error_message())
            elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                self._results.append(self._result)
                self._result = None
                if len(self._results) > self._looks:
                    return self._answered()
            elif self._result is None or result.status == pq.ExecStatus.FATAL_ERROR:
                self._result = result
        return None

    def _answered(self) -> Answer:
        results, self._results = self._results, []
        self._unanswered_count -= 1
        if not self._unanswered_count:
            self._pgconn.exit_pipeline_mode()
        for result in results:
            if result is None or result.status != pq.ExecStatus.TUPLES_OK:
                raise _error_of(result)
        append, *looked = [result for result in results if result is not None]
        self.settings = _text(looked[0], 0) if looked else ""
        if _text(append, 0) == "t":
            return Answer(True)
        epoch, appends_count, last_sequence_id, holder = (_text(append, column) for column in range(1, 5))
        return Answer(False, int(epoch or 0), int(appends_count or 0), int(last_sequence_id or -1), holder)

    def look(self) -> None:
        """Ask for the settings now. No append is on its way."""
        row = self._connection.execute("EXECUTE immortal_settings").fetchone()
        self.settings = "" if row is None else row[0]

    @property
    def events(self) -> int:
        """Of select.poll, on the connection: when there is something to do for :meth:`answer`."""
        return select.POLLIN | select.POLLOUT if self._is_unsent else select.POLLIN

    def wait(self) -> None:
        """Until there is."""
        poll = select.poll()
        poll.register(self._pgconn.socket, self.events)
        poll.poll()


def _text(result: pq.abc.PGresult, column: int) -> str:
    return (result.get_value(0, column) or b"").decode()


def _error_of(result: pq.abc.PGresult | None) -> psycopg.Error:
    if result is None:
        return psycopg.OperationalError("a transaction ended without an answer")
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    if not state:  # the connection is gone
        return psycopg.OperationalError(result.get_error_message())
    try:
        kind: type[psycopg.Error] = errors.lookup(state.decode())
    except KeyError:
        kind = psycopg.DatabaseError
    return kind(result.get_error_message())
