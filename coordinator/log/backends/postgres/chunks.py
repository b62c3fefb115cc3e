"""Stores large checkpoints of a log in PostgreSQL in object storage: a chunk's row then has a pointer to its value.

Whole chunks (1 MiB) go to the store; smaller ones stay in the database, so a small checkpoint has no object. A row is
written before its object is stored. The header, which completes the checkpoint, waits for all objects. Chunks that the
store has not accepted by then go into the database with the header. So an unavailable store loses nothing, and only
delays a header.

An object's name has the epoch of its writer. If its epoch is older and no row names it, it is garbage. No clock is
involved.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogUnavailableError
from immortal.coordinator.log.backend import Append, Row, Span
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.objects import DamagedObjectError, ObjectError, StoreError
from immortal.protocol import decoding, distribution

if TYPE_CHECKING:
    from immortal.coordinator.objects.store import Objects

CHUNKS = "chunks"
ELSEWHERE = "chunks_elsewhere"
"""Table with the pointers of chunks in a store, under the chunks' keys."""
OBJECT_SIZE_BYTES_MIN = 1 << 20
UPLOADS_MAX = 8  # in parallel; each has its chunk in memory
ANSWER_S = 2.0  # a store that takes longer for a chunk counts as unavailable
_NAME = re.compile(r"\d{20}-\d{8}-e(\d+)-[0-9a-f]{16}")


class Pointer(msgspec.Struct, array_like=True, frozen=True):
    """Location of a chunk: the store's ``url``, the instance's ``folder`` in it, and the object's name."""

    url: str
    folder: str
    name: str
    size_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(Pointer).decode


def pointer_of(value: bytes) -> Pointer:
    """Decode a pointer. Raises DamagedLogError."""
    try:
        return _decode(value)
    except decoding.DecodeError as error:
        raise DamagedLogError(f"a row of {ELSEWHERE} says no place: {error}", -1) from None


def fetch_chunk(value: bytes) -> bytes | None:
    """Fetch the chunk that a row points to; None: it no longer exists. Raises LogUnavailableError, LogError."""
    pointer = pointer_of(value)
    try:
        return _folder(pointer.url, pointer.folder).get(pointer.name)
    except DamagedObjectError:
        return None
    except StoreError as error:
        raise LogUnavailableError(str(error)) from None


def remove_objects(pointers: Iterable[Pointer]) -> None:
    """Remove objects from their stores. Raises StoreError, LogError."""
    for pointer in pointers:
        _folder(pointer.url, pointer.folder).remove([pointer.name])


@lru_cache(maxsize=8)
def _folder(url: str, instance: str) -> Objects:
    """Open the instance's folder in the store. Raises LogError, StoreError."""
    try:
        from immortal.coordinator.objects.store import Objects, store_of
    except ImportError as error:
        raise LogError(
            f"checkpoints in {url} need the extra archive ({error}): {distribution.add_extra('archive')}"
        ) from None
    try:
        return Objects(store_of(url), url.rstrip("/")).below(instance)
    except ObjectError as error:
        raise LogError(str(error)) from None


class _Upload(NamedTuple):
    key: bytes
    value: bytes
    done: Future[None]

    def error(self) -> BaseException | None:
        """Return the error of a chunk that the store has not accepted; None: it has."""
        try:
            return self.done.exception(ANSWER_S)
        except TimeoutError:
            return StoreError(f"the store has not answered for {ANSWER_S:g} s")


class ChunkUploads:
    """Uploads of one writer, from one thread.

    ``url`` "": nothing is uploaded, but unneeded objects are still removed. ``problem``: message about why the store
    does not accept chunks; "": it does.
    """

    def __init__(self, url: str, instance: str) -> None:
        """Open the store. Raises LogError if the URL names no store."""
        self.problem = ""
        self._url = url
        self._instance = instance
        self._uploads: list[_Upload] = []  # of the checkpoint being written
        self._pool = ThreadPoolExecutor(UPLOADS_MAX, thread_name_prefix="chunks")
        if url:
            try:
                _folder(url, instance)
            except StoreError as error:
                self._note_problem(error)

    def redirect_chunks(self, append: Append, epoch: int) -> Append:
        """Return ``append`` with pointers in place of the chunks that go to the store."""
        puts = [self._put(row, epoch) for row in append.puts]
        deletes = [*append.deletes]
        deletes += [span._replace(table=ELSEWHERE) for span in append.deletes if span.table == CHUNKS]
        for table, key, _ in append.puts:
            if table == "checkpoints":
                for upload in self._failed_uploads(SEQUENCE_KEY.unpack(key)[0]):
                    puts.append((CHUNKS, upload.key, upload.value))
                    deletes.append(Span.of_key(ELSEWHERE, upload.key))
        return msgspec.structs.replace(append, puts=puts, deletes=deletes)

    def _put(self, row: Row, epoch: int) -> Row:
        table, key, value = row
        if not self._url or table != CHUNKS:
            return row
        checkpoint_id, index = CHUNK_KEY.unpack(key)
        if index == 0:
            self._uploads = []  # the earlier checkpoint is complete or was abandoned
        if len(value) < OBJECT_SIZE_BYTES_MIN or self._is_store_failing():
            return row
        name = f"{checkpoint_id:020}-{index:08}-e{epoch}-{secrets.token_hex(8)}"
        upload = _Upload(bytes(key), bytes(value), self._pool.submit(self._send, name, bytes(value)))
        self._uploads = [one for one in self._uploads if not one.done.done() or one.error() is not None]
        self._uploads.append(upload)
        return ELSEWHERE, key, _encode(Pointer(self._url, self._instance, name, len(value)))

    def _is_store_failing(self) -> bool:
        """Return True if the store has failed to accept a chunk. Wait for an answer first if many are in flight."""
        waiting = [one for one in self._uploads if not one.done.done()]
        if len(waiting) >= UPLOADS_MAX:
            return waiting[0].error() is not None
        return any(one.done.done() and one.error() is not None for one in self._uploads)

    def _send(self, name: str, value: bytes) -> None:
        _folder(self._url, self._instance).put_new(name, value)

    def _failed_uploads(self, checkpoint_id: int) -> list[_Upload]:
        """Wait for the store's answers for all chunks; return the failed uploads, which stay for another attempt."""
        own = [one for one in self._uploads if CHUNK_KEY.unpack(one.key)[0] == checkpoint_id]
        failed = [(one, error) for one in own if (error := one.error()) is not None]
        if failed:
            self._note_problem(failed[0][1])
        elif own:
            self.problem = ""
        return [one for one, _ in failed]

    def _note_problem(self, error: BaseException) -> None:
        self.problem = f"checkpoints go into the database, in place of {self._url}: {error}"

    def remove(self, pointers: Collection[Pointer]) -> None:
        """Remove objects in the background. If that fails, the next writer's :meth:`collect` finds them."""
        if pointers:
            self._pool.submit(remove_objects, pointers)

    def collect(self, named: Collection[str], epoch: int) -> Future[int] | None:
        """Remove objects of epochs before ``epoch`` that are not ``named``, in the background."""
        return self._pool.submit(self._collect, named, epoch) if self._url else None

    def _collect(self, named: Collection[str], epoch: int) -> int:
        folder = _folder(self._url, self._instance)
        found = ((stored.name, _NAME.fullmatch(stored.name)) for stored in folder.listed())
        gone = [name for name, match in found if match and int(match[1]) < epoch and name not in named]
        folder.remove(gone)
        return len(gone)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
