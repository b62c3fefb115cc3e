"""`immortal bench --calls` and `--failing`: they run, check what they measure, and say it in a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.bench.workload import Case
from immortal.cli import main

BRIEFLY = ["bench", "--calls", "--outstanding", "1,20", "--size", "100", "--seconds", "0.05", "--repeats", "2"]


def bench(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, [*BRIEFLY, "--folder", str(folder), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def is_sensible(spread: dict[str, float]) -> bool:
    return 0 < spread["lowest"] <= spread["median"] <= spread["highest"]


def test_calls_in_json(tmp_path: Path) -> None:
    results: dict[str, Any] = json.loads(bench(tmp_path, "--json"))
    assert [one["outstanding"] for one in results["columns"]] == [1, 20]
    for one in results["columns"]:
        assert one["calls"] >= 2 * one["outstanding"]
        assert all(is_sensible(one[what]) for what in ("p50_us", "p99_us", "calls_per_s"))
        assert one["p50_us"]["median"] <= one["p99_us"]["median"]
        assert one["cpu_us_per_call"] == pytest.approx(sum(one["cpu_us_per_call_by_process"].values()))
    assert is_sensible(results["disk_p50_us"])
    turns = results["turns"]
    assert set(turns) == {"awaited_us", "few_peers_us", "many_peers_us"}
    assert all(0 < value < 100_000 for value in turns.values())
    assert (results["size_bytes"], results["repeats"]) == (100, 2)
    assert list(tmp_path.iterdir()) == []


def test_calls_in_words_where_the_user_has_a_module_called_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are started in that folder, and import ours."""
    (tmp_path / "bench.py").write_text("")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "the disk alone: append + fdatasync of 4 KiB" in bench(Path("logs"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--outstanding", "0"], "expected numbers of calls, 1 to 100000"),
        (["--outstanding", "x"], "expected numbers of calls"),
        (["--size", "7"], "8<=x<=16777216"),
        (["--trim"], "each measure something else"),
    ],
)
def test_called_wrongly(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, [*BRIEFLY, *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_one_process_beside_sidecars(tmp_path: Path) -> None:
    arguments = ["bench", "--embedded", "--seconds", "0.05", "--repeats", "2", "--folder", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    results: dict[str, Any] = json.loads(result.stdout)
    assert [row["case"] for row in results["rows"]] == [case.value for case in Case]
    for row in results["rows"]:
        for side in (row["sidecars"], row["embedded"]):
            assert side["p50_us"] > 0
            assert 0 <= side["client_cpu_us"] < side["cpu_us"]
            assert (side["client_cpu_us"] > 0) == (row["case"] == Case.CLIENT)
        assert min(row["p50_ratio"], row["cpu_ratio"], row["cpu_ratio_without_client"]) > 0
    assert (results["size_bytes"], results["rows"][0]["turns"]) == (16, 2)
    assert list(tmp_path.iterdir()) == []


def test_what_failing_calls_cost(tmp_path: Path) -> None:
    arguments = ["bench", "--failing", "--state", "1,1", "--folder", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["state_size_bytes"] for row in rows] == [1 << 20, 1 << 20]
    for row in rows:
        assert row["failures"] > 1
        assert 0 < row["fails_p50_ms"] <= row["fails_p99_ms"]
        assert min(row["works_p50_ms"], row["first_failure_ms"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", ["0", "x", "1,99999"])
def test_states_of_no_size(sizes: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--failing", "--state", sizes])
    assert result.exit_code == 2
    assert "expected sizes in MiB" in result.output
