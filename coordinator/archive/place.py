"""Log backend that reads an archive as a log: ``s3://BUCKET/PATH#INSTANCE``, and the same for other stores.

The environment has the credentials of stores, and KEY_FILE_VARIABLE there names the file with the secret key. Neither
is part of a URL, since settings, plans and errors show URLs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogFormatError, LogUnavailableError
from immortal.protocol import distribution

try:
    from immortal.coordinator.archive.archive import Archive, Cipher
    from immortal.coordinator.objects.store import Objects, store_of
except ImportError as error:
    raise LogError(f"archives need the extra archive ({error}): {distribution.add_extra('archive')}") from None

from immortal.coordinator.archive.archive import ArchivedView
from immortal.coordinator.archive.format import Moment, PackedRow, Part, encrypted_parts, needed_objects
from immortal.coordinator.config import ConfigError, check_instance_name
from immortal.coordinator.log.backend import Backend, Mac, Options, Place, ReadBackend, Row, View
from immortal.coordinator.log.identity import LogIdentity, read_identity
from immortal.coordinator.objects import DamagedObjectError, ObjectError, StoreError

KEY_FILE_VARIABLE = "IMMORTAL_ARCHIVE_KEY_FILE"


class ArchiveReader(ReadBackend):
    """Reader of the newest moment of an archive as a log.

    It fetches, checks and decrypts an object when one of its rows is first read.
    """

    def __init__(self, archive: Archive, label: str, instance_name: str | None) -> None:
        self.label = label
        self._archive = archive
        self._cached: dict[int, tuple[Moment, str]] = {}
        self._view: ArchivedView | None = None
        self._digest = ""
        with self.view() as view:
            self.identity = read_identity(view, label, instance_name)

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[ArchivedView]:
        with _translated_errors():
            yield self._newest()

    def _newest(self) -> ArchivedView:
        try:
            moments = self._archive.follow(self._cached)
        except DamagedObjectError:  # the cause can be another archive that replaced this one: read all of it
            self._cached.clear()
            moments = self._archive.follow(self._cached)
        if not moments:
            raise LogFormatError(f"there is no archive {self.label}")
        its_digest = self._cached[moments[-1].number][1]
        if self._view is None or its_digest != self._digest:
            encrypted = encrypted_parts(moments)

            def rows_of(part: Part) -> list[PackedRow]:
                (data,) = self._archive.read_parts([part])
                return self._archive.rows_of(part, data, encrypted=encrypted[part.name])

            self._view = ArchivedView(needed_objects(moments, len(moments) - 1), rows_of, moments[-1])
            self._digest = its_digest
        return self._view

    def close(self) -> None:
        self._view = None


class ArchivePlace(Place):
    """Location of an archive, which can be read as a log, but not written. ``scheme``: the URL scheme of its store."""

    is_shared = True

    def __init__(self, location: str) -> None:
        super().__init__(location)
        store, _, self._instance = location.partition("#")
        self._url = f"{self.scheme}:{store}".rstrip("/")
        if self.scheme != "file" and (urlsplit(self._url).password is not None or "?" in self._url):
            raise LogError(
                "a password or a query in the URL of an archive would be seen by whoever sees the settings or the"
                " processes: give credentials in the environment, and the URL without them"
            )

    @property
    def label(self) -> str:
        return f"{self._url}#{self._instance}" if self._instance else self._url

    def exists(self) -> bool:
        with _translated_errors():
            return bool(self._archive_of_instance().numbers())

    def instances(self) -> list[str] | None:
        if self._instance:
            return None
        with _translated_errors():
            store = self._store()
            return [name for name in store.folders() if _is_name(name) and Archive(store.below(name)).numbers()]

    def open_reader(self, instance_name: str | None) -> ArchiveReader:
        with _translated_errors():
            key_file = os.environ.get(KEY_FILE_VARIABLE)
            archive = self._archive_of_instance(Cipher.from_file(Path(key_file)) if key_file else None)
            return ArchiveReader(archive, self.label, instance_name)

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> Backend:
        self._refuse()

    def open(self, instance_name: str, options: Options) -> Backend:
        self._refuse()

    def copy(self, source: View, identity: LogIdentity, mac: Mac | None) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise LogError(
            f"{self.label} is an archive, which is only read: an instance writes its log in a folder or in PostgreSQL,"
            " 'immortal archive' ships it, and 'immortal restore' brings it back"
        )

    def _archive_of_instance(self, cipher: Cipher | None = None) -> Archive:
        """Open the archive of the URL's instance. Raises LogFormatError if the URL names none."""
        if not self._instance:
            raise LogFormatError(f"{self.label} may hold the archives of many instances: write {self.label}#NAME")
        if not _is_name(self._instance):
            raise LogFormatError(f"{self._instance!r}, behind # in the URL of an archive, is no instance's name")
        return Archive(self._store().below(self._instance), cipher)

    def _store(self) -> Objects:
        return Objects(store_of(self._url, create=False), self._url)


class S3Archive(ArchivePlace):
    scheme = "s3"


class GoogleArchive(ArchivePlace):
    scheme = "gs"


class AzureArchive(ArchivePlace):
    scheme = "az"


class FolderArchive(ArchivePlace):
    scheme = "file"


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Turn errors of stores and archives into errors of logs."""
    try:
        yield
    except StoreError as error:
        raise LogUnavailableError(str(error)) from None
    except DamagedObjectError as error:
        raise DamagedLogError(str(error), -1) from None
    except ObjectError as error:
        said, place = str(error), f"in {KEY_FILE_VARIABLE}"  # commands that read a log have no option --key-file
        raise LogError(said.replace("with --key-file", place).replace("(--key-file)", place)) from None


def _is_name(name: str) -> bool:
    try:
        return check_instance_name(name) == name
    except ConfigError:
        return False
