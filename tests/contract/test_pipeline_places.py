"""The pipeline over logs wherever they are: in folders, in PostgreSQL, in archives. The same tables from all."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("pyspark")

import pyrage
from pyspark.sql import SparkSession

from immortal.coordinator.archive.archive import Archive, Cipher
from immortal.coordinator.archive.archiver import Archiver
from immortal.coordinator.archive.place import KEY_FILE_VARIABLE
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import back_up
from immortal.coordinator.objects.store import Objects, store_of
from immortal.log import open_log, open_reader
from immortal.pipeline.errors import LogChangedError, SourceError
from immortal.pipeline.reading import close_shared, log_folders
from immortal.pipeline.source import SCHEMAS, Options, RangePartition, Reader, StreamReader
from tests.faults.sample_log import put_checkpoint
from tests.helpers.pipeline_logs import (
    RecordSpec,
    make_log,
    message_rows,
    output_rows,
    random_specs,
    record_rows,
    transaction_of,
)
from tests.helpers.postgres import Postgres
from tests.helpers.spark import read, rows, rows_here

COUNTS = {"alice": 300, "bob": 40}
SEGMENT_SIZE_BYTES = 4096
Table = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    yield
    close_shared()


def specs_of(name: str) -> list[RecordSpec]:
    return random_specs(list(COUNTS).index(name), COUNTS[name])


def ship(folder: Path, url: str, name: str, cipher: Cipher | None = None) -> None:
    archive = Archive(Objects(store_of(url), url).below(name), cipher)
    with open_reader(folder, name) as reader:
        Archiver(archive, reader, segment_size_bytes=SEGMENT_SIZE_BYTES).store_moment()


def write_logs(home: Path) -> None:
    for name in COUNTS:
        make_log(home / name / "log", name, specs_of(name))


def secret_key(folder: Path) -> Path:
    path = folder / "archive.key"
    path.touch(mode=0o600)
    path.write_text(f"{pyrage.x25519.Identity.generate()}\n")
    return path


@pytest.fixture(params=["folder", "postgresql", "archive", "encrypted"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the logs of alice and bob are called together. One log was written, and copied from there."""
    home = tmp_path / "home"
    write_logs(home)
    if request.param == "folder":
        return str(home)
    if request.param == "postgresql":
        return in_postgres(request.getfixturevalue("postgres"), home)
    key = secret_key(tmp_path) if request.param == "encrypted" else None
    if key is not None:
        monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    url = f"file://{tmp_path}/archive"
    for name in COUNTS:
        ship(home / name / "log", url, name, None if key is None else Cipher.from_file(key))
    return url


def in_postgres(postgres: Postgres, home: Path) -> str:
    """A database of their own."""
    database = f"places_{uuid.uuid4().hex}"
    postgres.execute(f"CREATE DATABASE {database}")
    for name in COUNTS:
        back_up(home / name / "log", name, place_of(postgres.url(name, database)))
    return postgres.url(database=database)


def without_times(found: Table) -> Table:
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def expected(rows_of: Callable[[str, Sequence[RecordSpec]], Table]) -> Table:
    return [row for name in COUNTS for row in rows_of(name, specs_of(name))]


def test_all_tables_are_the_same(fleet: str) -> None:
    assert [Path(one.replace("#", "/")).name for one in log_folders([fleet])] in (list(COUNTS), ["log", "log"])
    assert without_times(rows_here("messages", fleet)) == without_times(expected(message_rows))
    assert without_times(rows_here("records", fleet)) == expected(record_rows)
    raw = rows_here("raw", fleet, partitionBytes=2048)
    assert [row["value"] for row in raw] == [spec.value() for name in COUNTS for spec in specs_of(name)]
    marks = rows_here("outputs", fleet)
    assert sorted(map(str, marks)) == sorted(map(str, expected(output_rows)))
    some = rows_here("records", fleet, from_=17, to=23)
    assert [row["sequence_id"] for row in some] == [*range(17, 24), *range(17, 24)]


def test_partitions_are_ranges_whose_end_is_fixed(fleet: str, tmp_path: Path) -> None:
    reader = Reader(Options.parse({"table": "records", "path": fleet, "partitionBytes": "2048"}), SCHEMAS["records"])
    parts = [part for part in reader.partitions() if isinstance(part, RangePartition)]
    assert len(parts) > 4
    ranges = [wanted for part in parts for wanted in part.ranges]
    assert len(ranges) == len(parts)
    for before, wanted in itertools.pairwise(ranges):
        if before.instance == wanted.instance:
            assert before.end == wanted.first
    for part, wanted in zip(parts, ranges, strict=True):
        found = [row["sequence_id"] for batch in reader.read(part) for row in batch.to_pylist()]
        assert found == list(range(wanted.first, wanted.end))
        assert KEY_FILE_VARIABLE not in repr(vars(part))
        assert "archive.key" not in repr(vars(part))


