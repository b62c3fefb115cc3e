"""The Pythons of this machine that a wheel may be installed for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "IMMORTAL_TEST_PYTHONS"
"""``all``: each minor version that is found; scripts/wheels sets it. Else the tests' own Python alone."""
MINORS = (11, 12, 13, 14)


def interpreters() -> dict[str, str]:
    """Executables by version, such as "3.12"."""
    own = f"3.{sys.version_info[1]}"
    if os.environ.get(VARIABLE) != "all":
        return {own: sys.executable}
    found = {own: sys.executable}
    for executable in _candidates():
        version = _version(executable)
        if version is not None and version not in found:
            found[version] = executable
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition(".")[2])))


def _candidates() -> Iterator[str]:
    """Those of the path, then those that pyenv has, whatever is switched on there."""
    for minor in MINORS:
        executable = shutil.which(f"python3.{minor}")
        if executable is not None:
            yield executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob("versions/3.*/bin/python3")))


def _version(executable: str) -> str | None:
    """ "3.12" where it runs (a shim of pyenv may not), is one of ours, and can make environments."""
    program = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    version = done.stdout.strip()
    return version if done.returncode == 0 and version in {f"3.{minor}" for minor in MINORS} else None
