"""Libraries that come in front of libc in the processes of a test, made from C sources beside this file."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@functools.cache
def library(name: str) -> str:
    """Where the compiled NAME.c is, for LD_PRELOAD; the test is skipped where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler to make {name} with")
    path = Path(tempfile.mkdtemp(prefix="immortal-shims-")) / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"], check=True)
    return str(path)
