"""The pipeline on logs as they come out of real life: those of the demo, whose processes are killed while they work."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.core.interfaces import IMPULSES

DEMO = Path(__file__).parents[2] / "examples" / "wordcount" / "demo.py"
LINES = 4_000
pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The registry's home of a small run with two kills."""
    folder = tmp_path_factory.mktemp("demo")
    rng = random.Random(2)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(rng.choices(("to", "be", "or", "not"), k=4)) for _ in range(LINES)))
    command = [sys.executable, str(DEMO), str(text), "--crashes", "2", "--seed", "2", "--keep", str(folder / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout
    return folder / "kept" / "registry"


def values(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["pipeline", *map(str, arguments), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_was_killed_and_recovered_is_sound(home: Path, tmp_path: Path) -> None:
    """All lines, from the first to the last, in the logs and in an export of them."""
    values("export", home, "--to", tmp_path / "export", "--tables", "raw")
    for source in (home, tmp_path / "export"):
        report = values("audit", source)
        assert report["sound"]
        streams = {(each["sender"], each["receiver"]): each for each in report["streams"]}
        assert streams.keys() == {(IMPULSES, "reader"), ("reader", "counter")}
        for stream in streams.values():
            assert (stream["messages"], stream["first"], stream["last"], stream["in_flight"]) == (LINES, 1, LINES, 0)
    assert values("verify", home)["sound"]
    services = {each["instance"]: each["figures"]["calls"] for each in values("stats", home)["services"]}
    assert services == {"counter": LINES, "reader": LINES}
