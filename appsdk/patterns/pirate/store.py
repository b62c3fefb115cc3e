"""Store of replies, in an LMDB folder that all servers of one pool on one machine share.

A request is done inside the store's one write transaction: its reply and the rows that its function wrote become
durable together, or not at all. LMDB lets one process write at a time, so two servers never do one request.

Table    Key                      Value
meta     name                     format; ID of the store
owners   owner                    next turn, next place, number of clients, bytes of replies
clients  owner client             floor: lower numbers are over; turn of last use; number and bytes of replies
uses     owner turn               client: the least recently used first
replies  owner client number      place, digest of the request, kind, check; the reply
order    owner place              client number: the oldest reply first
data     the user's               the user's

``owner`` is the name of the caller's key, ``client`` its client ID, each as 16 bytes of BLAKE2b: so another owner
never reaches a row, whatever client ID it gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct

import lmdb

from immortal.appsdk.patterns.pirate.frames import STORE_ID_SIZE_BYTES, Frame, Kind, StoreError
from immortal.protocol.checksum import crc64
from immortal.protocol.files import FILE_MODE, describe_open_access, make_folder

# Limits of stored replies, for each name of a key (without keys: all clients together).
REPLIES_OF_CLIENT_MAX = 4096
REPLIES_OF_CLIENT_SIZE_BYTES_MAX = 4 << 20
REPLIES_SIZE_BYTES_MAX = 64 << 20
REPLY_OVERHEAD_BYTES = 200  # LMDB's space for the rows of one reply
CLIENTS_MAX = 100_000
# LMDB reserves addresses, not memory or disk. Replies need some 100 MiB for each name; the rest is for the user's rows.
MAP_SIZE_BYTES = 64 << 30
VALUE_SIZE_BYTES_MAX = 64 << 20  # of the user's rows
KEY_SIZE_BYTES_MAX = 511  # LMDB's own

FORMAT = b"1"
_TABLES = ("meta", "owners", "clients", "uses", "replies", "order", "data")
_DIGEST_SIZE_BYTES = 16
_OWNER = Struct(">QQQQ")
_CLIENT = Struct(">QQQQ")
_REPLY = Struct(">Q16sBQ")
_U64 = Struct(">Q")


@dataclass(slots=True)
class _Owner:
    turn: int = 0
    place: int = 0
    clients: int = 0
    size_bytes: int = 0

    def pack(self) -> bytes:
        return _OWNER.pack(self.turn, self.place, self.clients, self.size_bytes)


@dataclass(slots=True)
class _Client:
    floor: int = 0
    turn: int = 0
    replies: int = 0
    size_bytes: int = 0

    def pack(self) -> bytes:
        return _CLIENT.pack(self.floor, self.turn, self.replies, self.size_bytes)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the data kept for one owner."""

    replies_of_client: int = REPLIES_OF_CLIENT_MAX
    replies_of_client_bytes: int = REPLIES_OF_CLIENT_SIZE_BYTES_MAX
    replies_bytes: int = REPLIES_SIZE_BYTES_MAX
    clients: int = CLIENTS_MAX


class Rows(MutableMapping[bytes, bytes]):
    """Rows of the user within one request, in the order of their keys (1 to 511 bytes)."""

    def __init__(self, transaction: lmdb.Transaction, table: lmdb._Database) -> None:
        self._transaction = transaction
        self._table = table

    def __getitem__(self, key: bytes) -> bytes:
        value = self._transaction.get(_checked_key(key), db=self._table)
        if value is None:
            raise KeyError(key)
        return bytes(value)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if not isinstance(value, bytes) or len(value) > VALUE_SIZE_BYTES_MAX:
            what = f"{len(value)} bytes" if isinstance(value, bytes) else f"{type(value).__name__}"
            raise TypeError(f"{what} for {key!r}: at most {VALUE_SIZE_BYTES_MAX} bytes were expected")
        self._transaction.put(_checked_key(key), value, db=self._table)

    def __delitem__(self, key: bytes) -> None:
        if not self._transaction.delete(_checked_key(key), db=self._table):
            raise KeyError(key)

    def __iter__(self) -> Iterator[bytes]:
        with self._transaction.cursor(self._table) as cursor:
            yield from map(bytes, cursor.iternext(values=False))

    def __len__(self) -> int:
        return int(self._transaction.stat(self._table)["entries"])


