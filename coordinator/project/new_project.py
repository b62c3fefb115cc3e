"""New projects by `immortal init`, from templates: folders of files beside this module.

In a template @name@ stands for the project's name, and @package@ for what a package of that name is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from immortal.protocol.errors import ImmortalError

_FOLDER = Path(__file__).parent / "templates"
_COMMON = "common"  # in all projects
_SUFFIX = ".template"  # no tool takes them for its own files
TEMPLATES = ("shop", "agent", "worker")


class NewProjectError(ImmortalError):
    """Raised if a project can't be made: the name is wrong, or a file exists already."""


def make_project(folder: Path, name: str, template: str) -> list[Path]:
    """Write the files of ``template`` into ``folder``, which is made if missing; return their paths.

    Existing files are not overwritten. Raises NewProjectError, OSError.
    """
    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not package or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NewProjectError(
            f"{name!r} is no name for a project: letters, digits, '-', '_' and '.', starting with a letter or digit"
        )
    files = {
        folder / file: text.replace("@name@", name).replace("@package@", package) for file, text in _texts(template)
    }
    if there := [file for file in files if file.exists()]:
        raise NewProjectError(f"{there[0]} is there already, nothing was written: 'immortal init NAME' makes a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    return list(files)


def _texts(template: str) -> Iterator[tuple[str, str]]:
    for part in (template, _COMMON):
        for file in sorted((_FOLDER / part).iterdir()):
            if file.name.endswith(_SUFFIX):
                yield file.name.removesuffix(_SUFFIX), file.read_text("utf-8")
