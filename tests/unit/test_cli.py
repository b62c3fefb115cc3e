"""The commands, with click's runner; what is wrong with the input is in tests/scenarios/test_bad_input_cli.py."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from immortal.cli import lifecycle, main
from immortal.coordinator.core.interfaces import IMPULSES, CheckpointHeader, OutputMark, SourcePosition, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.log import LoggedValue, create_log
from immortal.presenters.records import describe_record, record_lines
from immortal.protocol.batch import encode_batch
from immortal.protocol.checksum import crc64
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.files import ProcessFile
from immortal.protocol.messages import MessageType, RpcKind, encode_incoming_rpc, encode_message, encode_outgoing_rpc
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry, Trailer, encode_trailer
from tests.helpers.answering import answering

COMMITTER_ID = 77
TIME_NS = 1_700_000_000_123_456_789


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def registry(home: Path) -> Registry:
    return Registry(home)


def run(home: Path, *arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["--home", str(home), *arguments])
    assert result.exit_code == status, result.output
    return result


def logged_value(
    sequence_id: int, content: bytes, batches: list[BatchSource], committer_id: int = COMMITTER_ID
) -> bytes:
    record = encode_record(committer_id, sequence_id, content)
    outputs = [OutputMarkEntry("printer", sequence_id + 1, 0xABC)]
    return record + encode_trailer(Trailer(TIME_NS, batches, outputs), decode_header(record).check)


def first_value() -> bytes:
    wrapped = encode_outgoing_rpc("", 32, 1, b"\x05\x04\x03")
    content = encode_record_time(TIME_NS) + encode_message(MessageType.INITIAL_MESSAGE, wrapped)
    return logged_value(0, content, [BatchSource(BatchKind.INITIAL, "", 0, 1, TIME_NS)])


def second_value() -> bytes:
    calls = encode_incoming_rpc(-7, 1, b"hello") + encode_incoming_rpc(9, 0, b"x" * 100)
    impulse = encode_incoming_rpc(3, 2, b"!")
    batches = [
        BatchSource(BatchKind.STREAM, "reader", 1, 2, TIME_NS),
        BatchSource(BatchKind.IMPULSES, "", 5, 1, TIME_NS),
    ]
    return logged_value(1, encode_record_time(TIME_NS) + encode_batch(calls, 2) + calls + impulse, batches)


@pytest.fixture
def logged(registry: Registry) -> Registry:
    """The instance "counter" with two records and a checkpoint of the first."""
    settings = registry.register("counter", "tcp://127.0.0.1:*")
    store = create_log(settings.log, "counter", committer_id=COMMITTER_ID)
    store.commit(
        Transaction(
            records=[(0, first_value())],
            epoch=1,
            extensions=frozenset(),
        )
    )
    store.write_checkpoint_chunk(1, 0, b"state")
    header = CheckpointHeader(1, 0, 5, crc64(b"state"), TIME_NS, {"printer": OutputMark(1, 0xABC)})
    store.commit(Transaction(checkpoint=header))
    store.commit(
        Transaction(
            records=[(1, second_value())],
            sources={"reader": SourcePosition(88, 3, 2), IMPULSES: SourcePosition(COMMITTER_ID, 1, 5)},
            acknowledged={"printer": 1},
        )
    )
    store.close()
    return registry


def test_register_and_unregister(home: Path) -> None:
    output = run(home, "register", "counter", "--peer", "tcp://127.0.0.1:7001", "--app-port", "7002").output
    at = f"unix:{home}/counter/app.sock and 127.0.0.1:7002"
    assert f"registered counter: peers at tcp://127.0.0.1:7001, app at {at}\n" in output
    assert "immortal run counter MODULE:CLASS" in output
    assert "unregistered counter" in run(home, "unregister", "counter").output
    assert Registry(home).names() == []


def test_register_with_all_options(home: Path, tmp_path: Path) -> None:
    options = ["--app-port", "*", "--log", str(tmp_path / "l"), "--keep-checkpoints", "all", "--log-trigger-mb", "5"]
    run(home, "register", "counter", "--peer", "tcp://127.0.0.1:*", *options)
    settings = Registry(home).load("counter")
    assert (settings.log, settings.keep_checkpoints, settings.log_trigger_mb) == (str(tmp_path / "l"), None, 5)


def test_home_from_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMMORTAL_HOME", str(home))
    result = CliRunner().invoke(main, ["register", "counter", "--peer", "tcp://127.0.0.1:*"])
    assert result.exit_code == 0
    assert Registry(home).names() == ["counter"]


def test_version_and_help(home: Path) -> None:
    assert run(home, "--version").output.startswith("immortal, version ")
    for command in ("register", "unregister", "run", "coordinator", "status", "log"):
        assert command in run(home, "--help").output


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_nothing(home: Path) -> None:
    assert "nothing is registered in" in run(home, "status").output
    assert json.loads(run(home, "status", "--json").output) == []


def test_status_before_the_first_start(home: Path) -> None:
    run(home, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    assert "not started yet" in run(home, "status").output
    assert json.loads(run(home, "status", "counter", "--json").output) == {
        "name": "counter",
        "phase": "not started yet",
        "state": "not started yet",
    }


def test_status_of_a_stopped_one(logged: Registry) -> None:
    row = json.loads(run(logged.home, "status", "counter", "--json").output)
    assert row.pop("checkpoint").pop("age_s") > 0
    assert row == {
        "name": "counter",
        "phase": "stopped",
        "state": "stopped",
        "version": None,
        "committer_id": COMMITTER_ID,
        "epoch": 1,
        "sequence_id": 1,
        "inputs": {"reader": {"position": 2}},
        "impulses": 5,
        "outputs": {"printer": {"acknowledged": 1, "position_at_checkpoint": 1}},
    }
    output = run(logged.home, "status").output
    assert "stopped" in output
    assert "reader 2" in output
    assert "printer 1" in output


LIVE: dict[str, Any] = {
    "name": "counter",
    "phase": "normal",
    "sequence_id": 41,
    "backlog_records": 3,
    "app_silent_s": 12.0,
    "checkpoint": {"id": 2, "sequence_id": 7, "size_bytes": 2048, "age_s": 130.0},
    "inputs": {"reader": {"position": 9}},
    "outputs": {"printer": {"position": 9, "acknowledged": 4, "waiting_bytes": 10, "error": "no [bold] printer"}},
}


@pytest.fixture
def live(logged: Registry) -> Any:
    """A stand-in for the running coordinator of "counter"."""
    answers = [json.dumps(LIVE).encode()]
    with answering(logged.home / "counter", lambda: answers[0]) as asked:
        yield answers
    assert {one.verb for one in asked} == {"status"}


def test_status_of_a_live_one(logged: Registry, live: list[bytes]) -> None:
    assert json.loads(run(logged.home, "status", "--json").output)[0].items() >= LIVE.items()
    output = run(logged.home, "status").output
    for part in ("running (the app has read nothing for 12 s)", "41", "2 after record 7, 2.0 KiB, 2 min ago"):
        assert part in output
    assert "printer 4 of 9, 10 B waiting" in output
    assert "counter to printer: no [bold] printer" in output


def test_status_says_who_is_waited_for_and_that_a_log_is_full(logged: Registry, live: list[bytes]) -> None:
    printer = {"position": 9, "acknowledged": 4, "waiting_bytes": 3 << 20, "spilled_bytes": 2 << 20}
    full = {"full": "'counter' is full: its log takes 9 MiB"}
    live[0] = json.dumps(LIVE | {"outputs": {"printer": printer}, "held_up_for": ["printer"], "log": full}).encode()
    output = run(logged.home, "status").output
    assert "printer 4 of 9, 3.0 MiB waiting, 2.0 MiB on disk" in output
    assert (
        "counter: its app is held up: too much output waits for printer (peer_buffer_mib_max and spill_limit_mb)"
        in output
    )
    assert "counter: input from peers and impulses are held back: 'counter' is full: its log takes 9 MiB" in output


def test_an_answer_that_makes_no_sense(logged: Registry, live: list[bytes]) -> None:
    live[0] = b"[1"
    output = run(logged.home, "status", status=1).output
    assert "the coordinator of 'counter' gave an answer that makes no sense" in output


def test_a_coordinator_that_does_not_answer(logged: Registry) -> None:
    no_answer = pytest.raises(control.ControlError, match=r"gives no answer at /.*/control\.sock within 0\.3 s")
    with answering(logged.home / "counter", lambda: None) as asked, no_answer:
        control.query(logged.home / "counter", "status", 0.3)
    assert len(asked) == 1


# --- log -------------------------------------------------------------------------------------------------------------


def test_log_show(logged: Registry) -> None:
    lines = run(logged.home, "log", "show", "counter").output.splitlines()
    check = f"{decode_header(first_value()).check:016x}"
    assert lines[0] == (
        f"record 0  2023-11-14T22:13:20.123456Z  {decode_header(first_value()).size_bytes} bytes  check {check}"
        "  from the first start  outputs printer 1"
    )
    assert lines[1] == "    RECORD_TIME 2023-11-14T22:13:20.123456Z"
    assert lines[2] == r"    INITIAL_MESSAGE  9 bytes wraps RPC method 32 fork  3 bytes  \x05\x04\x03"
    assert "from reader 1-2, impulses 5  outputs printer 2" in lines[3]
    assert lines[5] == "    RPC_BATCH RPC method -7 fork  5 bytes  hello"
    assert lines[6] == f"    RPC_BATCH RPC method 9 async  100 bytes  {'x' * 48}..."
    assert lines[7] == "    RPC method 3 impulse  1 bytes  !"
    assert len(lines) == 8


def test_log_show_as_json(logged: Registry) -> None:
    rows = [json.loads(line) for line in run(logged.home, "log", "show", "counter", "--json").output.splitlines()]
    assert [row["sequence_id"] for row in rows] == [0, 1]
    assert rows[1]["sources"][0] == {
        "kind": "stream",
        "source": "reader",
        "first_position": 1,
        "count": 2,
        "send_time_ns": TIME_NS,
    }
    assert rows[1]["outputs"] == [{"destination": "printer", "position": 2, "check": f"{0xABC:016x}"}]
    assert [message["type"] for message in rows[1]["messages"]] == ["RECORD_TIME", "RPC", "RPC", "RPC"]
    assert rows[0]["messages"][1]["wraps"]["method_id"] == 32


@pytest.mark.parametrize(
    ("options", "shown"),
    [(["--from", "1"], [1]), (["--to", "0"], [0]), (["--limit", "1"], [0]), (["--from", "0", "--to", "5"], [0, 1])],
)
def test_log_show_of_a_range(logged: Registry, options: list[str], shown: list[int]) -> None:
    output = run(logged.home, "log", "show", "counter", "--json", *options).output
    assert [json.loads(line)["sequence_id"] for line in output.splitlines()] == shown


def test_log_show_of_an_empty_range(logged: Registry) -> None:
    result = run(logged.home, "log", "show", "counter", "--from", "8")
    assert result.stdout == ""
    assert "nothing to show: the log of counter holds records 0 to 1" in result.stderr


def test_a_damaged_record_is_marked() -> None:
    damaged = LoggedValue(4, b"???", "record 4 is damaged: so and so")
    assert list(record_lines(describe_record(damaged, 1))) == ["record 4  DAMAGED: record 4 is damaged: so and so"]


def test_contents_that_make_no_sense_are_marked() -> None:
    value = logged_value(4, b"\x00", [])
    described = describe_record(LoggedValue(4, value, None), COMMITTER_ID)
    assert "gives its size as 0" in described["problem"]


@pytest.mark.parametrize(
    "arguments", [b"", b"\x03", b"\xa3abc", b"\x91" * 5000 + b"\1", b"\x91\x81\x80\1", b"\x91\xd4\xff\0"]
)
@pytest.mark.parametrize("kind", RpcKind)
def test_arguments_that_are_none_of_the_sdk_are_shown_as_bytes(arguments: bytes, kind: RpcKind) -> None:
    content = encode_incoming_rpc(3, 0, arguments, kind)
    value = logged_value(4, content, [BatchSource(BatchKind.STREAM, "\x1b[2J\nrecord 5", 1, 1, 0)])
    described = describe_record(LoggedValue(4, value, None), COMMITTER_ID, {("", 3): "Counter.\x9bcount"})
    (message,) = described["messages"]
    assert (message["method"], "values" in message) == ("Counter.\x9bcount", False)
    lines = list(record_lines(described))
    assert "  from \\x1b[2J\\nrecord 5 1" in lines[0]
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_log_verify(logged: Registry) -> None:
    output = run(logged.home, "log", "verify", "counter").output
    assert "counter: sound: 2 records (0 to 1, " in output
    report = json.loads(run(logged.home, "log", "verify", "counter", "--json").output)
    assert report["sound"] is True
    assert report["recovery_checkpoint_id"] == 1


def test_log_verify_of_a_damaged_log(logged: Registry) -> None:
    path = Path(logged.load("counter").log) / "data.mdb"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"hello", b"jello"))
    result = run(logged.home, "log", "verify", "counter", status=1)
    assert "fatal: record 1 is damaged" in result.output
    assert "counter: DAMAGED" in result.output
    assert json.loads(run(logged.home, "log", "verify", "counter", "--json", status=1).output)["sound"] is False
    assert "record 1  DAMAGED" in run(logged.home, "log", "show", "counter").output


def test_a_database_that_is_away_hinders_no_stop(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("counter", "tcp://127.0.0.1:*", log="postgresql://127.0.0.1:1/nowhere")
    with subprocess.Popen(["sleep", "600"]) as process:
        known = ProcessFile(pid=process.pid, started_ns=0)
        monkeypatch.setattr(control, "supervisor", lambda folder: known)
        monkeypatch.setattr(lifecycle, "shares_pid_namespace", lambda known: True)
        try:
            run(registry.home, "stop", "counter", status=1)  # nobody can say with which checkpoint
            assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()
