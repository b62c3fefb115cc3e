from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from immortal.coordinator.project import run_lock
from immortal.coordinator.service.process import SIGNAL_COALESCE_S, StopRequests
from immortal.protocol.files import ProcessFile, current_process_fields, is_living, shares_pid_namespace


def test_signals_of_one_moment_are_one_wish() -> None:
    now_s = 10.0
    requests = StopRequests(clock_s=lambda: now_s)
    assert requests.count == 0
    requests.signalled()
    requests.signalled()
    now_s += SIGNAL_COALESCE_S - 0.01
    requests.signalled()
    assert requests.count == 1
    now_s += 0.02
    requests.signalled()
    assert requests.count == 2


def test_a_coordinator_of_another_container_lives_as_long_as_it_listens(tmp_path: Path) -> None:
    """Its process ID means another process here, or none."""
    path = str(tmp_path / "control.sock")
    distant = ProcessFile(pid=os.getpid(), started_ns=0, pid_namespace=1, control=path)
    assert not shares_pid_namespace(distant)
    assert not is_living(distant)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        assert is_living(distant)
    assert not is_living(distant)
    assert is_living(ProcessFile(**current_process_fields()))


def test_who_may_not_run_a_project_leaves_the_file_of_who_runs_it(tmp_path: Path) -> None:
    """In another container it can have the same process ID."""
    with run_lock.hold(tmp_path, "immortal up"):
        file = tmp_path / run_lock.FILE_NAME
        theirs = current_process_fields() | {"pid_namespace": 1, "process_start_ticks": 1}
        file.write_bytes(msgspec.json.encode(run_lock.RunLockHolder(what="immortal up", **theirs)))
        with pytest.raises(run_lock.ProjectRunningError), run_lock.hold(tmp_path, "immortal dev"):
            pass
        assert file.exists()
        run_lock.publish(tmp_path, "immortal up", {})
    assert not file.exists()
