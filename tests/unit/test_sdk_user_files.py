"""Apps that are given by the path of a file, whatever its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from immortal.appsdk.running.runner import load
from immortal.coordinator.config import ConfigError
from immortal.coordinator.config.values import check_app
from immortal.errors import LoadError

SERVICE = """
from immortal import Immortal
class Outer:
    class Inner(Immortal):
        def __init__(self) -> None: ...
class Shelf(Immortal):
    def __init__(self) -> None: ...
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("file", ["08-x.py", "a.b.py", "my shelf.py", "below/shelf_of_files.py", "ä.py", "x:y.py"])
def test_a_file_is_an_app(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(SERVICE)
    for name in (file, str(path), f"./{file}"):
        if ":" not in name:
            assert check_app(f"{name}:Shelf") == f"{name}:Shelf"
        assert load(f"{name}:Shelf").__qualname__ == "Shelf"
        assert load(f"{name}:Outer.Inner").__qualname__ == "Outer.Inner"
    assert load(f"{file}:Shelf") is load(f"{path}:Shelf")


def test_a_module_with_a_dash_is_an_app(tmp_path: Path) -> None:
    (tmp_path / "08-x.py").write_text(SERVICE)
    assert load(check_app("08-x:Shelf")).__name__ == "Shelf"


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(LoadError, match=r"there is no file 'nowhere.py' in"):
        load("nowhere.py:Shelf")


@pytest.mark.parametrize(
    "app", ["wordcount", ":Shelf", "a b:Shelf", "shelf:", "shelf:8", ".py:Shelf", "shelf:a b", "-x:A"]
)
def test_what_names_no_app(app: str) -> None:
    with pytest.raises(ConfigError, match=r'names no app: expected "module:Class", or "path/of/file.py:Class"'):
        check_app(app)
