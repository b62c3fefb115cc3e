"""A checkpoint that a standby takes, in the database: one row says what is asked of whom, and becomes the answer.

The writer puts the row, with its fence and the standby's name in the key. The standby puts chunks under their own keys,
each only while that row is there, and at last what it has to say into the row. Whoever takes the log removes the row,
and with it the right to put chunks. What was put and not adopted has no header: it goes as half-written checkpoints do.
"""

from __future__ import annotations

import struct
from typing import Any

import psycopg

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.backend import Append, Asked
from immortal.coordinator.log.backends.postgres import lease as leases
from immortal.coordinator.log.backends.postgres.chunks import CHUNKS, ChunkUploads
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY

TABLE = "standby_checkpoints"
_KEY = struct.Struct(">QQQ")
_HEADER = "checkpoints"

_Connection = psycopg.Connection[tuple[Any, ...]]

_PUT = (
    "WITH asked AS (SELECT FROM immortal.rows WHERE instance = %(instance)s AND table_name = %(asked_table)s"
    " AND key = %(asked)s AND value = '' FOR SHARE)"
    " INSERT INTO immortal.rows (instance, table_name, key, value)"
    " SELECT %(instance)s, %(table)s, %(key)s, %(value)s FROM asked ON CONFLICT DO NOTHING"
)


def key_of(asked: Asked, standby: str) -> bytes:
    return _KEY.pack(asked.fence, asked.checkpoint_id, asked.epoch) + standby.encode()


# --- the writer -------------------------------------------------------------------------------------------------------


def ask(connection: _Connection, instance: str, asked: Asked, standby: str) -> None:
    """Nothing is asked by who was fenced."""
    with connection.transaction():
        forget(connection, instance)
        connection.execute(
            "INSERT INTO immortal.rows (instance, table_name, key, value) SELECT instance, %s, %s, ''"
            " FROM immortal.heads WHERE instance = %s AND is_there AND epoch = %s",
            [TABLE, key_of(asked, standby), instance, asked.fence],
        )
        leases.tell(connection, instance)


def forget(connection: _Connection, instance: str) -> None:
    """Whatever is asked of anybody."""
    connection.execute("DELETE FROM immortal.rows WHERE instance = %s AND table_name = %s", [instance, TABLE])


def answer(connection: _Connection, instance: str, key: bytes) -> bytes | None:
    row = connection.execute(
        "SELECT value FROM immortal.rows WHERE instance = %s AND table_name = %s AND key = %s AND value <> ''",
        [instance, TABLE, key],
        binary=True,
    ).fetchone()
    return None if row is None else bytes(row[0])


# --- the standby ------------------------------------------------------------------------------------------------------


def asked_of(connection: _Connection, instance: str, standby: str) -> Asked | None:
    """What this standby is asked for, and has not answered."""
    rows = connection.execute(
        "SELECT key FROM immortal.rows WHERE instance = %s AND table_name = %s AND value = ''",
        [instance, TABLE],
        binary=True,
    ).fetchall()
    for (key,) in rows:
        if bytes(key[_KEY.size :]) == standby.encode():
            return Asked(*_KEY.unpack_from(key))
    return None


class StandbyChunks:
    """Those that one standby puts. ``checkpoints_to``: as of a writer. One thread."""

    def __init__(self, instance: str, standby: str, checkpoints_to: str) -> None:
        """Raises LogError for a URL that names no store."""
        self._instance, self._standby = instance, standby
        self._uploads = ChunkUploads(checkpoints_to, instance)

    def put(self, connection: _Connection, asked: Asked, index: int, value: bytes) -> None:
        """Raises LogError where nobody wants it any more."""
        row = (CHUNKS, CHUNK_KEY.pack(asked.checkpoint_id, index), value)
        self._insert(connection, asked, self._uploads.outward(Append(-1, puts=[row]), asked.fence))

    def offer(self, connection: _Connection, asked: Asked, offer: bytes) -> None:
        """Raises LogError."""
        # At a header the store has taken all objects, or their chunks come as rows.
        header = (_HEADER, SEQUENCE_KEY.pack(asked.checkpoint_id), b"")
        with connection.transaction():
            self._insert(connection, asked, self._uploads.outward(Append(-1, puts=[header]), asked.fence))
            done = connection.execute(
                "UPDATE immortal.rows SET value = %s"
                " WHERE instance = %s AND table_name = %s AND key = %s AND value = ''",
                [offer, self._instance, TABLE, key_of(asked, self._standby)],
            )
            if not done.rowcount:
                raise LogError("who asked for it does not want it any more")

    def _insert(self, connection: _Connection, asked: Asked, append: Append) -> None:
        for span in append.deletes:  # of objects that the store has not taken: their chunks come as rows
            connection.execute(
                "DELETE FROM immortal.rows WHERE instance = %s AND table_name = %s AND key >= %s AND key < %s",
                [self._instance, span.table, span.first, span.end],
            )
        for table, key, value in append.puts:
            if table == _HEADER:
                continue
            values = {"instance": self._instance, "asked_table": TABLE, "asked": key_of(asked, self._standby)}
            done = connection.execute(_PUT, {**values, "table": table, "key": bytes(key), "value": bytes(value)})
            if not done.rowcount:
                raise LogError("who asked for it does not want it any more")

    def close(self) -> None:
        self._uploads.close()
