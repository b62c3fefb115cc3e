"""An archive by the protocol of S3, at a server for tests on this machine (moto), where that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from immortal import store_chunks
from immortal.appsdk.effects.stored_files import STORE_VARIABLE, file_store
from immortal.coordinator.archive.archive import Archive, restore
from immortal.coordinator.archive.archiver import Archiver
from immortal.coordinator.archive.follower import prune
from immortal.coordinator.archive.format import Retention
from immortal.coordinator.log.open import place_of
from immortal.coordinator.objects import StoreError
from immortal.coordinator.objects.store import Objects, store_of
from immortal.errors import StoredFileError
from immortal.log import open_log, open_reader
from tests.faults.sample_log import NAME, put_record, read_contents, write_log

pytestmark = pytest.mark.slow
URL = "s3://backups/immortal"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    ask(f"http://127.0.0.1:{port}/moto-api/reset", "POST")  # what it has is the process's
    yield f"http://127.0.0.1:{port}"
    server.stop()


def make_bucket(endpoint: str) -> None:
    ask(f"{endpoint}/backups", "PUT")


def ask(url: str, method: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        assert answer.status == 200


def test_there_and_back(endpoint: str, tmp_path: Path) -> None:
    make_bucket(endpoint)
    store = store_of(URL)
    assert isinstance(store, S3Store)
    root = Objects(store, URL)
    archive = Archive(root.below(NAME))
    write_log(tmp_path / "log", 40)
    with open_reader(tmp_path / "log", NAME) as reader:
        assert Archiver(archive, reader, segment_size_bytes=20_000).store_moment() is not None
    log = open_log(tmp_path / "log", NAME, map_size_bytes=1 << 24)
    put_record(log, 40)
    log.close()
    with open_reader(tmp_path / "log", NAME) as reader:
        assert Archiver(archive, reader, segment_size_bytes=20_000).store_moment() is not None
    assert root.folders() == [NAME]
    assert archive.numbers() == [1, 2]
    moments = archive.moments()
    restore(archive, moments[1].instance, moments, 1, place_of(tmp_path / "back"), ())
    assert read_contents(tmp_path / "back") == read_contents(tmp_path / "log")
    assert prune(archive, Retention(keep_mb=0))[0] == 0, "its records are in the moment before"


def test_a_name_is_given_once(endpoint: str) -> None:
    make_bucket(endpoint)
    objects = Objects(store_of(URL), URL)
    assert objects.put_new("moments/1", b"ours")
    assert not objects.put_new("moments/1", b"theirs")
    assert objects.get("moments/1") == b"ours"
    objects.remove(["moments/1", "moments/1"])
    assert objects.listed() == []


def test_a_bucket_that_is_not_there_is_said(endpoint: str) -> None:
    with pytest.raises(StoreError, match=r"the store s3://backups/immortal does not do it: .*NoSuchBucket"):
        Objects(store_of(URL), URL).put_new("x", b"y")


def test_files_pass_through_a_bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bucket(endpoint)
    monkeypatch.setenv(STORE_VARIABLE, f"{URL}/files")
    data = os.urandom(11 << 20)  # three parts of an upload
    stored = store_chunks([data])
    assert store_chunks([data]) == stored
    stored.save(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    store = file_store()
    assert [(one.name, one.size_bytes) for one in store.listed()] == [(stored.name, len(data))]
    store.remove_before(stored.name, 0)
    with pytest.raises(StoredFileError, match=rf"{stored.name} is not in the store {URL}/files"):
        stored.open()
    monkeypatch.setenv(STORE_VARIABLE, "s3://no-such-bucket/files")
    with pytest.raises(StoreError, match="no-such-bucket"):
        store_chunks([b"data"])


def test_delta_tables_of_an_export(endpoint: str, tmp_path: Path) -> None:
    """In a process of its own: the library keeps Python's lock, which the server here needs to answer."""
    pytest.importorskip("deltalake")
    make_bucket(endpoint)
    subprocess.run([sys.executable, "-c", _DELTA, str(tmp_path)], check=True, timeout=240)


_DELTA = """
import sys
from pathlib import Path
from tests.contract.test_pipeline_delta import expected, export, rows, update

folder = Path(sys.argv[1])
for run in (1, 2):
    export(folder, run)
    assert [update(folder, "s3://backups/tables") for _ in range(2)] == [6, 0]
    assert rows("s3://backups/tables", "raw") == expected(run)
"""
