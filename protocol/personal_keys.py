"""Keys of persons: a folder with one key for each person, which encrypts all that apps mark as personal.

To forget a person is to destroy the key: its file is overwritten, and replaced by a file with the date. Keys are in no
log, so they are in no backup or archive of a log either (docs/decisions/0098).

<folder>/<SHA-256 of the subject>           JSON of a :class:`Person`
<folder>/<SHA-256 of the subject>.destroyed a key that is being overwritten
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from immortal.protocol import decoding, shared_registry
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import describe_open_access, make_folder, opened, replace_file, sync_folder
from immortal.protocol.shared_registry import HOME_DEFAULT, HOME_VARIABLE, is_url

KEYS_VARIABLE = "IMMORTAL_PERSONAL_KEYS"
"""Variable with the folder; by default ``.personal`` in the home."""
NOTES_VARIABLE = "IMMORTAL_FORGOTTEN_NOTES"
"""Variable with a file that gets a line for each forgotten person whose data was asked for. Set only in replays
and tests, which make no keys."""
REHEARSED_VARIABLE = "IMMORTAL_FORGOTTEN"
"""Variable with a JSON list of subjects that count as forgotten, for a rehearsal."""

FOLDER_NAME = ".personal"
SUBJECT_CHARACTERS_MAX = 200
_KEY_SIZE_BYTES = 64
_DESTROYED = ".destroyed"
noted: set[str] = set()
"""IDs of forgotten persons whose data this process has asked for, if it is a replay."""


class PersonalKeyError(ImmortalError):
    """Raised if the key of a person can't be read or stored here, or does not decrypt the value."""


class Person(msgspec.Struct, frozen=True, omit_defaults=True):
    """Person by the ID that apps gave. ``key``: hex digits, "" once ``forgotten`` has the date (YYYY-MM-DD)."""

    subject: str
    key: str = ""
    forgotten: str = ""

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.key)) != (0 if self.forgotten else _KEY_SIZE_BYTES):
            raise ValueError(f"a key of {_KEY_SIZE_BYTES} bytes was expected")


_PERSON = decoding.JsonDecoder(Person)


def environment() -> dict[str, str]:
    """Return the environment variable that makes a child process use the same keys."""
    if given := os.environ.get(KEYS_VARIABLE):
        return {KEYS_VARIABLE: given}
    home = str(shared_registry.chosen_home or os.environ.get(HOME_VARIABLE) or HOME_DEFAULT)
    return {KEYS_VARIABLE: home if is_url(home) else str(Path(home).absolute() / FOLDER_NAME)}


def folder() -> Path:
    """Return the folder of the keys. Raises PersonalKeyError if the home is a database and no folder is named."""
    place = environment()[KEYS_VARIABLE]
    if is_url(place):
        raise PersonalKeyError(
            f"the home is a database, so {KEYS_VARIABLE} must name a folder for keys of persons that all machines share"
        )
    return Path(place)


def find(subject: str) -> Person | None:
    """Return the person with this ID; None if the folder has none. In a replay, note it if the person is forgotten.

    Raises PersonalKeyError.
    """
    if (rehearsed := os.environ.get(REHEARSED_VARIABLE)) and subject in decoding.load_json(rehearsed):
        found: Person | None = Person(subject, forgotten="a rehearsal")
    else:
        found = _read(_path(subject))
    if found is None and NOTES_VARIABLE in os.environ:  # every replay gets the same key, and stores none
        return Person(subject, hashlib.sha512(b"replay " + subject.encode()).hexdigest())
    if found is not None and found.forgotten:
        _note_forgotten(subject)
    return found


