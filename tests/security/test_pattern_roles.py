"""Who may do what at the ready-made patterns: by keys, roles and settings, in memory and with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appsdk.client import CallRefused, connect
from appsdk.patterns import clone, queue
from tests.helpers.cli import HOME, Run, immortal


@pytest.mark.kills
def test_a_client_with_keys_cannot_take_tasks_entitle_itself_or_overwrite_rows(tmp_path: Path) -> None:
    home = tmp_path / HOME
    for name in ("jobs", "prices"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    for name in ("bob", "hands", "web"):
        immortal(tmp_path, "keys", name, "--make", "--client")
    settings = home / "jobs.toml"
    settings.write_text(settings.read_text() + '\n[allow]\nbob = {}\nhands = ["@worker"]\nweb = ["@submitter"]\n')
    runs = [
        Run(tmp_path, "jobs", "appsdk.patterns.queue:Queue", "--restart"),
        Run(tmp_path, "prices", "appsdk.patterns.clone:Table", "--restart"),
    ]
    try:
        for run in runs:
            run.line("ready")
        with connect(queue.Queue, "jobs", home=home, identity="bob") as jobs:
            attack: Any = jobs
            with pytest.raises(CallRefused, match=r"'bob' may not call 'ready' of 'jobs': .*@worker"):
                attack.ready("w", "session", ["pay"], 1.0, None)
        with queue.connect("jobs", home=home, identity="web") as web:
            job = web.submit("pay", ["secret"])
        with connect(queue.Queue, "jobs", home=home, identity="hands") as jobs:
            worker: Any = jobs
            assert worker.ready("w", "session", ["pay"], 1.0, None).task == job.id
        with clone.connect("prices", home=home) as owner:
            owner.put("a", 1)
        with connect(clone.Table, "prices", home=home, identity="bob") as table:
            with pytest.raises(CallRefused, match=r"'bob' may not call 'entitle' of 'prices': .*@administrator"):
                table.entitle("bob", [""])
            with pytest.raises(CallRefused, match=r"'bob' may not call 'update' of 'prices': .*@writer"):
                table.update([clone.table.Change("a", b"\x02")])
        with clone.connect("prices", home=home) as owner:
            assert owner["a"] == 1
    finally:
        for run in runs:
            run.kill()
