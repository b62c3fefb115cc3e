"""scripts/bench: the smallest parts run, check what they measure, and end in JSON and a report. No time is judged."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from immortal.bench.harness import Figure, Target
from scripts.benchmarks.parts import PARTS
from scripts.benchmarks.report import write_report
from tests.helpers.postgres import binaries

ROOT = Path(__file__).parents[2]


def bench(*arguments: str, status: int = 0) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "figures.json"
    logs = folder / "logs"
    logs.mkdir()
    briefly = ("--quick", "--only", "start", "--only", "calls", "--repeats", "2", "--seconds", "0.05")
    printed = bench(*briefly, "--folder", f"{logs}", "--json", f"{file}")
    assert list(logs.iterdir()) == []
    return file, printed, json.loads(file.read_text())


def test_figures_in_json(run: tuple[Path, str, dict[str, Any]]) -> None:
    _, printed, result = run
    assert set(result["parts"]) == {"start", "calls"}
    assert (result["quick"], result["repeats"], result["version"]) == (True, 2, 1)
    assert {"processor", "cores", "kernel", "python", "packages", "commit"} <= set(result["machine"])
    assert len(result["load"]["start"]) == len(result["load"]["end"]) == 3
    figures = {}
    for part in result["parts"].values():
        assert part["error"] == ""
        figures.update({data["name"]: Figure.from_json(data) for data in part["figures"]})
    for figure in figures.values():
        assert all(implementation.split()[0] in printed for implementation in figure.samples)
        assert figure.better in ("higher", "lower")
        for values in figure.samples.values():
            assert len(values) >= 2
            assert all(value > 0 for value in values)
    p50 = figures["one awaited call at a time, p50"]
    assert {"immortal", "grpc asyncio", "grpc threads", "loopback TCP", "disk: append + fdatasync"} == set(p50.samples)
    assert [target.met(p50.samples) is not None for target in p50.targets] == [True]
    assert {"immortal", "grpc asyncio", "bare Python loop"} == set(figures["1000 awaited calls outstanding"].samples)


@pytest.mark.skipif(binaries() is None, reason="there is no PostgreSQL")
def test_a_log_in_postgresql_is_beside_one_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    file = tmp_path / "figures.json"
    tmp_path.chmod(0o755)
    bench("--quick", "--only", "database", "--repeats", "1", "--seconds", "0.02", "--json", f"{file}")
    part = json.loads(file.read_text())["parts"]["database"]
    assert part["error"] == ""
    figures = {data["name"]: Figure.from_json(data) for data in part["figures"]}
    both = {"immortal", "immortal, log in PostgreSQL"}
    assert all(set(figure.samples) >= both for figure in figures.values())
    asked = [target for figure in figures.values() for target in figure.targets if not target.against]
    assert [target.in_words("calls/s") for target in asked] == ["at least 300,000 calls/s"]
    p50 = figures["1 awaited at a time, log in PostgreSQL, p50"]
    assert [target.met(p50.samples) is not None for target in p50.targets] == [True]


def test_report(run: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    file, _, _ = run
    bench("--report", f"{file}", "--report", f"{file}", "--docs", f"{tmp_path}")
    text = (tmp_path / "benchmarks" / "figures.txt").read_text()
    assert "| figure | target | measured (in each run) |" in text
    assert "## Awaited calls" in text
    assert "## What the rivals do that Immortal does not" in text
    assert "Run 1 did not have: one-way calls" in text
    chart = tmp_path / "benchmarks" / "awaited-calls.png"
    assert "](benchmarks/awaited-calls.png)" in text
    assert chart.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing"], "'nothing' is not one of"),
        (["--log-sizes", "x"], "expected sizes in GiB"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--report", f"{ROOT / 'pyproject.toml'}"], "is no file of figures"),
    ],
)
def test_called_wrongly(arguments: list[str], words: str) -> None:
    assert words in " ".join(bench(*arguments, status=2).replace("│", " ").split())


def test_each_part_is_a_function() -> None:
    found = {}
    for path in (ROOT / "scripts/benchmarks/parts").glob("[!_]*.py"):
        module = importlib.import_module(f"scripts.benchmarks.parts.{path.stem}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and getattr(value, "__annotations__", None) == {
                "context": "Context",
                "return": "list[Figure]",
            }:
                found[name] = path.stem
    assert {name: module for name, module in found.items() if not name.startswith("_")} == {
        name: module for name, (module, _) in PARTS.items()
    }


def test_targets() -> None:
    samples = {"immortal": [30.0, 40.0, 100.0], "rival": [10.0, 20.0, 20.0]}
    assert Target("at least", 40.0).met(samples) is True
    assert Target("at most", 39.0).met(samples) is False
    by_turn = Target("at least", 3.0, "rival")
    assert by_turn.measured(samples) == 3.0  # of 3, 2 and 5
    assert by_turn.met(samples) is True
    assert Target("at least", 1.0, "nobody").met(samples) is None
    assert Target("at most", 1.0, of="nobody").met(samples) is None


def test_each_run_keeps_its_own_figures_in_the_report(run: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    _, _, result = run

    def one(speed: float) -> dict[str, Any]:
        figure = Figure("speed", "calls/s", "higher", {"immortal": [speed]}, [Target("at least", 5.0)])
        return {**result, "parts": {"start": {**result["parts"]["start"], "figures": [asdict(figure)]}}}

    report = write_report([one(2.0), one(6.0), one(4.0)], tmp_path).read_text()
    assert "| speed | at least 5 calls/s | 4 (2; 6; 4), **missed** |" in report
