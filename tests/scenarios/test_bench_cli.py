"""`immortal bench` runs, checks what it measures, and says it in a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from immortal.bench.calls import EMBEDDED, SIDECARS
from immortal.bench.hops import STEPS
from immortal.bench.processes import start_module
from immortal.bench.workload import Case
from immortal.cli import main

BRIEFLY = ["bench", "--calls", "--outstanding", "1,20", "--size", "100", "--seconds", "0.05", "--repeats", "2"]


def bench(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, [*BRIEFLY, "--folder", str(folder), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def figures_of(*arguments: str) -> dict[str, Any]:
    """Return the figures by name; each is sensible."""
    result = CliRunner().invoke(main, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures = {one["name"]: one["samples"] for one in json.loads(result.stdout)}
    assert all(min(values) >= 0 < max(values) for samples in figures.values() for values in samples.values())
    return figures


def test_calls_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock(side_effect=start_module)
    monkeypatch.setattr("immortal.bench.calls.start_module", started)
    figures = figures_of(*BRIEFLY[1:], "--folder", str(tmp_path))
    (one,) = started.call_args_list
    assert one.kwargs["cwd"].parent == tmp_path, "it would import what others have put into that folder, such as /tmp"
    for count in (1, 20):
        what = f"{count} waiting, 100 B"
        p50, p99 = figures[f"{what}, p50"], figures[f"{what}, p99"]
        assert set(p50) == {"immortal", "disk: append + fdatasync"}
        assert all(len(p50[name]) == 2 for name in p50)
        assert all(low <= high for low, high in zip(p50["immortal"], p99["immortal"], strict=True))
        *parts, total = figures[f"{what}: CPU"].values()
        assert total == pytest.approx([sum(turn) for turn in zip(*parts, strict=True)])
    assert figures["one awaited call without sockets, disk and wake-ups: CPU"]["immortal"][0] < 100_000
    assert list(tmp_path.iterdir()) == []


def test_calls_in_words_where_the_user_has_a_module_called_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are started in that folder, and import ours."""
    (tmp_path / "bench.py").write_text("")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "disk: append + fdatasync" in bench(Path("logs"))


def test_the_hops_of_a_call_add_up_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.bench.calls.WHERE_CALLS", 200)
    figures = figures_of("--calls", "--where", "--repeats", "1", "--folder", str(tmp_path))
    times_us = {name: samples["immortal"][0] for name, samples in figures.items()}
    whole_us = times_us.pop("16 B: p50 with stamps")
    times_us.pop("16 B: p50 without stamps")
    assert len(times_us) == len(STEPS) - 1
    assert whole_us / 3 < sum(times_us.values()) < 3 * whole_us, times_us
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--outstanding", "0"], "expected numbers of calls, 1 to 100000"),
        (["--outstanding", "x"], "expected numbers of calls"),
        (["--size", "7"], "8<=x<=16777216"),
        (["--failing"], "each measure something else"),
        (["--curve"], "each measure something else"),
        (["--log-key"], "is for one-way calls"),
    ],
)
def test_called_wrongly(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, [*BRIEFLY, *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_one_process_beside_sidecars(tmp_path: Path) -> None:
    figures = figures_of("--embedded", "--seconds", "0.05", "--repeats", "2", "--folder", str(tmp_path))
    for case in Case:
        (p50,) = (samples for name, samples in figures.items() if name.startswith(case) and name.endswith("p50"))
        for samples in (p50, figures[f"{case}: CPU"]):
            assert {name: len(values) for name, values in samples.items()} == {SIDECARS: 2, EMBEDDED: 2}
    assert list(tmp_path.iterdir()) == []


def test_what_failing_calls_cost(tmp_path: Path) -> None:
    (samples,) = figures_of("--failing", "--state", "1", "--folder", str(tmp_path)).values()
    assert set(samples) == {"works", "fails", "the first failure"}
    assert len(samples["fails"]) > 1
    assert list(tmp_path.iterdir()) == []


def test_one_way_calls_and_a_replay(tmp_path: Path) -> None:
    arguments = ["--sizes", "16,65536", "--seconds", "0.02", "--repeats", "2", "--curve", "--log-key"]
    figures = figures_of(*arguments, "--folder", str(tmp_path))
    assert {"one-way 16 B", "one-way 64 KiB", "one-way 64 KiB: CPU", "one-way: peak memory"} <= set(figures)
    assert any(name.startswith("replay of ") for name in figures)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", ["0", "x", "1,99999"])
def test_states_of_no_size(sizes: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--failing", "--state", sizes])
    assert result.exit_code == 2
    assert "expected sizes in MiB" in result.output


def test_hops_are_of_awaited_calls() -> None:
    result = CliRunner().invoke(main, ["bench", "--where"])
    assert result.exit_code == 2
    assert "--where is for --calls" in result.output
