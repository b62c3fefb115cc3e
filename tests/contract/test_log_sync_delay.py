"""IMMORTAL_BENCH_SYNC_DELAY_MS: a disk that is slower than there is, for benchmarks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.log.backends.lmdb.writer import VARIABLE, sync_delay_s
from immortal.log import create_log

DELAY_MS = 30


def test_each_commit_takes_that_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(DELAY_MS))
    store = create_log(tmp_path / "log", "slow")
    try:
        begun = time.perf_counter()
        for epoch in range(1, 4):
            store.commit(Transaction(epoch=epoch))
        assert time.perf_counter() - begun >= 3 * DELAY_MS / 1e3
    finally:
        store.close()


def test_without_it_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert sync_delay_s() == 0.0
    assert sync_delay_s({VARIABLE: "2.5"}) == 0.0025


@pytest.mark.parametrize("given", ["x", "-1", "nan", "10001", "inf"])
def test_no_number(given: str) -> None:
    with pytest.raises(LogError, match="milliseconds from 0 to 10,000 were expected"):
        sync_delay_s({VARIABLE: given})
