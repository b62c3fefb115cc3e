"""Object stores by URL: s3://, gs://, az://, file://. Objects are never overwritten with other contents."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, from_url

from immortal.coordinator.objects import DamagedObjectError, ObjectError, StoreError
from immortal.protocol.files import make_folder, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore import GetResult
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
_READS_AT_ONCE = 8
_SAID_MAX = 500  # characters of a store's error message: it can be a page


class Stored(NamedTuple):
    name: str
    size_bytes: int
    modified_s: float  # since the Unix epoch, by the store's clock


def store_of(url: str, *, create: bool = True) -> ObjectStore:
    """Open the store of a URL. Credentials come from the environment, as for the store's own tools.

    ``create``: create a folder that is missing.

    Raises ObjectError for a URL of another form, StoreError.
    """
    scheme, separator, path = url.partition("://")
    if not separator or scheme not in SCHEMES or not path.strip("/"):
        expected = ", ".join(f"{each}://" for each in SCHEMES)
        raise ObjectError(
            f"{url!r} names no store: a URL with one of {expected} was expected, such as s3://bucket/archive"
        )
    with _as_store_errors(url):
        if scheme == "file":
            if not path.startswith("/"):
                raise ObjectError(f"{url!r} names no folder: file:// and an absolute path was expected")
            if create:
                make_folder(Path(path))
            elif not Path(path).is_dir():
                raise ObjectError(f"there is no archive in {url}: no such folder")
            return LocalStore(prefix=path)
        return from_url(url, retry_config={"max_retries": 1})  # callers that wait retry by themselves, and report it


class Objects:
    """Objects in ``store`` below the folder ``prefix``. ``location``: name for messages."""

    def __init__(self, store: ObjectStore, location: str, prefix: str = "") -> None:
        self.location = location
        self._store = store
        self._prefix = prefix

    def below(self, folder: str) -> Objects:
        return Objects(self._store, f"{self.location.rstrip('/')}/{folder}", f"{self._prefix}{folder}/")

    def put_new(self, name: str, data: bytes) -> bool:
        """Create an object durably; return False if one of that name exists, which stays. Raises StoreError."""
        path = self._prefix + name
        with _as_store_errors(self.location):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, FileExistsError):
                return False
            if isinstance(self._store, LocalStore):
                _sync(Path(str(self._store.prefix), path), Path(str(self._store.prefix)))
        return True

    def get(self, name: str) -> bytes:
        """Read an object. Raises DamagedObjectError if it is missing, StoreError."""
        with _as_store_errors(self.location):
            return bytes(self._found(name).bytes())

    def chunks(self, name: str, size_bytes_min: int) -> Iterator[bytes]:
        """Yield an object's content in chunks, with bounded memory. Raises as :meth:`get`."""
        with _as_store_errors(self.location):
            for chunk in self._found(name).stream(min_chunk_size=size_bytes_min):
                yield bytes(chunk)

    def _found(self, name: str) -> GetResult:
        try:
            return obstore.get(self._store, self._prefix + name)
        except (NotFoundError, FileNotFoundError):  # Python's own, of a folder
            raise DamagedObjectError(f"the object {self.location}/{name} is missing") from None

    def put_file(self, name: str, path: Path) -> None:
        """Store a file as an object, with bounded memory; one of that name is replaced. Raises StoreError."""
        with _as_store_errors(self.location):
            obstore.put(self._store, self._prefix + name, path)

    def get_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """Read several objects in parallel; yield them in the order of ``names``. Raises as :meth:`get`."""
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            yield from pool.map(self.get, names)

    def listed(self, folder: str = "") -> list[Stored]:
        """List the objects below ``folder`` by name. Raises StoreError."""
        found = []
        with _as_store_errors(self.location):
            for page in obstore.list(self._store, prefix=(self._prefix + folder).rstrip("/") or None):
                for one in page:
                    name = one["path"].removeprefix(self._prefix)
                    found.append(Stored(name, one["size"], one["last_modified"].timestamp()))
        return sorted(found)

    def folders(self) -> list[str]:
        """List the names of the folders at the top level. Raises StoreError."""
        with _as_store_errors(self.location):
            listed = obstore.list_with_delimiter(self._store, prefix=self._prefix.rstrip("/") or None)
        return sorted(path.removeprefix(self._prefix).rstrip("/") for path in listed["common_prefixes"])

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored. Raises StoreError."""
        with _as_store_errors(self.location):
            for name in names:
                try:
                    obstore.delete(self._store, self._prefix + name)
                except (NotFoundError, FileNotFoundError):  # Python's own, of a folder
                    continue


@contextmanager
def _as_store_errors(location: str) -> Iterator[None]:
    """Turn errors of obstore, and errors of Python's own that it raises, into StoreError."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        said = " ".join(str(error).split("Debug source:")[0].split()) or type(error).__name__
        raise StoreError(f"the store {location} does not do it: {said[:_SAID_MAX]}") from None


def _sync(file: Path, root: Path) -> None:
    """Sync a file, its name, and its folders up to ``root``, so that archived data survives a crash of the machine."""
    for folder in (file, *file.parents):
        with opened(folder, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
        if folder == root:
            return
