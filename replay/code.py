"""Which code an app has run: the modules that it has loaded of the user's, and their digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from immortal.protocol import decoding

DIGEST_SHOWN_SIZE = 16  # characters


class Code(Struct, frozen=True):
    """``digest``: SHA-256 over names and contents, wherever the files are. ``file``: of the module of the class."""

    digest: str
    modules: int
    file: str

    def __str__(self) -> str:
        count = "1 module" if self.modules == 1 else f"{self.modules} modules"
        return f"{self.file}, {count} with digest {self.digest[:DIGEST_SHOWN_SIZE]}"


def read_code(app: str, notes: Path) -> Code | None:
    """What ``app`` ("module:Class") has noted so far; None where nothing is known."""
    try:
        lines = notes.read_text().splitlines()
    except FileNotFoundError:
        return None
    rows = {row["module"]: row for row in map(decoding.load_json, lines)}
    main = rows.get(app.partition(":")[0])
    if main is None:
        return None
    contents = "".join(f"{name} {row['sha256']}\n" for name, row in sorted(rows.items()))
    return Code(hashlib.sha256(contents.encode()).hexdigest(), len(rows), main["file"])


def code_values(code: Code | None) -> dict[str, Any] | None:
    return None if code is None else asdict(code)
