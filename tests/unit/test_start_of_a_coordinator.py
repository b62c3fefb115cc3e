"""What a process has loaded once it is a coordinator, and what it has where it is something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAYS_WHOSE_HASHES = """
import contextlib, runpy, sys
sys.argv = ["immortal", *sys.argv[1:]]
with contextlib.suppress(SystemExit):
    runpy.run_module("immortal", run_name="__main__")
import hashlib
print("\\n" + hashlib.sha256(b"").__class__.__module__)
"""


@pytest.mark.parametrize("home", [True, False], ids=["--home", "IMMORTAL_HOME"])
@pytest.mark.parametrize(("verb", "is_coordinator"), [("coordinator", True), ("status", False)])
def test_only_a_coordinator_does_without_openssl(tmp_path: Path, verb: str, is_coordinator: bool, home: bool) -> None:
    argv = [sys.executable, "-c", SAYS_WHOSE_HASHES, *(["--home", str(tmp_path)] if home else []), verb, "nobody"]
    environment = {**os.environ, "IMMORTAL_HOME": str(tmp_path)}
    said = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (said.stdout.splitlines()[-1] != "_hashlib") is is_coordinator, said.stderr
