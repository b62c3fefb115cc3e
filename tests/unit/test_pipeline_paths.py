"""Which logs a path means, and what is said where it means none."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.pipeline.errors import SourceError
from immortal.pipeline.reading import log_folders, paths_of
from tests.helpers.pipeline_logs import make_log


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A registry: a and b with logs, c elsewhere, d never started, e without settings."""
    home = tmp_path / "home"
    for name in "ab":
        make_log(home / name / "log", name, [])
        (home / f"{name}.toml").write_text('peer = "tcp://127.0.0.1:1"\n')
    make_log(tmp_path / "elsewhere", "c", [])
    (home / "c.toml").write_text(f'log = "{tmp_path / "elsewhere"}"\n')
    (home / "d.toml").write_text("")
    make_log(home / "e" / "log", "e", [])
    return home


def test_a_home_means_all_its_logs(home: Path) -> None:
    expected = [home.parent / "elsewhere", *(home / name / "log" for name in "abe")]
    assert log_folders([str(home)]) == sorted(map(str, expected))


def test_a_log_an_instance_and_a_pattern(home: Path) -> None:
    a, b = str(home / "a" / "log"), str(home / "b" / "log")
    assert log_folders([a]) == [a]
    assert log_folders([str(home / "a")]) == [a]
    assert log_folders([str(home / "[ab]" / "log")]) == [a, b]
    assert log_folders([a, str(home / "a"), f"{a}/"]) == [a]


def test_the_options_path_and_paths() -> None:
    assert paths_of({"path": "x, y"}) == ["x", "y"]
    assert paths_of({"paths": '["x", "y,z"]'}) == ["x", "y,z"]
    assert paths_of({"path": "file:///x"}) == ["file:///x"]
    with pytest.raises(SourceError, match="a JSON list of strings"):
        paths_of({"paths": "x"})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("missing", "there is no folder {home}/missing"),
        ("a.toml", "{home}/a.toml is a file: a log folder"),
        ("empty", "there is no log in {home}/empty"),
        ("no*", "nothing matches {home}/no*"),
    ],
)
def test_what_is_said_where_there_is_none(home: Path, path: str, expected: str) -> None:
    (home / "empty").mkdir()
    with pytest.raises(SourceError) as caught:
        log_folders([str(home / path)])
    assert str(caught.value).startswith(expected.format(home=home))
    assert "\n" not in str(caught.value)


def test_a_home_where_nothing_was_started_yet(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text("")
    assert log_folders([str(tmp_path)], may_be_none=True) == []
    with pytest.raises(SourceError):
        log_folders([str(tmp_path)])
    with pytest.raises(SourceError, match="no path was given"):
        log_folders([])
