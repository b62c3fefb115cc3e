"""A file or folder of tables is written whole, or what was there stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import Struct

from immortal.presenters.what_if_tables import write_tables
from immortal.protocol.files import write_whole
from immortal.replay.fleet.outcome import FleetOutcome


class Empty(Struct):
    services: tuple[Any, ...] = ()
    differences: tuple[Any, ...] = ()
    hours: tuple[Any, ...] = ()


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_old_file_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "page.html"
    write_whole(place, "old")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*page\.html"):
        write_whole(place, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert place.read_text() == "old"


def test_a_file_system_without_modes_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_modes(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", no_modes)
    write_whole(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "new"


def test_a_new_file_is_not_made_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "case.py").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match=r"a link to a file that is missing: .*case\.py"):
        write_whole(tmp_path / "case.py", "new", is_new=True)
    assert not (tmp_path / "elsewhere").exists()


def test_a_new_file_replaces_none_and_a_device_stays_one(tmp_path: Path) -> None:
    place = tmp_path / "case.py"
    place.write_text("old")
    with pytest.raises(FileExistsError, match=r"case\.py"):
        write_whole(place, "new", is_new=True)
    pipe = tmp_path / "link"
    pipe.symlink_to(place)
    write_whole(pipe, "through")
    assert pipe.is_symlink()
    assert place.read_text() == "through"


def test_a_full_disk_leaves_no_part_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = cast(FleetOutcome, Empty())
    monkeypatch.setattr("pyarrow.parquet.write_table", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*found"):
        write_tables(tables, tmp_path / "found")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write_tables(tables, tmp_path / "found")
    assert [each.name for each in tmp_path.iterdir()] == ["found"]
