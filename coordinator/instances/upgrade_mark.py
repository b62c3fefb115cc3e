"""What an operator has asked for, and not got yet: the upgrade of one instance at its next start.

<folder>/upgrade.json says so until the upgrade is durable, or until it has failed and somebody has read why. The log
alone decides which version an instance has: this file is a wish.
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
    """The file says nothing that is understood."""


class UpgradeMark(msgspec.Struct, frozen=True):
    """``app``: "module:Class" that holds both versions; None: the one that is registered."""

    to: int
    app: str | None = None
    problem: str | None = None  # why it was given up

    @property
    def pending(self) -> bool:
        return self.problem is None


def read(folder: Path) -> UpgradeMark | None:
    """Raises UpgradeMarkError."""
    path = folder / _FILE_NAME
    try:
        return decoding.decode_json(path.read_bytes(), type=UpgradeMark)
    except FileNotFoundError:
        return None
    except (decoding.DecodeError, OSError) as error:
        raise UpgradeMarkError(f"{path} can't be read ({error}): remove it to forget the upgrade") from None


def write(folder: Path, mark: UpgradeMark) -> None:
    """Raises UpgradeMarkError."""
    try:
        make_folder(folder)
        write_text(folder / _FILE_NAME, msgspec.json.encode(mark).decode(), FILE_MODE)
    except OSError as error:
        raise UpgradeMarkError(f"{folder / _FILE_NAME} can't be written: {error.strerror}") from None


def clear(folder: Path) -> None:
    if (folder / _FILE_NAME).exists():
        remove_file(folder / _FILE_NAME)


def give_up(folder: Path, problem: str) -> None:
    """The upgrade that is asked for is not to be tried again."""
    mark = read(folder)
    if mark is not None and mark.pending:
        write(folder, msgspec.structs.replace(mark, problem=problem))
