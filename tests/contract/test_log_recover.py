"""`immortal recover`: what it says of a sound and of a damaged log, and cutting by hand at the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.coordinator.core.interfaces import CheckpointHeader, SourcePosition, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.verify import verify_log
from immortal.coordinator.operator import control
from immortal.log import create_log, open_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from tests.helpers.processes import House

COMMITTER_ID = 77


def make_value(sequence_id: int) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, b"content")
    batches = [BatchSource(BatchKind.STREAM, "reader", 10 * sequence_id + 1, 10, 0)]
    return record + encode_trailer(Trailer(5, batches), int.from_bytes(record[8:16], "little"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The instance "counter": 10 records, checkpoint 1 after record 2, checkpoint 2 after record 5."""
    settings = Registry(tmp_path).register("counter", "tcp://127.0.0.1:*")
    store = create_log(settings.log, "counter", committer_id=COMMITTER_ID)
    records = [(number, make_value(number)) for number in range(10)]
    store.commit(Transaction(records=records, sources={"reader": SourcePosition(88, 1, 100)}))
    for checkpoint_id, sequence_id in ((1, 2), (2, 5)):
        store.write_checkpoint_chunk(checkpoint_id, 0, b"blob")
        store.commit(Transaction(checkpoint=CheckpointHeader(checkpoint_id, sequence_id, 4, crc64(b"blob"), 1)))
    store.close()
    return tmp_path


def log_of(home: Path) -> Path:
    return Path(Registry(home).load("counter").log)


def damage(home: Path, table: str, key: bytes) -> None:
    store = open_log(log_of(home), "counter")
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        transaction.put(key, b"damaged, and long enough to be a value", db=store.backend.tables[table])
    store.close()


def damage_record(home: Path, sequence_id: int) -> None:
    damage(home, "records", log_format.SEQUENCE_KEY.pack(sequence_id))


def recover(home: Path, *arguments: str, answer: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["--home", str(home), "recover", "counter", *arguments], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def last_sequence_id(home: Path) -> int:
    with open_reader(log_of(home)) as reader:
        return reader.last_sequence_id()


def damaged_value(folder: Path, sequence_id: int) -> None:
    """Flip a bit in a record that a coordinator wrote."""
    store = open_log(folder, "alice")
    key = log_format.SEQUENCE_KEY.pack(sequence_id)
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(key, db=store.backend.tables["records"]))
        value[40] ^= 1
        transaction.put(key, bytes(value), db=store.backend.tables["records"])
    store.close()


def test_an_instance_goes_on_behind_a_cut(tmp_path: Path) -> None:
    """A real coordinator stops at the damaged record, names the command, and runs again after it."""
    house = House(tmp_path)
    try:
        house.register("alice")
        process, app = house.both("alice", extended=True)
        for number in range(1, 6):
            app.impulse(number)
            app.until(lambda: len(app.state["forwarded"]) == number)  # noqa: B023
        process.kill()
        damaged_value(house.settings("alice").log, 3)
        process = house.start("alice")
        house.app("alice", extended=True).until_closed()
        assert "'immortal recover alice' says what can be done" in process.line("record 3 is damaged")
        process.ended()
        result = CliRunner().invoke(main, ["--home", str(tmp_path), "recover", "alice"])
        assert result.exit_code == 1
        assert "--truncate-at 3" in result.output
        cut = ["--home", str(tmp_path), "recover", "alice", "--truncate-at", "3", "--yes"]
        result = CliRunner().invoke(main, cut)
        assert result.exit_code == 0, result.output
        assert "impulses to itself: 3 messages, positions 3 to 5" in result.output
        process, app = house.both("alice", extended=True)
        assert app.state["forwarded"] == [1, 2]
        app.impulse(6)
        app.until(lambda: app.state["forwarded"] == [1, 2, 6])
        process.terminate()
        app.until_closed()
        assert process.ended()[0] == 0
    finally:
        house.close()
    with open_reader(house.settings("alice").log) as reader:
        assert reader.summary().cut_sequence_id is None, "the checkpoint behind the cut heals it"
    verification = verify_log(house.settings("alice").log)
    assert {finding.severity for finding in verification.findings()} <= {Severity.NOTE}  # none once all is trimmed