def _checked_key(key: bytes) -> bytes:
    if not isinstance(key, bytes) or not 1 <= len(key) <= KEY_SIZE_BYTES_MAX:
        raise TypeError(f"the key {key!r}: 1 to {KEY_SIZE_BYTES_MAX} bytes were expected")
    return key


Work = Callable[[Rows], bytes]
"""Function that does a request and returns the reply. It raises :class:`Failure`; other errors end the transaction."""


class Failure(Exception):  # noqa: N818 (what happened)
    """Raised if the function raised: its writes are undone, and ``text`` is stored as its reply."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.text = text


class ReplyStore:
    """Store of replies, open in this process until :meth:`close`, for one thread. Raises StoreError, OSError."""

    def __init__(self, folder: str | os.PathLike[str], limits: Limits | None = None) -> None:
        self.folder = Path(folder)
        self.limits = limits or Limits()
        make_folder(self.folder)
        if (problem := describe_open_access(self.folder)) is not None:
            raise StoreError(problem)
        try:
            self._environment = lmdb.open(
                str(self.folder), max_dbs=len(_TABLES), map_size=MAP_SIZE_BYTES, mode=FILE_MODE, metasync=True
            )
            with self._environment.begin(write=True) as transaction:
                self.tables = {
                    name: self._environment.open_db(name.encode(), txn=transaction, create=True) for name in _TABLES
                }
                meta = self.tables["meta"]
                if transaction.get(b"format", db=meta) is None:
                    transaction.put(b"format", FORMAT, db=meta)
                    transaction.put(b"id", os.urandom(STORE_ID_SIZE_BYTES), db=meta)
                found = bytes(transaction.get(b"format", db=meta) or b"")
                self.store_id = bytes(transaction.get(b"id", db=meta) or b"")
        except lmdb.Error as error:
            raise StoreError(f"the store {self.folder} can't be opened: {error}") from None
        if found != FORMAT:
            self.close()
            raise StoreError(f"the store {self.folder} has format {found!r}, {FORMAT!r} is known here")

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Run one write transaction, durable when it ends. It waits for other servers' ones. Raises StoreError: then
        nothing was kept.
        """
        try:
            with self._environment.begin(write=True) as transaction:
                yield Turn(self, transaction)
        except lmdb.Error as error:
            raise StoreError(
                f"the store {self.folder} can't be written: {error}; nothing of this is kept, and nobody was answered"
            ) from error

    def close(self) -> None:
        self._environment.close()