def find_or_create(subject: str) -> Person:
    """Return the person with this ID; create a key for a new ID. Raises PersonalKeyError."""
    path = _path(subject)
    if (found := find(subject)) is not None:
        with contextlib.suppress(OSError):
            if path.stat().st_nlink > 1:  # another process is just making it
                sync_folder(path.parent)
        return found
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        make_folder(path.parent)
        if problem := describe_open_access(path.parent):
            raise PersonalKeyError(problem)
        replace_file(made, msgspec.json.encode(Person(subject, secrets.token_hex(_KEY_SIZE_BYTES))), is_synced=True)
        with contextlib.suppress(FileExistsError):  # another process was faster: its key counts
            os.link(made, path)
        sync_folder(path.parent)
        sync_folder(path.parent.parent)  # the folder itself can be new
        made.unlink()
    except OSError as error:
        raise PersonalKeyError(f"the key of {subject!r} can't be stored in {path.parent}: {error}") from None
    if (found := find(subject)) is None:
        raise PersonalKeyError(f"{path} is no key of a person, but a link to a file that is missing: bring that back")
    return found


def destroy(subject: str, date: str) -> Person | None:
    """Destroy a person's key; return the person as known before, None for an unknown one. Raises PersonalKeyError.

    A second call finishes what a crash has interrupted.
    """
    path, destroyed = _path(subject), _destroyed(subject)
    old = _read(path)
    try:
        if old is not None and not old.forgotten:
            with contextlib.suppress(FileExistsError):
                os.link(path, destroyed)
            replace_file(path, msgspec.json.encode(Person(subject, forgotten=date)), is_synced=True)
            sync_folder(path.parent)
        if destroyed.exists():
            with opened(destroyed, os.O_WRONLY) as descriptor:
                os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
                os.fsync(descriptor)
            destroyed.unlink()
            sync_folder(path.parent)
    except OSError as error:
        raise PersonalKeyError(
            f"the key of {subject!r} can't be destroyed: {error}: mend that, then do it again"
        ) from None
    return old


def all_persons() -> Iterator[Person]:
    """Yield all persons, sorted by the hash of their IDs. Raises PersonalKeyError."""
    place = folder()
    try:
        paths = sorted(place.iterdir()) if place.exists() else []
    except OSError as error:
        raise PersonalKeyError(f"the folder of keys {place} can't be read: {error.strerror}") from None
    for path in paths:
        if not path.suffix and not path.name.startswith(".") and (found := _read(path)) is not None:
            yield found


@contextlib.contextmanager
def without_new_keys() -> Iterator[None]:
    """Store no new keys inside the block, as in a replay."""
    is_replay = NOTES_VARIABLE in os.environ
    os.environ.setdefault(NOTES_VARIABLE, os.devnull)
    try:
        yield
    finally:
        if not is_replay:  # otherwise this process would encrypt later values with a key that anybody can compute
            os.environ.pop(NOTES_VARIABLE, None)


def _note_forgotten(subject: str) -> None:
    """Note in a replay that data of a forgotten person was asked for."""
    if subject not in noted and (notes := os.environ.get(NOTES_VARIABLE)):
        noted.add(subject)
        with open(notes, "ab") as file:
            file.write(msgspec.json.encode(subject) + b"\n")


def read_notes(notes: Path) -> list[str]:
    """Return the subjects noted in a file, sorted."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(set(map(decoding.load_json, notes.read_text().splitlines())))
    return []


def has_leftover_key(subject: str) -> bool:
    """Return True if a crash has left the key of a forgotten person on the disk."""
    return _destroyed(subject).exists()


def _destroyed(subject: str) -> Path:
    return _path(subject).with_suffix(_DESTROYED)


def _path(subject: str) -> Path:
    return folder() / hashlib.sha256(subject.encode(errors="surrogatepass")).hexdigest()


def _read(path: Path) -> Person | None:
    problem: object = ""
    for _ in range(2):  # the first attempt can read a key that is just being overwritten
        try:
            return _PERSON.decode(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, decoding.DecodeError) as error:
            problem = error
    raise PersonalKeyError(f"the key of a person in {path} can't be read: {problem}: restore the file")