def test_in_a_real_spark(spark: SparkSession, tmp_path: Path, postgres: Postgres) -> None:
    home = tmp_path / "home"
    write_logs(home)
    url = f"file://{tmp_path}/archive"
    for name in COUNTS:
        ship(home / name / "log", url, name)
    order = ("instance", "sequence_id", "index")
    whole = rows(read(spark, "messages", home), *order)
    assert len(whole) == len(expected(message_rows))
    for place in (url, in_postgres(postgres, home)):
        assert rows(read(spark, "messages", place, partitionBytes=8192), *order) == whole
        assert rows(read(spark, "messages", f"{place}#bob"), *order) == [
            row for row in whole if row["instance"] == "bob"
        ]


def test_checkpoints_are_the_same(tmp_path: Path) -> None:
    log = make_log(tmp_path / "alice" / "log", "alice", specs_of("alice"))
    store = open_log(log, "alice")
    put_checkpoint(store, 1, 200)
    store.close()
    ship(log, f"file://{tmp_path}/archive", "alice")
    there = rows_here("checkpoints", f"file://{tmp_path}/archive#alice")
    assert there == rows_here("checkpoints", str(log))
    assert [(row["checkpoint_id"], row["sequence_id"], row["ok"]) for row in there] == [(1, 200, True)]


def test_a_stream_follows_what_is_shipped(tmp_path: Path) -> None:
    specs = specs_of("alice")
    log = make_log(tmp_path / "alice" / "log", "alice", specs[:100])
    url = f"file://{tmp_path}/archive"
    ship(log, url, "alice")
    stream = StreamReader({"table": "records", "path": url}, SCHEMAS["records"])
    limit = stream.getDefaultReadLimit()
    start = stream.initialOffset()
    middle = stream.latestOffset(start, limit)
    store = open_log(log, "alice")
    store.commit(transaction_of(specs[100:]))
    store.close()
    ship(log, url, "alice")
    end = stream.latestOffset(middle, limit)

    def between(one: Any, other: Any) -> list[int]:
        parts = stream.partitions(one, other)
        return [row["sequence_id"] for part in parts for batch in stream.read(part) for row in batch.to_pylist()]

    assert between(start, middle) == list(range(100))
    assert between(middle, end) == list(range(100, 300))
    assert json.loads(json.dumps(end)) == {f"{url}#alice": {"committer_id": 77, "next": 300}}


def test_a_partition_fetches_its_own_segments_alone(tmp_path: Path) -> None:
    log = make_log(tmp_path / "alice" / "log", "alice", specs_of("alice"))
    ship(log, f"file://{tmp_path}/archive", "alice")
    segments = sorted((tmp_path / "archive" / "alice" / "segments").iterdir())
    assert len(segments) > 5
    url = f"file://{tmp_path}/archive#alice"
    options = {"table": "records", "path": url, "to": "10"}
    reader = Reader(Options.parse(options), SCHEMAS["records"])
    parts = reader.partitions()
    close_shared()  # as on another machine
    for segment in segments[3:]:
        segment.unlink()
    found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["sequence_id"] for row in found] == list(range(11))
    with pytest.raises(LogError, match=r"segments/.* is missing"):
        rows_here("records", url)


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_damaged_segment_is_said_and_not_skipped(tmp_path: Path, at: int) -> None:
    log = make_log(tmp_path / "alice" / "log", "alice", specs_of("alice"))
    ship(log, f"file://{tmp_path}/archive", "alice")
    segment = sorted((tmp_path / "archive" / "alice" / "segments").iterdir())[at]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogError, match=f"{segment.name} is damaged"):
        rows_here("records", f"file://{tmp_path}/archive#alice")


def test_another_history_is_read_as_it_is(tmp_path: Path) -> None:
    """The archive was removed and made again: what this process knows of the old one counts for nothing."""
    url = f"file://{tmp_path}/archive"
    for count in (100, 50):
        log = make_log(tmp_path / f"{count}" / "log", "alice", specs_of("alice")[:count])
        ship(log, url, "alice")
        assert len(rows_here("records", url)) == count
        (tmp_path / "archive" / "alice").rename(tmp_path / f"archive-{count}")
    with pytest.raises(SourceError, match="there is no log in"):
        rows_here("records", url)


