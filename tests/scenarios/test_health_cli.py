"""`immortal health`, as a probe asks it. That an instance recovers and follows: test_chart_pods.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from immortal.coordinator.operator import control
from tests.helpers.cli import HOME, Run, immortal

IDLE = """
from immortal import Immortal


class Idle(Immortal):
    pass
"""


def test_it_tells_by_its_status_whether_an_instance_lives_and_is_ready(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    immortal(tmp_path, "register", "idle", "--peer", "tcp://127.0.0.1:*", "--app", "idle:Idle")
    for option in ([], ["--live"], ["--ready"]):
        assert "the coordinator of 'idle' does not run" in immortal(tmp_path, "health", "idle", *option, status=1)
    run = Run(tmp_path, "idle")
    run.line("ready")
    assert immortal(tmp_path, "health", "idle", "--live") == "idle is live: normal\n"
    assert immortal(tmp_path, "health", "idle", "--ready") == immortal(tmp_path, "health", "idle")
    assert immortal(tmp_path, "health", "idle") == "idle is ready: normal\n"

    found = control.running(tmp_path / HOME / "idle")
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    try:
        for option in ("--live", "--ready"):
            said = immortal(tmp_path, "health", "idle", option, "--timeout-s", "0.3", status=1)
            assert "gives no answer" in said
            assert "within 0.3 s" in said
    finally:
        os.kill(found.pid, signal.SIGCONT)
    assert run.stop() == 0


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    assert "there is no instance 'idle'" in immortal(tmp_path, "health", "idle", status=1)
    assert "--live or --ready, not both" in immortal(tmp_path, "health", "idle", "--live", "--ready", status=2)
    immortal(tmp_path, "health", "a b", status=2)
    immortal(tmp_path, "health", "idle", "--timeout-s", "0", status=2)
