"""Delta tables of an export: each row once, also where the copy is killed, and nothing that does not count."""

from __future__ import annotations

import datetime as dt
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("obstore")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from immortal.pipeline.jobs.delta import DeltaCopyError, copy, open_store
from immortal.pipeline.jobs.sources import EXPORT_FILE_NAME

DAY, NO_DAY = "2026-01-31", "__HIVE_DEFAULT_PARTITION__"
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
TABLES = ("raw", "records")
KILLED = """
import json, os, signal, sys
from pathlib import Path
from immortal.pipeline.jobs import delta

def kill_after(owner, name, count):
    function = getattr(owner, name)
    calls = []
    def counted(*arguments, **options):
        function(*arguments, **options)
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, counted)

folder, url, name, count = sys.argv[1:]
kill_after(delta.Objects if name == "put_file" else delta, name, int(count))
state = json.loads((Path(folder) / "_immortal_export.json").read_text())
delta.copy(state, Path(folder), delta.open_store(url), print)
"""


def export(folder: Path, run: int, *, of: str = "first") -> dict[str, Any]:
    """Write what a run of an export leaves: two rows in each file, whose sequence IDs follow those of the run before.

    A file of the next run, which was interrupted, lies beside them.
    """
    for number in (run, run + 1):
        for table in TABLES:
            for name, day in (("till", DAY), ("till", NO_DAY), ("shop-2.b", DAY)):
                path = folder / table / f"instance={name}" / f"day={day}" / f"run-{number:08d}-part-0.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                ids = [2 * number, 2 * number + 1]
                columns = {"sequence_id": pa.array(ids), "time": pa.array([NOON, NOON], pa.timestamp("us", "UTC"))}
                columns["time_ns"] = pa.array([None, None] if day == NO_DAY else ids, pa.int64())
                pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)  # as Spark writes times
    state = {"id": of, "run": run, "tables": [*TABLES]}
    (folder / EXPORT_FILE_NAME).write_text(json.dumps(state))
    return state


def update(folder: Path, url: str) -> int:
    state = json.loads((folder / EXPORT_FILE_NAME).read_text())
    return copy(state, folder, open_store(url), lambda _: None)


def rows(url: str, table: str) -> list[tuple[object, ...]]:
    found = DeltaTable(f"{url}/{table}").to_pyarrow_table().to_pylist()
    return sorted((row["instance"], str(row["day"]), row["sequence_id"], row["time"] == NOON) for row in found)


def expected(runs: int) -> list[tuple[object, ...]]:
    ids = range(2, 2 * runs + 2)
    return sorted((*of, each, True) for of in (("till", DAY), ("till", "None"), ("shop-2.b", DAY)) for each in ids)


def test_each_run_is_added_once(tmp_path: Path) -> None:
    folder, url = tmp_path / "export", f"file://{tmp_path}/tables"
    for run in (1, 2, 3):
        export(folder, run)
        assert update(folder, url) == 6
        assert [rows(url, table) for table in TABLES] == [expected(run)] * 2
        assert update(folder, url) == 0
    table = DeltaTable(f"{url}/raw")
    assert table.version() == 2
    assert table.metadata().partition_columns == ["instance", "day"]
    of_till = table.to_pyarrow_dataset().get_fragments(
        filter=(pa.dataset.field("time_ns") >= 6) & (pa.dataset.field("instance") == "till")
    )
    kept = [Path(fragment.path).parts[-2:] for fragment in of_till]
    assert (f"day={DAY}", "run-00000003-part-0.parquet") in kept, "by its smallest and largest values"
    assert (f"day={DAY}", "run-00000002-part-0.parquet") not in kept


@pytest.mark.parametrize(
    ("name", "count"),
    [("put_file", 1), ("put_file", 5), ("create_table_with_add_actions", 1), ("create_table_with_add_actions", 2)],
)
def test_a_copy_that_was_killed_goes_on(tmp_path: Path, name: str, count: int) -> None:
    folder, url = tmp_path / "export", f"file://{tmp_path}/tables"
    export(folder, 1)
    command = [sys.executable, "-c", KILLED, str(folder), url, name, str(count)]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    export(folder, 2)
    update(folder, url)
    assert [rows(url, table) for table in TABLES] == [expected(2)] * 2


def test_a_table_of_another_export_stays_as_it_is(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/tables"
    export(tmp_path / "one", 1)
    update(tmp_path / "one", url)
    export(tmp_path / "other", 3, of="second")
    with pytest.raises(DeltaCopyError, match=r"/tables/raw is not of the export in .*/other: give another URL"):
        update(tmp_path / "other", url)
    assert rows(url, "raw") == expected(1)