def test_a_sound_log(home: Path) -> None:
    result = recover(home)
    assert result.exit_code == 0
    assert result.output == (
        "counter can recover: it would start from checkpoint 2 (after record 5) and replay 4 records, 6 to 9\n"
    )
    found = json.loads(recover(home, "--json").output)
    assert found == {
        "name": "counter",
        "can_recover": True,
        "checkpoint_id": 2,
        "checkpoint_sequence_id": 5,
        "last_sequence_id": 9,
        "records": 4,
        "first_damaged": None,
        "findings": [],
        "remedy": None,
        "unsaved": None,
        "diverged": None,
    }


def test_a_log_without_a_checkpoint(tmp_path: Path) -> None:
    settings = Registry(tmp_path).register("counter", "tcp://127.0.0.1:*")
    result = recover(tmp_path)
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "has not been started yet" in result.output
    create_log(settings.log, "counter").close()
    result = recover(tmp_path)
    assert result.exit_code == 0
    assert result.output.startswith("counter has no checkpoint yet: its next start is its first\n")


def test_damage_that_recovery_does_not_need(home: Path) -> None:
    damage_record(home, 1)
    result = recover(home)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("counter can recover: it would start from checkpoint 2")
    assert lines[1].startswith("damage: record 1 is damaged")
    assert len(lines) == 2


def test_a_damaged_checkpoint_makes_the_replay_longer(home: Path) -> None:
    damage(home, "chunks", log_format.CHUNK_KEY.pack(2, 0))
    result = recover(home)
    assert result.exit_code == 0
    assert "start from checkpoint 1 (after record 2) and replay 7 records, 3 to 9" in result.output
    assert "damage: checkpoint 2 is damaged" in result.output


def test_a_damaged_record_that_recovery_needs(home: Path) -> None:
    damage_record(home, 8)
    result = recover(home)
    assert result.exit_code == 1
    first, *_ = result.output.splitlines()
    assert first == (
        "counter can NOT recover: it would start from checkpoint 2 (after record 5) and stop at record 8 of 9"
    )
    helps = result.output.index("'immortal recover counter --truncate-at 8' cuts off record 8 and all later ones")
    would = result.output[helps:].splitlines()[1:]  # what the cut says itself, before it asks
    assert would
    asked = recover(home, "--truncate-at", "8", answer="n\n").output.splitlines()
    assert [line.strip() for line in would] == [line.strip() for line in asked[: len(would)]]
    assert asked[len(would)].startswith("Cut the log?")
    found = json.loads(recover(home, "--json").output)
    assert (found["can_recover"], found["first_damaged"], found["records"]) == (False, 8, 4)
    assert "--truncate-at 8" in found["remedy"]


@pytest.mark.parametrize("what", ["checkpoints", "sources"])
def test_what_no_cut_can_heal(home: Path, what: str) -> None:
    if what == "sources":
        damage(home, "sources", b"reader\0")
    else:
        damage(home, "chunks", log_format.CHUNK_KEY.pack(1, 0))
        damage(home, "chunks", log_format.CHUNK_KEY.pack(2, 0))
    result = recover(home)
    assert result.exit_code == 1
    assert "can NOT recover" in result.output.splitlines()[0]
    assert result.output.splitlines()[-1] == "what helps: restore the log from a copy"
    result = recover(home, "--truncate-at", "8", "--yes")
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert last_sequence_id(home) == 9


