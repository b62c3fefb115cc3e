"""An archive for executors: our package, wherever it is, the packages that it needs, and the user's modules."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest

from immortal.pipeline import packing
from immortal.pipeline.errors import SourceError


def names_of(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return set(tar.getnames())


def test_it_holds_our_package_and_the_users_code(tmp_path: Path) -> None:
    code, wheel = tmp_path / "code", tmp_path / "till-1-py3-none-any.whl"
    for name in ("till/core.py", "till/__pycache__/core.pyc", ".git/config", "till/env.tar.gz"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("")
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("till/core.py", "")
    for given in (code, wheel):
        with patch.object(packing, "_distributions", return_value=[]):
            assert packing.pack(tmp_path / "env.tar.gz", given) == 0
        names = names_of(tmp_path / "env.tar.gz")
        assert {name for name in names if not name.startswith("immortal")} == {"till", "till/core.py"}
        assert {"immortal/pipeline/packing.py", "immortal/protocol/varint.py"} <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "env.tar.gz", wheel.name]


def test_it_holds_what_the_package_needs_and_no_spark() -> None:
    found = {each.name.lower() for each in packing._distributions()}
    assert {"immortal-services", "pyarrow", "numpy", "pandas", "msgspec", "lmdb", "click"} <= found
    assert not found & {"pyspark", "py4j", "matplotlib", "pytest"}


def test_what_the_user_ships_is_shipped_too() -> None:
    archives, path = "spark.archives", "spark.executorEnv.PYTHONPATH"
    alone = packing.with_archive(Path("/env.tar.gz"), {"spark.executor.memory": "1g"})
    assert alone == {"spark.executor.memory": "1g", archives: "/env.tar.gz#immortal_env", path: "immortal_env"}
    both = packing.with_archive(Path("/env.tar.gz"), {archives: "hdfs:/m.zip#model,x.zip", path: "model:/opt"})
    assert both == {archives: "/env.tar.gz#immortal_env,hdfs:/m.zip#model,x.zip", path: "immortal_env:model:/opt"}


def test_code_that_is_no_code(tmp_path: Path) -> None:
    (tmp_path / "till.py").write_text("")
    with pytest.raises(SourceError, match="is no folder and no wheel"):
        packing.pack(tmp_path / "env.tar.gz", tmp_path / "till.py")
    assert not (tmp_path / "env.tar.gz").exists()
