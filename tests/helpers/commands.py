"""Commands of `immortal` that end, each in a process of its own only if that proves something."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from click.testing import CliRunner

from immortal.cli import main

DEADLINE_S = 200.0  # Spark takes 100 s where three tests run beside it on a slow machine
PYTHON = (sys.executable,)
# These ask a running instance, or read files: they import no user code, and leave nothing behind.
HERE = frozenset(
    {
        "audit",
        "call",
        "checkpoint",
        "clock",
        "dead-letters",
        "forget",
        "group",
        "handlers",
        "health",
        "keys",
        "log",
        "pause",
        "peers",
        "queue",
        "register",
        "restart",
        "resume",
        "settings",
        "skip",
        "sql",
        "status",
        "stop",
        "systemd",
        "trace",
        "unregister",
    }
)
# Exceptions: commands that open a log that the test can have open, which LMDB allows a process once, or import code.
NOT_HERE = {("log", "backup"), ("log", "diff"), ("log", "export")}
OF_CODE = {"--app", "--code"}


def run(
    folder: Path,
    *arguments: str,
    home: str | None = None,
    given: str | None = None,
    python: Sequence[str] = PYTHON,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, with ``given`` as its input and additions to the ``environment``.

    It runs in this process, which saves the imports of a start, if the command is one of :data:`HERE` and no other
    ``python`` is given.
    """
    options = [] if home is None else ["--home", home]
    if python == PYTHON and _is_for_here(arguments):
        with contextlib.chdir(folder):
            result = CliRunner().invoke(main, [*options, *arguments], input=given, env=environment)
        said = result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            said += "".join(traceback.format_exception(result.exception))
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, said)
    return subprocess.run(
        [*python, "-m", "immortal", *options, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **(environment or {})},
        **({"stdin": subprocess.DEVNULL} if given is None else {"input": given}),  # type: ignore[call-overload]
    )


def _is_for_here(arguments: Sequence[str]) -> bool:
    return (
        arguments[0] in HERE and tuple(arguments[:2]) not in NOT_HERE and not any(word in OF_CODE for word in arguments)
    )
