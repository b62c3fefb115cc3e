"""Mark of an upgrade that an operator requested for the next start of an instance.

<folder>/upgrade.json exists until the upgrade is durable, or until it has failed and somebody has read why. The log
tells the version of an instance; this file is only a request.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from immortal.coordinator.instances.registry import remove_file, write_text
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import FILE_MODE, make_folder

_FILE_NAME = "upgrade.json"


class UpgradeMarkError(ImmortalError):
    """Raised if the mark's file can't be read or written."""


class UpgradeMark(msgspec.Struct, frozen=True):
    """Requested upgrade to version ``to``. ``app``: "module:Class" with both versions; None: the registered app.
    ``app_before``: the app that the project named before, if it was changed."""

    to: int
    app: str | None = None
    problem: str | None = None  # why it failed
    app_before: str | None = None

    @property
    def pending(self) -> bool:
        return self.problem is None


def read(folder: Path) -> UpgradeMark | None:
    """Read the mark of the instance; None if there is none. Raises UpgradeMarkError."""
    path = folder / _FILE_NAME
    try:
        return decoding.decode_json(path.read_bytes(), type=UpgradeMark)
    except FileNotFoundError:
        return None
    except (decoding.DecodeError, OSError) as error:
        raise UpgradeMarkError(f"{path} can't be read ({error}): remove it to forget the upgrade") from None


def write(folder: Path, mark: UpgradeMark) -> None:
    """Write the mark of the instance. Raises UpgradeMarkError."""
    try:
        make_folder(folder)
        write_text(folder / _FILE_NAME, msgspec.json.encode(mark).decode(), FILE_MODE)
    except OSError as error:
        raise UpgradeMarkError(f"{folder / _FILE_NAME} can't be written: {error.strerror}") from None


def clear(folder: Path) -> None:
    if (folder / _FILE_NAME).exists():
        remove_file(folder / _FILE_NAME)


def mark_failed(folder: Path, problem: str) -> None:
    """Write why the requested upgrade failed, so that it is not tried again. Raises UpgradeMarkError."""
    mark = read(folder)
    if mark is not None and mark.pending:
        write(folder, msgspec.structs.replace(mark, problem=problem))