class Turn:
    """Write transaction that answers requests one after the other."""

    def __init__(self, store: ReplyStore, transaction: lmdb.Transaction) -> None:
        self._store = store
        self._transaction = transaction
        self._tables = store.tables

    def answer(self, owner: str, request: Frame, work: Work) -> Frame:
        """Return the stored answer, or that of ``work``, stored. Raises the errors of ``work`` except Failure."""
        owner_key, client_key = _digest(owner.encode()), _digest(request.client_id.encode())
        client_row_key = owner_key + client_key
        owner_row, client = self._owner(owner_key), self._client(client_row_key)
        if client is None:
            client = _Client(turn=owner_row.turn)
            owner_row.clients += 1
            owner_row.turn += 1
        else:
            self._delete("uses", owner_key + _U64.pack(client.turn))
            client.turn, owner_row.turn = owner_row.turn, owner_row.turn + 1
        self._put("uses", owner_key + _U64.pack(client.turn), client_key)

        answer = self._find_reply(client_row_key, request, client.floor)
        if answer is None:
            answer = self._execute(request, work)
            self._store_reply(owner_key, client_key, request, answer, owner_row, client)
        self._settle(owner_key, client_key, request.value, owner_row, client)
        self._put("clients", client_row_key, client.pack())
        self._put("owners", owner_key, owner_row.pack())
        self._evict(owner_key, client_key)
        return answer

    def _find_reply(self, client_row_key: bytes, request: Frame, floor: int) -> Frame | None:
        row = self._get("replies", client_row_key + _U64.pack(request.number))
        if row is None:
            return Frame(Kind.GONE, request.number) if request.number < floor else None
        _, digest, kind, check = _REPLY.unpack_from(row)
        body = row[_REPLY.size :]
        if crc64(body) != check:
            raise StoreError(f"the store {self._store.folder} is damaged: a reply's check bytes do not match")
        if digest != _digest(request.body):
            text = f"number {request.number} of client {request.client_id!r} was used for another request"
            return Frame(Kind.REFUSED, request.number, body=text.encode())
        return Frame(Kind(kind), request.number, body=body)

    def _execute(self, request: Frame, work: Work) -> Frame:
        data = self._tables["data"]
        try:
            with self._store._environment.begin(write=True, parent=self._transaction) as child:
                return Frame(Kind.REPLY, request.number, body=work(Rows(child, data)))
        except Failure as failure:
            return Frame(Kind.FAILED, request.number, body=failure.text)

    def _store_reply(
        self, owner: bytes, client_key: bytes, request: Frame, answer: Frame, owner_row: _Owner, client: _Client
    ) -> None:
        number = _U64.pack(request.number)
        place, owner_row.place = owner_row.place, owner_row.place + 1
        row = _REPLY.pack(place, _digest(request.body), answer.kind, crc64(answer.body)) + answer.body
        self._put("replies", owner + client_key + number, row)
        self._put("order", owner + _U64.pack(place), client_key + number)
        size_bytes = len(answer.body) + REPLY_OVERHEAD_BYTES
        client.replies += 1
        client.size_bytes += size_bytes
        owner_row.size_bytes += size_bytes

    def _settle(self, owner: bytes, client_key: bytes, settled: int, owner_row: _Owner, client: _Client) -> None:
        """Delete the replies that the client has settled, and those of its lowest numbers if it has too many."""
        limits = self._store.limits
        while client.replies and (key := self._first("replies", owner + client_key)) is not None:
            number = _U64.unpack(key[-_U64.size :])[0]
            has_too_much = client.replies > 1 and (
                client.replies > limits.replies_of_client or client.size_bytes > limits.replies_of_client_bytes
            )
            if number >= settled and not has_too_much:
                break
            self._drop(owner, client_key, number, owner_row, client)
        client.floor = max(client.floor, settled)

    def _drop(self, owner: bytes, client_key: bytes, number: int, owner_row: _Owner, client: _Client) -> None:
        key = owner + client_key + _U64.pack(number)
        row = self._get("replies", key) or b""
        self._delete("replies", key)
        self._delete("order", owner + row[: _U64.size])
        size_bytes = len(row) - _REPLY.size + REPLY_OVERHEAD_BYTES
        client.replies -= 1
        client.size_bytes -= size_bytes
        client.floor = max(client.floor, number + 1)
        owner_row.size_bytes -= size_bytes

    def _evict(self, owner: bytes, current: bytes) -> None:
        """Delete the oldest replies of all clients, and the least recently used clients, except the current one."""
        limits = self._store.limits
        owner_row = self._owner(owner)
        changed = False
        while owner_row.size_bytes > limits.replies_bytes and (key := self._first("order", owner)) is not None:
            place = self._get("order", key) or b""
            client_key, number = place[:_DIGEST_SIZE_BYTES], _U64.unpack(place[_DIGEST_SIZE_BYTES:])[0]
            client = self._client(owner + client_key)
            if client is None or (client_key == current and client.replies == 1):
                break  # the only reply left is the new one
            self._drop(owner, client_key, number, owner_row, client)
            self._put("clients", owner + client_key, client.pack())
            changed = True
        while owner_row.clients > limits.clients and (key := self._first("uses", owner)) is not None:
            client_key = self._get("uses", key) or b""
            client = self._client(owner + client_key)
            if client is None or client_key == current:
                break
            self._settle(owner, client_key, 2**64 - 1, owner_row, client)
            self._delete("uses", key)
            self._delete("clients", owner + client_key)
            owner_row.clients -= 1
            changed = True
        if changed:
            self._put("owners", owner, owner_row.pack())

    # --- rows --------------------------------------------------------------------------------------------------------

    def _owner(self, key: bytes) -> _Owner:
        row = self._get("owners", key)
        return _Owner() if row is None else _Owner(*_OWNER.unpack(row))

    def _client(self, key: bytes) -> _Client | None:
        row = self._get("clients", key)
        return None if row is None else _Client(*_CLIENT.unpack(row))

    def _first(self, table: str, prefix: bytes) -> bytes | None:
        """Return the lowest key with that prefix."""
        with self._transaction.cursor(self._tables[table]) as cursor:
            if not cursor.set_range(prefix):
                return None
            key = bytes(cursor.key())
            return key if key.startswith(prefix) else None

    def _get(self, table: str, key: bytes) -> bytes | None:
        value = self._transaction.get(key, db=self._tables[table])
        return None if value is None else bytes(value)

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value, db=self._tables[table])

    def _delete(self, table: str, key: bytes) -> None:
        self._transaction.delete(key, db=self._tables[table])


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_SIZE_BYTES).digest()
