"""Distribution data: its name on package indexes, commands that install it, and a check for another `immortal`.

Another project has the name `immortal` on package indexes; the module is `immortal` all the same. pyproject.toml, the
templates of projects, the image and the docs repeat the name; a test compares them with this one.
"""

from __future__ import annotations

import os
import shlex
import sys

from immortal.protocol.errors import ImmortalError

NAME = "immortal-services"


def add_extra(name: str) -> str:
    """Return the shell command that adds one of our extras to this installation."""
    return pip("install", f"{NAME}[{name}]")


def pip(verb: str, *arguments: str) -> str:
    """Return the shell command that changes this Python's environment with pip, or with uv if there is no pip."""
    from importlib.util import find_spec

    with_pip, with_uv = [sys.executable, "-m", "pip", verb], ["uv", "pip", verb, "--python", sys.executable]
    return shlex.join([*(with_pip if find_spec("pip") else with_uv), *arguments])


def origin() -> str:
    """Return pip's argument to install this version again: a file, a folder, or name and version.

    Raises importlib.metadata.PackageNotFoundError for sources that are not installed.
    """
    from importlib import metadata

    from immortal.protocol.decoding import load_json

    ours = metadata.distribution(NAME)
    found = load_json(ours.read_text("direct_url.json") or "{}")
    if "vcs_info" in found:
        return f"{found['vcs_info']['vcs']}+{found['url']}@{found['vcs_info']['commit_id']}"
    return str(found.get("url") or f"{NAME}=={ours.version}")


def refuse_another() -> None:
    """Raise ImmortalError if another project's `immortal` is installed in our folder: its files replace ours."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # above the package
    try:
        found = [name for name in os.listdir(folder) if name.startswith("immortal-") and name.endswith(".dist-info")]
    except OSError:
        return  # in an archive, where nobody installs
    if found:
        again = f"{pip('uninstall', 'immortal')} && {pip('install', '--force-reinstall', '--no-deps', origin())}"
        raise ImmortalError(
            f"{found[0].removesuffix('.dist-info')} is installed in {folder}: it is another project's package, or this"
            f" one from before it was called {NAME}, and both have a module 'immortal'. Remove it, and install this one"
            f" again: {again}"
        )
