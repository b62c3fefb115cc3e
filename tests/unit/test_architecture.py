"""docs/ARCHITECTURE.md: what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
ROOMS = (
    "appsdk",
    "bench",
    "cli",
    "coordinator",
    "pipeline",
    "presenters",
    "protocol",
    "replay",
    "scripts",
    "tests",
    "web",
)


def test_each_file_and_folder_with_its_path_is_there() -> None:
    named = set(re.findall(rf"\b(?:{'|'.join(ROOMS)})/[\w./]*\w(?:\.py)?/?", TEXT))
    assert len(named) > 50
    assert not {name for name in named if not (ROOT / name).exists()}


def test_each_top_level_package_has_its_row() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    rows = TEXT[TEXT.index("## Folders") :]
    assert not {name for name in packages if f"`{name}/" not in rows}
