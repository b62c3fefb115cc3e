"""Libraries that are preloaded before libc in the processes of a test, compiled from C sources beside this file."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@functools.cache
def library(name: str) -> str:
    """Return the path of the compiled NAME.c, for LD_PRELOAD; skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler to make {name} with")
    path = Path(tempfile.mkdtemp(prefix="immortal-shims-")) / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"], check=True)
    return str(path)
