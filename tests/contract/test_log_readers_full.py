"""A log that can't be opened for now, since something of the machine has run out: another time may be better."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import LogError, LogUnavailableError
from immortal.coordinator.log.backends.lmdb import environment
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.service.runtime import status_of
from immortal.log import create_log, open_log, open_reader

TAKE = """
import lmdb, sys, time
from pathlib import Path
from immortal.coordinator.log.backends.lmdb.environment import open_environment
log = open_environment(Path(sys.argv[1]), readonly=True, map_size_bytes=0)
taken = []
try:
    while True:
        taken.append(log.begin())
except lmdb.ReadersFullError:
    print(len(taken), flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_log(tmp_path / "log", "alice").close()
    return tmp_path / "log"


@contextmanager
def all_taken(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """By another process."""
    taker = subprocess.Popen([sys.executable, "-c", TAKE, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert taker.stdout is not None
        assert int(taker.stdout.readline()) > 500
        yield taker
    finally:
        taker.kill()
        taker.wait()


OPENED = [
    pytest.param(lambda folder: open_log(folder, "alice"), id="a coordinator"),
    pytest.param(lambda folder: open_reader(folder), id="a reader"),
]


@pytest.mark.parametrize("opened", OPENED)
def test_who_has_all_places_of_readers_is_named_and_it_may_be_tried_again(
    folder: Path, opened: Callable[[Path], RowLogStore | LogReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "READERS_WAIT_S", 0.1)
    with all_taken(folder) as taker:
        with pytest.raises(
            LogUnavailableError, match=rf"all 512 places.*: process {taker.pid} \(.*\) has 51[0-9]"
        ) as no:
            opened(folder)
        assert status_of(no.value) == 1, "immortal run --restart tries again"
        taker.kill()  # its places are still taken
        taker.wait()
        opened(folder).close()


@pytest.mark.parametrize("opened", OPENED)
def test_a_start_waits_for_a_place(
    folder: Path, opened: Callable[[Path], RowLogStore | LogReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with all_taken(folder) as taker:
        looked: Iterator[Callable[[], object]] = iter([lambda: None, taker.terminate, taker.wait])  # between two looks
        monkeypatch.setattr(time, "sleep", lambda _: next(looked, lambda: None)())
        opened(folder).close()


@pytest.mark.parametrize("opened", OPENED)
def test_a_log_that_is_open_may_be_read_again_once_there_is_a_place(
    folder: Path, opened: Callable[[Path], RowLogStore | LogReader]
) -> None:
    log = opened(folder)
    with all_taken(folder) as taker:
        for _ in range(2):
            with pytest.raises(LogUnavailableError, match=f"process {taker.pid} .* has 512"):
                log.summary()
    assert log.summary().last_sequence_id == -1
    log.close()


@pytest.mark.parametrize("opened", OPENED)
def test_no_descriptor_that_is_missing_is_damage(
    folder: Path, opened: Callable[[Path], RowLogStore | LogReader]
) -> None:
    """Whichever file it is of."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    refused = []
    for more in range(100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
        try:
            log = opened(folder)
        except LogError as error:
            refused.append(status_of(error))
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        log.close()
        break
    else:
        pytest.fail("it was never opened")
    assert len(refused) > 1
    assert set(refused) == {1}, "immortal run --restart tries again"


@pytest.mark.parametrize("error", [lmdb.TlsFullError("x"), lmdb.MemoryError("x"), OSError(23, "x"), OSError(12, "x")])
def test_what_else_may_pass(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(environment, "open_lmdb", fails)
    for param in OPENED:
        with pytest.raises(LogUnavailableError, match="for now"):
            param.values[0](folder)  # type: ignore[operator]