def test_the_log_of_another_instance_is_not_taken_for_damaged(home: Path) -> None:
    """It advised to restore the log from a copy."""
    settings = Registry(home).register("other", "tcp://127.0.0.1:*")
    shutil.copytree(log_of(home), settings.log)
    for command in (["recover"], ["log", "verify"]):
        result = CliRunner().invoke(main, ["--home", str(home), *command, "other"])
        assert result.exit_code == 1
        assert result.output == (
            f"error: the log in {settings.log} belongs to instance 'counter', not to 'other': check the log folder's"
            " path\n"
        )


def test_it_asks_before_it_cuts(home: Path) -> None:
    damage_record(home, 8)
    for answer in ("n\n", ""):
        result = recover(home, "--truncate-at", "8", answer=answer)
        assert result.exit_code == 1
        assert "Cut the log?" in result.output
        assert last_sequence_id(home) == 9
    result = recover(home, "--truncate-at", "8", answer="y\n")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == (
        "this cuts records 8 to 9 off the log of counter, 1 of them damaged or missing, and keeps them beside it"
    )
    assert lines[1] == (
        "counter then recovers from checkpoint 2 (after record 5), replays 2 records, and has the state after record 7"
    )
    assert lines[2:4] == [
        "lost messages, because their senders count them as received:",
        "  from reader: 20 messages, positions 81 to 100",
    ]
    assert f"kept in {log_of(home)}/cut-8-9-1" in lines[-1]
    assert last_sequence_id(home) == 7
    assert recover(home).exit_code == 0


def test_cutting_without_asking(home: Path) -> None:
    damage_record(home, 8)
    result = recover(home, "--truncate-at", "8", "--yes", "--json")
    assert result.exit_code == 0
    cut = json.loads(result.output)
    assert (cut["sequence_id"], cut["last_sequence_id"], cut["first_damaged"]) == (8, 9, 8)
    assert cut["lost"] == [{"source": "reader", "first_position": 81, "last_position": 100}]
    assert Path(cut["kept_in"]).is_dir()
    assert list(verify_log(log_of(home)).findings())
    assert recover(home).exit_code == 0


def test_a_sound_record_is_cut_only_with_its_reason(home: Path) -> None:
    result = recover(home, "--truncate-at", "8", answer="n\n")
    assert "none of them is damaged" in result.output
    damage_record(home, 8)
    result = recover(home, "--truncate-at", "7", answer="n\n")
    assert "the first damaged record is 8: the records before it could be kept" in result.output
    result = recover(home, "--truncate-at", "4", "--yes")
    assert result.exit_code == 1
    assert result.output.startswith("error: checkpoint 2 (after record 5) is whole, so recovery does not need record 4")
    assert "with --force this cuts records 4 to 9 off the log of counter" in result.output
    assert "counter then recovers from checkpoint 1 " in result.output
    assert recover(home, "--truncate-at", "4", "--force", "--yes").exit_code == 0
    assert last_sequence_id(home) == 3


def test_refusals_are_one_line(home: Path) -> None:
    for arguments, message in (
        (("--truncate-at", "77", "--yes"), "record 77 is not in the log of 'counter': it holds records 0 to 9"),
        (("--truncate-at", "2", "--force", "--yes"), "no whole checkpoint from before record 2 is kept"),
    ):
        result = recover(home, *arguments)
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert result.output.startswith(f"error: {message}")
    for arguments in (("--force",), ("--yes",), ("--truncate-at", "-1"), ("--truncate-at", "x")):
        assert recover(home, *arguments).exit_code == 2


def test_a_running_coordinator(home: Path) -> None:
    damage_record(home, 8)
    settings = Registry(home).load("counter")
    store = open_log(settings.log, "counter")
    result = recover(home, "--truncate-at", "8", "--yes")
    assert result.exit_code == 1
    assert "is in use by process" in result.output
    store.close()
    control.announce(settings.folder, Path("/there/is/none"))
    result = recover(home, "--truncate-at", "8", "--yes")
    assert result.exit_code == 1
    assert "error: 'counter' runs, as process" in result.output
    assert last_sequence_id(home) == 9
