"""Encryption of a log's rows over any backend: values are encrypted as they are stored, and decrypted as they are read.

Each writer has a data key of its own (AES-256-GCM), and counts its nonces, so that none is used twice: not after a
crash, nor by a copy that goes on beside the log. The log holds each data key, wrapped by a key of the operator, which
is never in the log (docs/LOG_FORMAT.md, docs/decisions/0095).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import LogKey, LogKeyError, parse_keys, read_key_file
from immortal.coordinator.log.backend import (
    ENCRYPTION_KEY_VARIABLE,
    Append,
    Backend,
    ReadBackend,
    Row,
    Span,
    TableSize,
    View,
)
from immortal.coordinator.log.format import META_DATA_KEY, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, meta_row
from immortal.protocol import decoding, distribution
from immortal.protocol.varint import Readable

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:
    raise LogKeyError(
        f"an encrypted log needs the extra encryption ({error}): {distribution.add_extra('encryption')}"
    ) from error

COMMAND_TIMEOUT_S = 60.0
PLAIN_TABLES = frozenset(("meta", "sources", "acknowledged", "peers", "clients", "versions"))
_ENCRYPTED_TABLES = tuple(table for table in log_format.ALL_TABLES if table not in PLAIN_TABLES)
_PREFIXES = {table: table.encode() + b"\0" for table in _ENCRYPTED_TABLES}  # of the associated data
_NUMBER = struct.Struct(">I")  # the first part of a nonce; the other is a count of 8 bytes
_NONCE_SIZE_BYTES = 12
_TAG_SIZE_BYTES = 16
_KEY_SIZE_BYTES = 32
_ASSOCIATED = struct.Struct("<QQI")


def _associated(table: str, key: bytes) -> bytes | None:
    """Return the associated data of a row; None: it stays in plain."""
    if (prefix := _PREFIXES.get(table)) is not None:
        return prefix + key
    # MACs of the log are over plain values: who has stolen its key, too, could try guesses against this one.
    return b"meta\0" + key if key == log_format.META_SEAL and table == "meta" else None


# The operator's keys, which wrap data keys.


def read_keys(source: str) -> tuple[LogKey, ...]:
    """Read the operator's keys, the one in use first, from an absolute path, env:VARIABLE or command:PROGRAM ARGUMENTS.

    Raises LogKeyError.
    """
    kind, _, rest = source.partition(":")
    if kind == "env":
        text = os.environ.get(rest)
        if text is None:
            raise LogKeyError(f"the environment has no {rest}: the key that encrypts the log was expected there")
        return parse_keys(text, f"the environment variable {rest}")
    if kind == "command":
        return parse_keys(_output_of(rest), f"the output of {rest!r}")
    try:
        return read_key_file(Path(source), "and if others could have read it, make a new key")
    except (FileNotFoundError, NotADirectoryError):
        raise LogKeyError(f"there is no key in {source}: the key that encrypts the log was expected there") from None


def _output_of(command: str) -> str:
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,  # ours can be a query, or calls
            capture_output=True,
            text=True,
            errors="replace",  # an error of decoding would show a part of the key
            timeout=COMMAND_TIMEOUT_S,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise LogKeyError(f"the key that encrypts the log cannot be read from {command!r}: {error}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise LogKeyError(f"{command!r}, for the key that encrypts the log, ended with {done.returncode}: {said[0]}")
    return done.stdout


# Data keys, which encrypt rows.


class WrappedKey(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Row of ``meta`` with a data key, encrypted by the operator's key ``key_id``."""

    key_id: str
    nonce: bytes
    wrapped: bytes


_WRAPPED_KEY = decoding.Decoder(WrappedKey)


def wrapped_keys(view: View) -> dict[int, WrappedKey]:
    """Return the data keys in the log by number, as they are stored. Raises DamagedLogError."""
    found = {}
    for key, value in Span("meta", META_DATA_KEY, META_DATA_KEY + b"~").rows(view):
        try:
            (number,) = _NUMBER.unpack(bytes.fromhex(key[len(META_DATA_KEY) :].decode("latin-1")))
        except (ValueError, struct.error):
            raise DamagedLogError(f"the log's table 'meta' has a data key without a number: {key!r}", -1) from None
        found[number] = log_format.unseal(b"meta", key, bytes(value), _WRAPPED_KEY)
    return found


