"""Traces: lines of what happens to an instance, and below each block of them what follows, as text.

    # What it is about.

    the app makes call 1 to b
    ----
    to b: BATCH 1 (call 1)

IMMORTAL_REWRITE_TRACES=1 writes what follows now into the files, for people to read the difference.
"""

from __future__ import annotations

from tests.traces.instance import Instance

LINE = "----"
SETUP = ("it works", "limit ", "the disk ")  # nothing follows from these, and nothing need be said of it


def rewritten(script: str) -> str:
    """``script`` with what its lines bring about now. Raises ValueError for a line that is no command."""
    instance = Instance()
    return "\n\n".join(_block(instance, block) for block in script.strip().split("\n\n")) + "\n"


def _block(instance: Instance, block: str) -> str:
    lines = block.split("\n")
    asked = lines[: lines.index(LINE)] if LINE in lines else lines
    commands = [line for line in asked if not line.startswith("#")]
    if not commands:
        return "\n".join(asked)
    said = [line for one in commands for line in instance.do(one)]
    if not said and all(one.startswith(SETUP) for one in commands):
        return "\n".join(asked)
    return "\n".join([*asked, LINE, *(said or ["nothing"])])
