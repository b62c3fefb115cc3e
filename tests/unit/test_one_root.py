"""Every module of ours has one name, below `immortal`: as `coordinator.x` it would be loaded a second time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = {path.name for path in (ROOT / "immortal").iterdir() if path.is_symlink()}
FOLDERS = [ROOT / name for name in (*sorted(ROOMS), "examples", "scripts", "tests")]
NAMES_A_ROOM = re.compile(rf"\b(?:import|from)\b.*(?<!\.)\b(?:{'|'.join(ROOMS)})\b")
USERS_OWN = {ROOT / "tests" / "scenarios" / "test_user_module_names.py"}


def imported(path: Path) -> Iterator[str]:
    text = path.read_text()
    if not NAMES_A_ROOM.search(text):
        return  # parsing takes long
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_nothing_imports_a_room_by_its_folder() -> None:
    assert len(ROOMS) == 9
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        if path not in USERS_OWN
        for name in imported(path)
        if name.partition(".")[0] in ROOMS
    ]
    assert wrong == []


def test_a_link_leads_to_the_room_of_its_name() -> None:
    for name in ROOMS:
        assert (ROOT / "immortal" / name).readlink() == Path("..", name)
