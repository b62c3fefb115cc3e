"""What is inside a state: asked of the SDK, in a process of its own, since only the user's class can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from immortal.protocol import decoding
from immortal.replay.app import code_environment
from immortal.replay.errors import ReplayError

DIFFERENCES_MAX = 20


def show_state(app: str, blob: Path) -> dict[str, Any]:
    """The state in the file ``blob`` as the class ``app`` ("module:Class") reads it: plain JSON values.

    Raises ReplayError.
    """
    shown: dict[str, Any] = _inspect("show", app, str(blob))
    return shown


def diff_states(
    old_app: str, old: Path, new_app: str, new: Path, *, limit: int = DIFFERENCES_MAX, new_code: Path | None = None
) -> list[dict[str, Any]]:
    """Where two states differ: [{"path", "old", "new"}], at most ``limit``; what a side has not is left out.

    ``new_code``: where the modules of the new side are, see :class:`replay.app.AppCommand`. One process can't have two
    classes of one name, so each side then says what it has; attributes of objects within the state are shown as keys.

    Raises ReplayError.
    """
    if new_code is not None:
        shown = []
        for app, blob, code in ((old_app, old, None), (new_app, new, new_code)):
            shown.append(blob.with_name(f"{blob.name}.json"))
            shown[-1].write_text(json.dumps(_inspect("show", app, str(blob), code=code)))
        found: list[dict[str, Any]] = _inspect("diff-shown", *map(str, shown), "--limit", str(limit))
        return found
    differences: list[dict[str, Any]] = _inspect("diff", old_app, str(old), new_app, str(new), "--limit", str(limit))
    return differences


def write_rows(app: str, blob: Path, out: Path) -> None:
    """The state as rows of tables: a JSON list [table, row] on each line of the file ``out``. Raises ReplayError."""
    _inspect("rows", app, str(blob), str(out))


def method_names(app: str) -> dict[tuple[str, int], str]:
    """(destination, method ID) to a name, as the class ``app`` ("module:Class") has them. Raises ReplayError."""
    found: list[tuple[str, int, str]] = _inspect("methods", app, what="the class")
    return {(destination, method_id): name for destination, method_id, name in found}


def unanswered(app: str, blob: Path, code: Path | None = None) -> list[dict[str, Any]]:
    """What the handlers of the class ``app`` wait for in the state ``blob`` at the end of a what-if, and the log does
    not have: [{"handler", "arguments", "waits_for"}]. Raises ReplayError.
    """
    found: list[dict[str, Any]] = _inspect("unanswered", app, str(blob), code=code)
    return found


def _inspect(*arguments: str, what: str = "the state", code: Path | None = None) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), **code_environment(code)}
    command = [sys.executable, "-P", "-m", "immortal.appsdk.running.inspection", *arguments]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise ReplayError(f"{what} can't be looked into: {said or f'status {done.returncode}'}")
    try:
        return decoding.load_json(done.stdout)
    except ValueError as error:
        raise ReplayError(f"{what} can't be looked into: the answer is no JSON: {error}") from None