class DataKeys:
    """Data keys of one log, by number."""

    def __init__(self, identity: LogIdentity, source: str) -> None:
        self.source = source
        self._identity = identity
        self._operators_keys: tuple[LogKey, ...] = ()  # as last read from the source: a command can take long
        self._number_max = 0  # of this process, stored or not: no number is used for two keys
        self._secrets: dict[int, bytes] = {}
        self._ciphers: dict[int, AESGCM] = {}

    def load(self, view: View) -> dict[int, WrappedKey]:
        """Unwrap the data keys that are not known yet; return all as stored. Raises LogKeyError, DamagedLogError."""
        stored = wrapped_keys(view)
        if not self.source:
            raise LogKeyError(
                f"{self._is_encrypted(*stored.values())}, and no key is given: set 'encryption_key' in its settings"
                f" or, for a log named by its folder or URL, {ENCRYPTION_KEY_VARIABLE} in the environment"
            )
        for number, one in stored.items():
            if number not in self._secrets:
                key = self._key_of(one)
                try:
                    secret = AESGCM(key.secret).decrypt(one.nonce, one.wrapped, self._associated_data(number))
                except InvalidTag:
                    raise DamagedLogError(
                        f"data key {number} of the log is not what {key.id} has wrapped", -1
                    ) from None
                self._ciphers[number], self._secrets[number] = AESGCM(secret), secret
        return stored

    def new_encryptor(self, view: View) -> Encryptor:
        """Make a new data key, and wrap all keys by the operator's first one. Raises as :meth:`load`."""
        if self.source:
            self._operators_keys = read_keys(self.source)
        stored = self.load(view)
        key = self._operators_keys[0]
        number = self._number_max = max(self._number_max, *stored, 0) + 1
        secret = secrets.token_bytes(_KEY_SIZE_BYTES)
        rows = [self._wrap_key(number, secret, key)]
        rows += [self._wrap_key(each, self._secrets[each], key) for each, one in stored.items() if one.key_id != key.id]
        return Encryptor(number, secret, rows)

    def decrypt(self, view: View, table: str, key: bytes, value: Readable) -> Readable:
        """Return the plain value of a row; b"" if the row is damaged, which no reader takes for a value."""
        if (associated := _associated(table, key)) is None:
            return value
        if len(value) < _NONCE_SIZE_BYTES + _TAG_SIZE_BYTES:
            return b""
        (number,) = _NUMBER.unpack_from(value)
        if number not in self._ciphers:
            self.load(view)  # another writer has begun since
        if (cipher := self._ciphers.get(number)) is None:
            return b""
        try:
            return cipher.decrypt(bytes(value[:_NONCE_SIZE_BYTES]), value[_NONCE_SIZE_BYTES:], associated)
        except InvalidTag:
            return b""

    def _key_of(self, wrapped: WrappedKey) -> LogKey:
        """Return the operator's key that has wrapped this one. Raises LogKeyError if the source has it not."""
        for reads in (False, True):  # the source can have another key by now
            if reads:
                self._operators_keys = read_keys(self.source)
            for key in self._operators_keys:
                if key.id == wrapped.key_id:
                    return key
        have = ", ".join(key.id for key in self._operators_keys)
        raise LogKeyError(
            f"{self._is_encrypted(wrapped)}, and {self.source} has {have}: add that key again, after the one in use"
        )

    def _is_encrypted(self, *stored: WrappedKey) -> str:
        ids = " and ".join(sorted({one.key_id for one in stored}))
        return f"the log of {self._identity.instance_name!r} is encrypted{ids and ' with the key '}{ids}"

    def _wrap_key(self, number: int, secret: bytes, key: LogKey) -> Row:
        nonce = secrets.token_bytes(_NONCE_SIZE_BYTES)
        wrapped = AESGCM(key.secret).encrypt(nonce, secret, self._associated_data(number))
        return meta_row(b"%s%08x" % (META_DATA_KEY, number), WrappedKey(key.id, nonce, wrapped))

    def _associated_data(self, number: int) -> bytes:
        return _ASSOCIATED.pack(self._identity.committer_id, self._identity.created_ns, number)


class Encryptor:
    """Encryption by one data key, which one process uses once. ``rows``: to be written with the first encrypted row."""

    def __init__(self, number: int, secret: bytes, rows: list[Row]) -> None:
        self.rows = rows
        self._cipher = AESGCM(secret)
        self._number = _NUMBER.pack(number)
        self._count = itertools.count()

    def encrypt(self, table: str, key: bytes, value: Readable) -> Readable:
        if (associated := _associated(table, key)) is None:
            return value
        nonce = self._number + next(self._count).to_bytes(8, "big")
        return nonce + self._cipher.encrypt(nonce, value, associated)

    def encrypt_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        for table, key, value in rows:
            yield table, key, self.encrypt(table, key, value)


class _LazyRows(Iterable[Row]):
    """Rows of which there can be too many for memory, encrypted when they are asked for."""

    def __init__(self, encryptor: Encryptor, rows: Iterable[Row]) -> None:
        self._encryptor, self._rows = encryptor, rows

    def __iter__(self) -> Iterator[Row]:
        yield from self._encryptor.rows
        yield from self._encryptor.encrypt_rows(self._rows)


