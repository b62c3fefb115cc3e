"""Listener for changes of a lease, while its database is away."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from queue import Queue
from typing import NoReturn

import pytest

from immortal.coordinator.core.errors import LogUnavailableError
from immortal.coordinator.log.backends.postgres import standby
from immortal.coordinator.log.backends.postgres.connections import Address


def test_a_wake_up_while_the_database_is_away_makes_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tried again without a pause, for as long as the database was away."""
    attempts: Queue[bool] = Queue()
    is_made, calls = threading.Event(), itertools.count()

    def is_woken() -> bool:
        try:
            os.eventfd_read(listener._wake)
        except BlockingIOError:
            return False
        return True

    def connect(address: Address) -> NoReturn:
        is_made.wait(30.0)
        attempts.put(is_woken())
        if next(calls) == 0:
            listener.wake()
        raise LogUnavailableError("it is away")

    monkeypatch.setattr(standby, "connect", connect)
    listener = standby.LeaseListener(Address.parse(f"//?host={tmp_path}&dbname=immortal#shop"))
    is_made.set()
    try:
        assert [attempts.get(timeout=30.0), attempts.get(timeout=30.0)] == [False, False]
    finally:
        listener.close(30.0)
