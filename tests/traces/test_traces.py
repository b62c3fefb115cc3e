"""The traces of this folder hold, line by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.traces.runner import rewritten

TRACES = sorted(Path(__file__).parent.glob("*.txt"))
REWRITE = "IMMORTAL_REWRITE_TRACES"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_trace(path: Path) -> None:
    written = path.read_text()
    now = rewritten(written)
    if os.environ.get(REWRITE):
        path.write_text(now)
        return
    assert now.split("\n") == written.split("\n"), f"what follows has changed; {REWRITE}=1 writes it as it is now"


def test_there_are_traces() -> None:
    assert len(TRACES) >= 12


@pytest.mark.parametrize("script", ["the app dances", "it works\n\nb sings"])
def test_a_line_that_nobody_knows(script: str) -> None:
    with pytest.raises(ValueError, match="no command is like"):
        rewritten(script)
