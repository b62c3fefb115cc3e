"""Files as values: their bytes go to a store; calls, states and logs have a handle of some 100 bytes.

    film = await immortal.effect(immortal.store_file, Path("film.mkv"))
    await vault.keep(film)

A handle names its file by SHA-256 and size. So a store has a content once, never changes it, and damage is found by
whoever reads. Functions of effects, and clients, read and write contents; handlers only pass handles on: whether a
store has a file is a matter of the outside world, of which no replay asks. decisions/0099.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from msgspec import Meta, Struct

from immortal.appsdk.calls.context import is_plain
from immortal.appsdk.calls.user_code import running
from immortal.appsdk.errors import StoredFileError, UsageError
from immortal.coordinator.objects import DamagedObjectError
from immortal.protocol import distribution
from immortal.protocol.files import make_folder, open_beside, sync_folder

if TYPE_CHECKING:
    from immortal.coordinator.objects.store import Objects

CHUNK_SIZE_BYTES = 4 << 20
STORE_VARIABLE = "IMMORTAL_FILE_STORE"
FOLDER_NAME = ".files"  # in a home; no instance has such a name
_INCOMING, _REMOVED = "incoming", ".removed."
_OWN_NAME = re.compile(rf"sha256-[0-9a-f]{{64}}|\.{_INCOMING}\.[0-9a-f]{{16}}")
"""Names that a store gives. Others in its folder or bucket are not its own, and no removal sees them."""


class StoredFile(Struct, frozen=True):
    """Handle of a file in a store: a value for arguments, results and states. :func:`store_file` makes it."""

    name: Annotated[str, Meta(pattern=r"\Asha256-[0-9a-f]{64}\Z")]
    size_bytes: Annotated[int, Meta(ge=0)]

    def open(self) -> BinaryIO:
        """Open the content for reading, from its beginning to its end, with bounded memory.

        Raises StoredFileError if the store has no such file. So does each read that finds damage: the last chunk of a
        content, of at most 4 MiB, is not given out before the whole is as it was stored.
        """
        _refuse_in_handlers("StoredFile.open()")
        reader = io.BufferedReader(_CheckedContent(self, file_store()), CHUNK_SIZE_BYTES)
        try:
            reader.peek(1)  # a file that is missing is reported here
        except BaseException:
            reader.close()
            raise
        return reader

    def save(self, path: Path | str) -> None:
        """Write the content to a file, wholly or not at all. Raises StoredFileError, OSError."""
        import shutil

        with self.open() as content, _new_file(Path(path)) as (file, temporary):
            shutil.copyfileobj(content, file, CHUNK_SIZE_BYTES)
            file.close()
            os.replace(temporary, path)


def store_file(path: Path) -> StoredFile:
    """Store the content of a file, with bounded memory, and return its handle: in an effect, or in a client.

    To store a content again changes nothing. Raises StoredFileError for a file that can't be read, or that changes
    meanwhile; OSError and ImmortalError if the store does not take it now, which an effect tries again.
    """
    return store_chunks(_chunks_of(path))


def store_chunks(chunks: Iterable[bytes]) -> StoredFile:
    """Store a content that comes in chunks of bytes, as :func:`store_file` does."""
    _refuse_in_handlers("store_file()")
    if isinstance(chunks, str | bytes | bytearray | memoryview):
        raise TypeError(f"store_chunks: a {type(chunks).__name__} came, chunks were expected: store_chunks([<bytes>])")
    return file_store().write(chunks)


def _chunks_of(path: Path) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StoredFileError(f"{path} can't be stored: it is no file: give the path of one file")
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while chunk := file.read(CHUNK_SIZE_BYTES):
                yield chunk
            after = os.fstat(file.fileno())
    except (OSError, ValueError) as error:  # also for a path with a zero byte
        raise StoredFileError(f"{path} can't be stored: {getattr(error, 'strerror', error)}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise StoredFileError(f"{path} changed while it was stored: store it once it is complete")


def _refuse_in_handlers(function_name: str) -> None:
    owner = running.get()
    if not (is_plain(owner) or isinstance(owner, str)):  # outside of instances, or in an effect
        raise UsageError(
            f"{function_name}: handlers do not use a store, which a replay must not ask: do it in a function that "
            f"`await immortal.effect(...)` runs, and let it return what the handler needs"
        )


class _CheckedContent(io.RawIOBase):
    """Content of a file as it comes from a store, compared with its handle before its end is given out."""

    def __init__(self, file: StoredFile, store: FolderStore | BucketStore) -> None:
        self._file, self._where = file, store.where
        self._chunks = store.read(file.name)
        self._digest = hashlib.sha256()
        self._left_bytes = file.size_bytes
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._chunk:
            self._chunk = memoryview(self._next())
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._chunk))
        target[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    def _next(self) -> bytes:
        chunk = next(self._chunks, b"")
        self._digest.update(chunk)
        self._left_bytes -= len(chunk)
        is_end = not chunk or self._left_bytes <= 0
        if is_end and (self._left_bytes or f"sha256-{self._digest.hexdigest()}" != self._file.name):
            raise StoredFileError(
                f"the file {self._file.name} in {self._where} is damaged: store it again from its source"
            )
        return chunk

    def close(self) -> None:
        self._chunks.close()
        super().close()


# --- stores -----------------------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """One file of a store, or a part of one that was never completed."""

    name: str
    size_bytes: int
    stored_s: float  # since the Unix epoch, the last time that it was stored


class FolderStore:
    """Store in a folder: of this machine, or a disk that several share."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def write(self, chunks: Iterable[bytes]) -> StoredFile:
        """Store a content durably. Raises OSError, and what ``chunks`` raises."""
        digest, size_bytes = hashlib.sha256(), 0
        try:
            make_folder(self._folder)
            with _new_file(self._folder / _INCOMING) as (file, temporary):
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    size_bytes += len(chunk)
                file.flush()
                os.fsync(file.fileno())
                stored = StoredFile(f"sha256-{digest.hexdigest()}", size_bytes)
                os.replace(temporary, self._folder / stored.name)  # also an older one: it is new to remove_before()
            sync_folder(self._folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # which come without a name
                error.filename = self.where
            raise
        return stored

    def read(self, name: str) -> Generator[bytes, None, None]:
        """Yield the content of a file in chunks. Raises StoredFileError if it is missing, OSError."""
        try:
            file = open(self._folder / name, "rb", buffering=0)  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            raise _missing(name, self.where) from None
        with file:
            while chunk := file.read(CHUNK_SIZE_BYTES):
                yield chunk

    def listed(self) -> list[Listed]:
        if not self._folder.is_dir():
            return []
        # A crash interrupted the removal of these: they may be in use again.
        for aside in self._folder.glob(f"{_REMOVED}sha256-*"):
            path = self._folder / aside.name.removeprefix(_REMOVED)
            aside.unlink() if path.exists() else os.replace(aside, path)
        with os.scandir(self._folder) as entries:
            found = [(one.name, one.stat()) for one in entries if one.is_file() and _OWN_NAME.fullmatch(one.name)]
        return [Listed(name, status.st_size, status.st_mtime) for name, status in found]

    def remove_before(self, name: str, time_s: float) -> None:
        """Remove a file, unless it was stored at ``time_s`` or later, perhaps just now. Raises OSError."""
        path, aside = self._folder / name, self._folder / f"{_REMOVED}{name}"
        os.replace(path, aside)
        if aside.stat().st_mtime < time_s:
            aside.unlink()
        else:
            os.replace(aside, path)


class BucketStore:
    """Store in object storage, by its URL; needs the extra ``archive``. Contents on their way to it are in files."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")

    @property
    def _objects(self) -> Objects:
        try:
            from immortal.coordinator.objects.store import Objects, store_of
        except ImportError as error:
            extra = distribution.add_extra("archive")
            raise StoredFileError(f"the store {self.where} needs the extra archive ({error}): {extra}") from None
        return Objects(store_of(self.where), self.where)

    def write(self, chunks: Iterable[bytes]) -> StoredFile:
        """Store a content durably. Raises ImmortalError, OSError, and what ``chunks`` raises."""
        import tempfile

        objects = self._objects
        with tempfile.TemporaryDirectory() as folder:
            stored = FolderStore(Path(folder)).write(chunks)
            objects.put_file(stored.name, Path(folder, stored.name))
        return stored

    def read(self, name: str) -> Generator[bytes, None, None]:
        """Yield the content of a file in chunks. Raises StoredFileError if it is missing, ImmortalError."""
        try:
            yield from self._objects.chunks(name, CHUNK_SIZE_BYTES)
        except DamagedObjectError:
            raise _missing(name, self.where) from None

    def listed(self) -> list[Listed]:
        return [Listed(*one) for one in self._objects.listed() if _OWN_NAME.fullmatch(one.name)]

    def remove_before(self, name: str, time_s: float) -> None:
        self._objects.remove([name])


def file_store(where: str = "") -> FolderStore | BucketStore:
    """Return the store in a folder or at a URL; "": the store of this process, by its environment."""
    if not (where := where or os.environ.get(STORE_VARIABLE, "")):
        from immortal.protocol.shared_registry import folder_of

        where = str(folder_of(None) / FOLDER_NAME)
    return BucketStore(where) if "://" in where else FolderStore(Path(where))


def _missing(name: str, where: str) -> StoredFileError:
    return StoredFileError(
        f"the file {name} is not in the store {where}: it was removed, or its sender has another store: give both "
        f"instances the same 'file_store'"
    )


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a temporary file beside ``path``, which is removed after the block, if it is still there."""
    descriptor, temporary = open_beside(path)
    try:
        with open(descriptor, "wb") as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)
