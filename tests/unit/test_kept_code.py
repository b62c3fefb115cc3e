"""Code kept beside a log: what is written once, what is forgotten, what is too large."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from immortal.protocol import kept_code

OLD, NEW = ({"shop.py": ("/srv/shop.py", source)} for source in (b"a = 1\n", b"a = 2\n"))


def names(folder: Path) -> int:
    return len(list(folder.glob("*.zip")))


def test_each_digest_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    for first in (0, 5):
        assert kept_code.store(folder, "shop:Shop", OLD, first)
    assert kept_code.store(folder, "shop:Shop", NEW, 9)
    assert kept_code.store(folder, "shop:Shop", OLD, 20)
    assert [one.first for one in kept_code.read_index(folder)] == [0, 9, 20]
    assert names(folder) == 2
    found = [kept_code.code_at(folder, record) for record in (0, 8, 9, 19, 20)]
    assert [one.first for one in found if one is not None] == [0, 0, 9, 9, 20]


def test_code_before_the_log_begins_is_forgotten(tmp_path: Path) -> None:
    kept_code.store(tmp_path, "shop:Shop", OLD, 0)
    kept_code.store(tmp_path, "shop:Shop", NEW, 9)
    kept_code.forget(tmp_path, 8)
    assert names(tmp_path) == 2
    kept_code.forget(tmp_path, 9)
    assert [one.first for one in kept_code.read_index(tmp_path)] == [9]
    assert names(tmp_path) == 1
    assert kept_code.code_at(tmp_path, 8) is None


def test_a_log_that_was_cut_forgets_what_came_behind(tmp_path: Path) -> None:
    kept_code.store(tmp_path, "shop:Shop", OLD, 0)
    kept_code.store(tmp_path, "shop:Shop", NEW, 9)
    kept_code.store(tmp_path, "shop:Shop", OLD, 7)
    assert [one.first for one in kept_code.read_index(tmp_path)] == [0]


def test_folders_of_packages_are_entries(tmp_path: Path) -> None:
    kept_code.store(tmp_path, "a.b.c:Shop", {"a/b/c.py": ("/srv/a/b/c.py", b"")}, 0)
    (archive,) = tmp_path.glob("*.zip")
    assert zipfile.ZipFile(archive).namelist() == ["a/", "a/b/", "a/b/c.py"]


def test_what_is_too_large_or_damaged_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "SOURCES_SIZE_BYTES_MAX", 3)
    assert not kept_code.store(tmp_path, "shop:Shop", OLD, 0)
    (tmp_path / "index.json").write_text("{")
    assert kept_code.read_index(tmp_path) == []
