"""Code kept beside a log: an archive for each digest, and an index of the code that ran from each record on.

The app writes both when it begins to work. Replays of older records read them. A coordinator removes code of records
that its log no longer has. The folder is the instance's own and has its keys in it, so this code is as trusted as the
keys are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from immortal.protocol import decoding
from immortal.protocol.files import make_folder, replace_file

FOLDER_NAME = "code"
FOLDER_VARIABLE = "IMMORTAL_KEPT_CODE"
"""Environment variable with the folder in which an app keeps its code; without the variable the app keeps none."""
SOURCES_SIZE_BYTES_MAX = 8 << 20  # of one app: larger code is not kept
STARTS_MAX = 200  # the oldest are dropped: a developer saves often

_INDEX = "index.json"
_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal sources give equal archives


class CodeStart(msgspec.Struct, frozen=True):
    """Entry of the index: the code with ``digest`` handles records from ``first`` on, up to the next entry's.
    ``app``: "module:Class". ``files``: the SHA-256 of each source, by its path where it ran.
    """

    first: int
    digest: str
    app: str
    files: dict[str, str] = {}

    def archive(self, folder: Path) -> Path:
        return folder / f"{self.digest}.zip"

    def is_on_disk(self) -> bool:
        """Return True if all sources of the code are still on disk, unchanged, where it ran."""
        with contextlib.suppress(OSError):
            return all(hashlib.sha256(Path(file).read_bytes()).hexdigest() == sha for file, sha in self.files.items())
        return False


def read_index(folder: Path) -> list[CodeStart]:
    """Read the index, oldest first; return an empty list if there is no readable index."""
    try:
        return decoding.decode_json((folder / _INDEX).read_bytes(), type=list[CodeStart])
    except (OSError, decoding.DecodeError):
        return []


def code_at(folder: Path, sequence_id: int) -> CodeStart | None:
    """Return the code that handled a record; None if it is not kept."""
    found = [start for start in read_index(folder) if start.first <= sequence_id]
    return found[-1] if found and found[-1].archive(folder).is_file() else None


def store(folder: Path, app: str, sources: Mapping[str, tuple[str, bytes]], first: int) -> bool:
    """Keep the code that handles records from ``first`` on. ``sources``: name in the archive to (path, content).

    This removes entries of later records from the index: the log was cut, or is another one. Returns False if the code
    is too large. Raises OSError.
    """
    if sum(len(source) for _, source in sources.values()) > SOURCES_SIZE_BYTES_MAX:
        return False
    import zipfile  # costs a MiB; a coordinator, which only removes archives, does not load it

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        folders = {f"{parent}/" for source in sources for parent in _parents(source)}
        for name in sorted(folders | set(sources)):
            content = b"" if name.endswith("/") else sources[name][1]
            archive.writestr(zipfile.ZipInfo(name, _ENTRY_TIME), content, zipfile.ZIP_DEFLATED)
    names = "".join(f"{name} {hashlib.sha256(source).hexdigest()}\n" for name, (_, source) in sorted(sources.items()))
    digest = hashlib.sha256(names.encode()).hexdigest()
    files = {path: hashlib.sha256(source).hexdigest() for path, source in sources.values()}
    known = [start for start in read_index(folder) if start.first < first]
    start = CodeStart(first, digest, app, files)
    if known and (known[-1].digest, known[-1].app, known[-1].files) == (digest, app, files):
        start = known.pop()
    make_folder(folder)
    if not start.archive(folder).is_file():
        replace_file(start.archive(folder), packed.getvalue(), is_synced=True)
    _write_index(folder, [*known, start])
    return True


def forget(folder: Path, first_sequence_id: int) -> None:
    """Remove code that handled only records before ``first_sequence_id``. Raises OSError."""
    known = read_index(folder)
    behind = [start for start in known if start.first <= first_sequence_id]
    if len(behind) > 1:
        _write_index(folder, known[len(behind) - 1 :])


def _parents(name: str) -> list[str]:
    return ["/".join(name.split("/")[:count]) for count in range(1, name.count("/") + 1)]


def _write_index(folder: Path, known: Sequence[CodeStart]) -> None:
    known = known[-STARTS_MAX:]
    replace_file(folder / _INDEX, msgspec.json.encode(known), is_synced=True)
    kept = {start.archive(folder).name for start in known}
    for file in folder.glob("*.zip"):
        if file.name not in kept:
            file.unlink(missing_ok=True)
