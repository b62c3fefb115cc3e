"""`immortal log export`: a log in one file, from the command line, and the test that is made of it."""

from __future__ import annotations

from pathlib import Path

from immortal.log import open_reader
from immortal.replay.plan import RecordedLog
from immortal.testing import assert_replays
from tests.helpers.bank_apps import Bank, Teller
from tests.helpers.cli import HOME, immortal
from tests.helpers.recorded import Instances


def test_a_log_in_one_file(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "bank", "--peer", "tcp://127.0.0.1:*")
    assert "'bank' has not been started yet" in immortal(tmp_path, "log", "export", "bank", "bank.log", status=1)
    bank = Instances(tmp_path / HOME).start("bank", Bank)
    for _ in range(3):
        bank.impulse("credit", "ann", 5)
    said = immortal(tmp_path, "log", "export", "bank", "early.log")
    assert "after record -1 it has calls to compare, but no state: run 'immortal checkpoint bank'" in said
    bank.checkpoint()
    bank.close()
    said = immortal(tmp_path, "log", "export", "bank", "bank.log")
    size = f"{(tmp_path / 'bank.log').stat().st_size:,} bytes in bank.log\n"
    assert said == f"bank: records 0 to 3, 2 checkpoints: {size}"
    assert_replays(tmp_path / "bank.log", Bank)
    with open_reader(tmp_path / HOME / "bank" / "log") as live:
        recorded = RecordedLog.read(tmp_path / "bank.log")
        assert recorded.summary() == live.summary()
        assert (recorded.identity, recorded.problems) == (live.identity, [])
        for first, last in [(0, None), (1, 2), (2, 99), (9, None), (0, 0)]:
            assert list(recorded.values(first, last)) == list(live.values(first, last))
        assert list(recorded.checkpoint_chunks(1)) == list(live.checkpoint_chunks(1))


def test_a_backup_of_a_running_instance(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "bank", "--peer", "tcp://127.0.0.1:*")
    assert "'bank' has not been started yet" in immortal(tmp_path, "log", "backup", "bank", "safe", status=1)
    bank = Instances(tmp_path / HOME).start("bank", Bank)
    for _ in range(3):
        bank.impulse("credit", "ann", 5)
    said = immortal(tmp_path, "log", "backup", "bank", "safe")
    assert said == "bank: records 0 to 3 (4 of them new), 1 checkpoint in safe: verified\n"
    bank.impulse("credit", "ann", 5)
    said = immortal(tmp_path, "log", "backup", "bank", "safe")
    assert said == "bank: records 0 to 4 (1 of them new), 1 checkpoint in safe: verified\n"
    bank.close()
    with open_reader(tmp_path / HOME / "bank" / "log") as log, open_reader(tmp_path / "safe", "bank") as backup:
        assert list(backup.values(0)) == list(log.values(0))[: backup.last_sequence_id() + 1]
    (tmp_path / "there").write_text("")
    assert "is a file" in immortal(tmp_path, "log", "backup", "bank", "there", status=2)


def test_what_can_not_be_exported_is_said_in_one_line(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "bank", "--peer", "tcp://127.0.0.1:*")
    Instances(tmp_path / HOME).start("bank", Bank).close()
    (tmp_path / "there").write_text("")
    assert "there is there already" in immortal(tmp_path, "log", "export", "bank", "there", status=2)
    assert "no/bank.log can't be written" in immortal(tmp_path, "log", "export", "bank", "no/bank.log", status=1)
    assert "nobody" in immortal(tmp_path, "log", "export", "nobody", "file", status=1)


def test_calls_that_nobody_has_acknowledged_yet_are_no_obstacle(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "teller", "--peer", "tcp://127.0.0.1:*")
    teller = Instances(tmp_path / HOME).start("teller", Teller)  # and no bank: its calls wait
    teller.impulse("feeds", "ann", 5)
    teller.checkpoint()
    teller.impulse("feeds", "bob", 6)
    teller.checkpoint()
    teller.close()
    with open_reader(tmp_path / HOME / "teller" / "log") as live:
        assert "bank" in live.summary().checkpoints[-1].unacknowledged
    said = immortal(tmp_path, "log", "export", "teller", "teller.log")
    assert said.startswith("teller: records 0 to 2, 3 checkpoints: ")
    assert_replays(tmp_path / "teller.log", Teller)
    kept = RecordedLog.read(tmp_path / "teller.log").summary().checkpoints
    assert [mark.position for header in kept for mark in header.outputs.values()] == [1, 2]
