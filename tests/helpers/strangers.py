"""Another user of the same machine, whose attempts a test runs. Only root can act as somebody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

STRANGER = 65534  # nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")


def as_stranger(act: Callable[[], object]) -> str:
    """Run ``act`` in a process of that user; return its result, or the name of the OSError that it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it ended without a word"
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            said = str(act())
        except OSError as error:
            said = type(error).__name__
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def open_to_all(folder: Path) -> None:
    """Let everybody read and reach ``folder``, as on a machine whose users share a registry."""
    for one in (folder, *folder.parents):
        if one.stat().st_uid == os.geteuid() and one.stat().st_mode & 0o005 != 0o005:
            one.chmod(one.stat().st_mode | 0o055)


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


def modes(folder: Path) -> dict[str, str]:
    """Return the modes, by path, of ``folder`` and all in it that is not for its owner alone."""
    found = {path: mode(path) for path in (folder, *folder.rglob("*"))}
    private = {path for path, one in found.items() if one == ("0700" if path.is_dir() else "0600")}
    return {str(path.relative_to(folder)): one for path, one in found.items() if path not in private}