def test_one_whose_place_another_took_while_it_was_read(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    ship(make_log(tmp_path / "log", "alice", specs_of("alice")), url, "alice")
    reader = Reader(Options.parse({"table": "records", "path": url}), SCHEMAS["records"])
    (part, *_) = reader.partitions()
    (tmp_path / "archive" / "alice").rename(tmp_path / "elsewhere")
    with pytest.raises(LogChangedError, match=f"the log in {url}#alice was removed while it was read"):
        list(reader.read(part))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file://{folder}/archive#carol", "there is no log file://{folder}/archive#carol"),
        ("file://{folder}/nowhere#alice", "there is no archive in file://{folder}/nowhere: no such folder"),
        ("file://{folder}/nowhere", "there is no folder {folder}/nowhere"),
        ("file://{folder}/archive#../alice", "'../alice', behind # in the URL of an archive, is no instance's name"),
        ("s3://key:hunter2@bucket/x#alice", "a password or a query in the URL of an archive would be seen"),
        ("az://box/x?sig=hunter2#alice", "a password or a query in the URL of an archive would be seen"),
    ],
)
def test_what_is_said_where_there_is_none(tmp_path: Path, url: str, said: str) -> None:
    ship(make_log(tmp_path / "log", "alice", []), f"file://{tmp_path}/archive", "alice")
    with pytest.raises(SourceError) as caught:
        rows_here("records", url.format(folder=tmp_path))
    assert str(caught.value).startswith(said.format(folder=tmp_path))
    assert "hunter2" not in str(caught.value)


def test_a_key_that_is_missing_or_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = secret_key(tmp_path)
    url = f"file://{tmp_path}/archive"
    ship(make_log(tmp_path / "log", "alice", specs_of("alice")), url, "alice", Cipher.from_file(key))
    with pytest.raises(LogError, match=f"is encrypted: give its secret key in {KEY_FILE_VARIABLE}"):
        rows_here("records", url)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(secret_key(tmp_path / "other")))
    with pytest.raises(LogError, match="cannot be decrypted with the keys of the key file"):
        rows_here("records", url)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(LogError, match=r"the key file .*nowhere cannot be read"):
        rows_here("records", url)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    assert len(rows_here("records", url)) == COUNTS["alice"]


def test_an_archive_is_only_read(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    log = make_log(tmp_path / "log", "alice", specs_of("alice"))
    ship(log, url, "alice")
    with pytest.raises(LogError, match="is an archive, which is only read"):
        open_log(f"{url}#alice", "alice")
    with pytest.raises(LogError, match="is an archive, which is only read"):
        back_up(log, "alice", place_of(f"{url}#bob"))


def test_a_role_that_may_only_read_is_enough(tmp_path: Path, postgres: Postgres) -> None:
    write_logs(tmp_path)
    url = in_postgres(postgres, tmp_path)
    database = url.split("/")[3].split("?")[0]
    postgres.execute("DROP ROLE IF EXISTS auditor; CREATE ROLE auditor LOGIN", database=database)
    reading = url.replace("owner@", "auditor@")
    with pytest.raises(SourceError, match="permission denied"):
        rows_here("records", reading)
    for grant in (
        "GRANT USAGE ON SCHEMA immortal TO auditor",
        "GRANT SELECT ON immortal.schema_version, immortal.heads, immortal.leases, immortal.records, immortal.rows"
        " TO auditor",
    ):
        postgres.execute(grant, database=database)
    assert without_times(rows_here("records", reading)) == expected(record_rows)
    with pytest.raises(LogError, match="permission denied"):
        open_log(f"{reading}#alice", "alice")
    postgres.execute("DROP OWNED BY auditor; DROP ROLE auditor", database=database)


def test_few_connections_are_kept(tmp_path: Path, postgres: Postgres) -> None:
    write_logs(tmp_path)
    url = in_postgres(postgres, tmp_path)
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    database = url.split("/")[3].split("?")[0]
    counts = set()
    for partition_size_bytes in (1 << 30, 2048, 256):
        rows_here("records", url, partitionBytes=partition_size_bytes)
        gc.collect()
        counts.add(postgres.execute(count, database=database)[0][0])
    assert len(counts) == 1, "each partition has left connections of its own"


def test_a_verification_of_an_encrypted_archive_by_the_command(tmp_path: Path) -> None:
    """As it is typed; nothing that is printed has the key."""
    key = secret_key(tmp_path)
    url = f"file://{tmp_path}/archive"
    write_logs(tmp_path / "home")
    for name in COUNTS:
        ship(tmp_path / "home" / name / "log", url, name, Cipher.from_file(key))
    command = [Path(sys.executable).with_name("immortal"), "pipeline", "verify", url, "--json", "--master", "local[2]"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, KEY_FILE_VARIABLE: str(key)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"] == COUNTS
    assert "AGE-SECRET" not in done.stdout + done.stderr


@pytest.mark.parametrize("package", ["obstore", "pyrage"])
def test_without_the_extra_one_line_says_so(tmp_path: Path, package: str) -> None:
    url = f"file://{tmp_path}/archive"
    ship(make_log(tmp_path / "log", "alice", []), url, "alice")
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from immortal.pipeline.reading import log_folders\n"
        f"log_folders([{f'{url}#alice'!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert "archives need the extra archive (" in last
    assert last.endswith("-m pip install 'immortal-services[archive]'")