class EncryptingView(View):
    """View of a log without encryption as an encrypted one without authentication, for a copy."""

    def __init__(self, plain: View, identity: LogIdentity, source: str) -> None:
        self._plain = plain
        self._encryptor = DataKeys(identity, source).new_encryptor(plain)
        left_out = (log_format.META_AUTHENTICATED, log_format.META_SEAL)
        rows = {key: bytes(value) for key, value in Span("meta").rows(plain) if key not in left_out}
        new = (meta_row(log_format.META_FORMAT, log_format.ENCRYPTED_VERSION), *self._encryptor.rows)
        self._meta = sorted((rows | {key: bytes(value) for _, key, value in new}).items())
        self._last = (b"", b"")  # the last record, which is asked for again

    def get(self, table: str, key: bytes) -> Readable | None:
        if table == "records" and key == self._last[0]:
            return self._last[1]
        for found, value in self.scan(table, key):
            return value if found == key else None
        return None

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        if table == "meta":
            yield from (row for row in self._meta if row[0] >= first)
        elif table not in log_format.TABLES_OF_SEALS:
            for key, value in self._plain.scan(table, first):
                row = bytes(key), bytes(self._encryptor.encrypt(table, bytes(key), value))
                if table == "records":
                    self._last = row
                yield row

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        for key, value in self._plain.scan_back(table, last):
            yield key, self._encryptor.encrypt(table, bytes(key), value)

    def size(self, table: str) -> TableSize:
        return self._plain.size(table)


# A log's backend.


class DecryptedView(View):
    """View of an encrypted log with its values in plain."""

    def __init__(self, stored: View, keys: DataKeys) -> None:
        self._stored, self._keys = stored, keys

    @property
    def stored(self) -> View:
        return self._stored

    def get(self, table: str, key: bytes) -> Readable | None:
        value = self._stored.get(table, key)
        return None if value is None else self._keys.decrypt(self._stored, table, key, value)

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        return self._decrypt_rows(table, self._stored.scan(table, first))

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        return self._decrypt_rows(table, self._stored.scan_back(table, last))

    def sizes(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, int]]:
        return self._stored.sizes(table, first)

    def size(self, table: str) -> TableSize:
        return self._stored.size(table)

    def _decrypt_rows(
        self, table: str, rows: Iterator[tuple[Readable, Readable]]
    ) -> Iterator[tuple[Readable, Readable]]:
        return ((key, self._keys.decrypt(self._stored, table, bytes(key), value)) for key, value in rows)


class EncryptedBackend:
    """Backend whose values are encrypted in ``backend``; all but views and appends is that one's."""

    __slots__ = ("_backend", "_encryptor", "_keys", "_lock")

    def __init__(self, backend: ReadBackend, source: str, *, writes: bool) -> None:
        """Raises LogKeyError without the key, DamagedLogError."""
        self._backend: Any = backend
        self._keys = DataKeys(backend.identity, source)
        self._lock = threading.Lock()  # a data key that is being stored is wrapped by the new key, too
        self._encryptor: Encryptor
        if writes:
            self.renew_key()
        else:
            with backend.view() as view:
                self._keys.load(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in EncryptedBackend.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._backend, name, value)

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[View]:
        with self._backend.view(copies=copies) as view:
            yield DecryptedView(view, self._keys)

    @property
    def must_append(self) -> bool:
        return bool(self._encryptor.rows)

    def renew_key(self) -> None:
        with self._lock, self._backend.view() as view:
            self._encryptor = self._keys.new_encryptor(view)

    def append(self, append: Append) -> None:
        with self._lock:
            encryptor = self._encryptor
            self._backend.append(_encrypt_append(append, encryptor))
            encryptor.rows = []

    def begin_append(self, append: Append) -> bool:
        encryptor = self._encryptor
        # The data key's row must be known to be there before others need it.
        return not encryptor.rows and self._backend.begin_append(_encrypt_append(append, encryptor))


def encrypted_backend(backend: ReadBackend, source: str, *, writes: bool) -> Backend:
    return cast(Backend, EncryptedBackend(backend, source, writes=writes))


def _encrypt_append(append: Append, encryptor: Encryptor) -> Append:
    encrypt, puts = encryptor.encrypt, append.puts
    return replace(
        append,
        records=[(number, encrypt("records", SEQUENCE_KEY.pack(number), value)) for number, value in append.records],
        puts=[*encryptor.rows, *encryptor.encrypt_rows(puts)] if isinstance(puts, list) else _LazyRows(encryptor, puts),
    )
