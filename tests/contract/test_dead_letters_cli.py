"""`immortal dead-letters`, `immortal skip`, `log show --audit` and what `status` says of failed calls, on a log alone.

What needs a running coordinator is asked of a function in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from immortal import Immortal, rpc
from immortal.appsdk.handlers.decorators import method_id_of_name
from immortal.cli import main
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.interfaces import AuditEntry, CheckpointHeader, Suspect, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import format as log_format
from immortal.coordinator.operator import control
from immortal.log import create_log, open_log, open_reader
from immortal.protocol.batch import encode_batch
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import MessageType, RpcKind, RpcType, encode_incoming_rpc, encode_message
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind

COMMITTER_ID = 77
TIME_NS = 1_700_000_000_123_456_789
ADD = method_id_of_name("add")
BAD = "no\x1b[2J \x9b\u202e"  # what a terminal would obey
APP = f"{__name__}:Counter"


class Counter(Immortal):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @rpc
    def add(self, n: int, note: str = "") -> None:
        self.total += n


def call(rpc_type: int, *arguments: Any, method_id: int = ADD, kind: int = RpcKind.CALL) -> bytes:
    return encode_incoming_rpc(method_id, rpc_type, msgspec.msgpack.encode(arguments), kind)


FORK = call(RpcType.FORK, "five", BAD)
WAITING = call(RpcType.ASYNC, "shop", 17, 5)
ANSWER = call(RpcType.FORK, 3, 5, kind=RpcKind.RETURNED_VALUE)
IMPULSE = call(RpcType.IMPULSE, 6)

REFUSED = Verdict(
    1, 0, VerdictKind.REFUSED, text=f"n: int was expected, got str {BAD}", cause=Cause.ARGUMENTS, message=FORK
)
UNDONE = Verdict(
    1, 3, VerdictKind.UNDONE, "ValueError", BAD, method=f"Counter.{BAD}", message=IMPULSE, trace=f"Trace\n  {BAD}"
)
AWAY = Verdict(9, 0, VerdictKind.KILLED, text="it ended 3 processes", method="Counter.add")  # too large, record gone


def value(sequence_id: int, content: bytes, *batches: BatchSource) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, content)
    return record + encode_trailer(Trailer(TIME_NS, batches), int.from_bytes(record[8:16], "little"))


@pytest.fixture
def settings(tmp_path: Path) -> InstanceSettings:
    """Record 0 is the initial message, behind it a checkpoint; records 1 and 2 have four messages each."""
    settings = Registry(tmp_path).register("counter", "tcp://127.0.0.1:*")
    calls = FORK + WAITING + ANSWER
    content = encode_batch(calls, 3) + calls + IMPULSE
    initial = value(0, encode_message(MessageType.INITIAL_MESSAGE, FORK), BatchSource(BatchKind.INITIAL, "", 0, 1, 0))
    store = create_log(settings.log, "counter", committer_id=COMMITTER_ID)
    store.commit(Transaction(records=[(0, initial)], extensions=frozenset()))
    store.write_checkpoint_chunk(1, 0, b"state")
    store.commit(Transaction(checkpoint=CheckpointHeader(1, 0, 5, crc64(b"state"), TIME_NS)))
    for number in (1, 2):
        stream = BatchSource(BatchKind.STREAM, "shop", 3 * number - 2, 3, TIME_NS)
        impulse = BatchSource(BatchKind.IMPULSES, "", number, 1, TIME_NS)
        store.commit(Transaction(records=[(number, value(number, content, stream, impulse))]))
    store.close()
    return settings


def commit(settings: InstanceSettings, transaction: Transaction) -> None:
    store = open_log(settings.log, settings.name)
    store.commit(transaction)
    store.close()


@pytest.fixture
def letters(settings: InstanceSettings) -> InstanceSettings:
    commit(settings, Transaction(verdicts=[REFUSED, UNDONE, AWAY]))
    return settings


def immortal(settings: InstanceSettings, *arguments: str, status: int = 0, given: str | None = None) -> Result:
    home = str(settings.folder.parent)
    result = CliRunner().invoke(main, ["--home", home, *arguments], input=given, catch_exceptions=False)
    assert result.exit_code == status, result.output
    for one in ("\x1b", "\x9b", "\u202e"):
        assert one not in result.output
    return result


# --- list, show, export ----------------------------------------------------------------------------------------------


def test_there_are_none(settings: InstanceSettings) -> None:
    assert immortal(settings, "dead-letters", "counter").output == "counter has no dead letters\n"
    assert immortal(settings, "dead-letters", "counter", "--json").output == "[]\n"
    assert immortal(settings, "dead-letters", "counter", "export").output == ""


def test_the_list(letters: InstanceSettings) -> None:
    lines = immortal(letters, "dead-letters", "counter").output.splitlines()
    assert lines[0].split() == ["ID", "when", "method", "from", "why"]
    assert [line.split()[0] for line in lines[1:]] == ["1:0", "1:3", "9:0"]
    assert f"  method {ADD}  " in lines[1]
    assert "  shop  " in lines[1]
    assert r"refused: n: int was expected, got str no\x1b[2J \x9b\u202e" in lines[1]
    assert r"Counter.no\x1b[2J" in lines[2]
    assert "  an impulse  " in lines[2]
    assert r"undone: ValueError: no\x1b[2J" in lines[2]
    assert "killed: it ended 3 processes" in lines[3]


def test_the_list_as_json(letters: InstanceSettings) -> None:
    found = json.loads(immortal(letters, "dead-letters", "counter", "--json").output)
    assert [(one["id"], one["kind"], one["cause"], one["from"]) for one in found] == [
        ("1:0", "refused", "arguments", "shop"),
        ("1:3", "undone", None, "an impulse"),
        ("9:0", "killed", None, None),
    ]
    assert (found[1]["type"], found[1]["text"], found[1]["method"]) == ("ValueError", BAD, f"Counter.{BAD}")


def test_one_without_its_class(letters: InstanceSettings) -> None:
    shown = immortal(letters, "dead-letters", "counter", "show", "1:3").output
    assert shown.startswith("dead letter 1:3\n  when ")
    assert "  arguments  [6]\n" in shown
    assert shown.endswith("\n  Trace\n    no\\x1b[2J \\x9b\\u202e\n")
    assert f"  method     method {ADD}\n" in immortal(letters, "dead-letters", "counter", "show", "1:0").output


def test_one_with_its_class(letters: InstanceSettings) -> None:
    shown = immortal(letters, "dead-letters", "counter", "show", "1:3", "--app", APP).output
    assert '  arguments  {"n": 6}\n' in shown
    found = json.loads(immortal(letters, "dead-letters", "counter", "show", "1:0", "--json", "--app", APP).output)
    assert found["method"] == "add"
    assert found["message"]["arguments"] == ["five", BAD]  # they do not fit the parameters
    assert "Expected `int`, got `str`" in found["message"]["problem"]
    assert bytes.fromhex(found["message_hex"]) == FORK


def test_the_class_of_the_settings_is_taken(letters: InstanceSettings) -> None:
    Registry(letters.folder.parent).remember_app("counter", APP)
    assert '{"n": 6}' in immortal(letters, "dead-letters", "counter", "show", "1:3").output
    Registry(letters.folder.parent).remember_app("counter", "no_such_module:Counter")
    said = immortal(letters, "dead-letters", "counter", "show", "1:3").output
    assert "there is no module 'no_such_module'" in said
    assert "  arguments  [6]\n" in said


@pytest.mark.parametrize("app", ["no_such_module:Counter", "json:JSONDecoder"])
def test_a_class_that_is_none(letters: InstanceSettings, app: str) -> None:
    said = immortal(letters, "dead-letters", "counter", "show", "1:3", "--app", app, status=1).output
    assert f"error: {app} can't be used to decode arguments: see above" in said


def test_one_whose_message_is_not_kept(letters: InstanceSettings) -> None:
    shown = immortal(letters, "dead-letters", "counter", "show", "9:0").output
    assert "the message is too large to be kept" in shown
    assert "arguments" not in shown


@pytest.mark.parametrize("message", [b"\x00", b"\x0a\x00\x09\x06\x01\x01", call(RpcType.FORK)[:-1] + b"\xc1"])
def test_a_message_of_any_bytes(settings: InstanceSettings, message: bytes) -> None:
    commit(settings, Transaction(verdicts=[undone_with(message)]))
    for more in ([], ["--app", APP]):
        shown = immortal(settings, "dead-letters", "counter", "show", "1:3", *more).output
        assert "  bytes" in shown


def undone_with(message: bytes) -> Verdict:
    return msgspec.structs.replace(UNDONE, message=message)


def test_an_unknown_one(letters: InstanceSettings) -> None:
    said = immortal(letters, "dead-letters", "counter", "show", "1:1", status=1).output
    assert said == "error: 'counter' has no dead letter 1:1: 'immortal dead-letters counter' lists them\n"


@pytest.mark.parametrize("wanted", ["1", "1:", ":1", "1:x", "-1:0", "1:2:3", "1" * 30 + ":0", "²:0"])
def test_no_id_at_all(letters: InstanceSettings, wanted: str) -> None:
    said = immortal(letters, "dead-letters", "counter", "show", "--", wanted, status=2).output
    assert "such as 312:0" in said


def test_export(letters: InstanceSettings, tmp_path: Path) -> None:
    lines = immortal(letters, "dead-letters", "counter", "export", "--app", APP).output.splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["id"] for one in found] == ["1:0", "1:3", "9:0"]
    assert found[1]["message"]["arguments"] == {"n": 6}
    assert found[1]["trace"] == UNDONE.trace
    file = tmp_path / "letters.json"
    assert immortal(letters, "dead-letters", "counter", "export", "--app", APP, str(file)).output == ""
    assert file.read_text().splitlines() == lines
    assert "is there already" in immortal(letters, "dead-letters", "counter", "export", str(file), status=2).output


def test_a_damaged_letter_is_told_and_left_out(letters: InstanceSettings) -> None:
    store = open_log(letters.log, "counter")
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        key = log_format.MESSAGE_KEY.pack(*UNDONE.key)
        transaction.put(key, b"damaged, and long enough", db=store.backend.tables["letters"])
    store.close()
    result = immortal(letters, "dead-letters", "counter")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["1:0", "9:0"]
    assert "warning: the dead letter 1:3 is damaged" in result.stderr
    assert (
        "the dead letter 1:3 is damaged" in immortal(letters, "dead-letters", "counter", "show", "1:3", status=1).output
    )


def test_an_instance_that_was_never_started(tmp_path: Path) -> None:
    settings = Registry(tmp_path).register("new", "tcp://127.0.0.1:*")
    for command in (
        ["dead-letters", "new"],
        ["skip", "new", "1:0", "--reason", "x"],
        ["log", "show", "new", "--audit"],
    ):
        assert "'new' has not been started yet" in immortal(settings, *command, status=1).output


# --- retry and drop --------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, dict[str, Any]]]]:
    """Puts a coordinator in place that gives one answer; what it was asked."""

    def put(answer: dict[str, Any] | Exception) -> list[tuple[str, dict[str, Any]]]:
        requests: list[tuple[str, dict[str, Any]]] = []

        def query(folder: Path, verb: str, timeout_s: float = 0, *, argument: dict[str, Any]) -> dict[str, Any]:
            requests.append((verb, argument))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(control, "query", query)
        monkeypatch.setattr(control, "running", lambda folder: control.ControlFile(pid=1, control="", started_ns=0))
        return requests

    return put


Asked = Callable[..., list[tuple[str, dict[str, Any]]]]


def test_retry(letters: InstanceSettings, asked: Asked) -> None:
    requests = asked({"retried": 2, "refused": {}})
    said = immortal(letters, "dead-letters", "counter", "retry", "1:3", "1:0", "1:3").output
    assert said == "counter: 2 dead letters retried\n"
    ((verb, request),) = requests
    assert (verb, request["keys"]) == ("letters-retry", [[1, 3, 0, 0], [1, 0, 0, 0]])
    assert "(uid " in request["who"]
    assert "all" not in request


def test_retry_of_what_is_refused(letters: InstanceSettings, asked: Asked) -> None:
    requests = asked({"retried": 1, "refused": {"1:3": f"there is no method {BAD}"}})
    result = immortal(letters, "dead-letters", "counter", "retry", "--all", status=1)
    assert result.stdout == "counter: 1 dead letter retried\n"
    assert result.stderr == "1:3 is not retried: there is no method no\\x1b[2J \\x9b\\u202e\n"
    assert requests[0][1]["all"] is True


def test_drop_asks_first(letters: InstanceSettings, asked: Asked) -> None:
    requests = asked({"dropped": 3})
    said = immortal(letters, "dead-letters", "counter", "drop", "--all", given="n\n", status=1).output
    assert "Drop all dead letters of counter for good?" in said
    assert requests == []
    said = immortal(letters, "dead-letters", "counter", "drop", "1:0", given="y\n").output
    assert "Drop 1 dead letter of counter for good?" in said
    said = immortal(letters, "dead-letters", "counter", "drop", "--all", "--yes").output
    assert said == "counter: 3 dead letters dropped\n"
    assert [(verb, request.get("keys"), request.get("all")) for verb, request in requests] == [
        ("letters-drop", [[1, 0, 0, 0]], None),
        ("letters-drop", None, True),
    ]


@pytest.mark.parametrize("verb", ["retry", "drop"])
def test_without_a_coordinator(letters: InstanceSettings, verb: str) -> None:
    said = immortal(letters, "dead-letters", "counter", verb, "--all", status=1).output
    assert said == (
        "error: 'counter' is not running, and only its coordinator can change its dead letters: start it with 'immortal"
        " run counter'\n"
    )


@pytest.mark.parametrize("verb", ["retry", "drop"])
def test_which_ones(letters: InstanceSettings, asked: Asked, verb: str) -> None:
    requests = asked({})
    for arguments in ([], ["1:0", "--all"]):
        said = immortal(letters, "dead-letters", "counter", verb, *arguments, status=2).output
        assert "either IDs or --all" in said
    said = immortal(letters, "dead-letters", "counter", verb, "1:0", "5:5", status=1).output
    assert "has no dead letter 5:5" in said
    assert requests == []


def test_an_older_coordinator(letters: InstanceSettings, asked: Asked) -> None:
    asked({"error": "unknown verb 'letters-retry'"})
    said = immortal(letters, "dead-letters", "counter", "retry", "--all", status=1).output
    assert said == "error: unknown verb 'letters-retry'\n"


# --- skip ------------------------------------------------------------------------------------------------------------


def skipped(settings: InstanceSettings) -> list[Verdict]:
    with open_reader(settings.log, settings.name) as reader:
        kept = {letter.verdict.key: letter.verdict for letter in reader.letters()}
        return [kept.get(verdict.key, verdict) for verdict in reader.verdicts()]


def test_skip_of_a_stopped_instance(settings: InstanceSettings) -> None:
    said = immortal(settings, "skip", "counter", "1:0", "--reason", f"it hangs {BAD}").output
    assert said.splitlines() == [
        "counter: message 0 of record 1 is skipped",
        "if the app had handled it, 'immortal verify counter' shows what the replay now does differently",
    ]
    immortal(settings, "skip", "counter", "2:1", "--reason", "as well")
    immortal(settings, "skip", "counter", "2:3", "--reason", "too")
    immortal(settings, "skip", "counter", "1:2", "--reason", "an answer")
    skip, method = VerdictKind.SKIPPED, f"method {ADD}"
    assert skipped(settings) == [
        Verdict(1, 0, skip, text=f"it hangs {BAD}", method=method, message=FORK),
        Verdict(1, 2, skip, text="an answer", method=f"an answer of {method}", message=ANSWER),
        Verdict(2, 1, skip, text="as well", method=method, caller="shop"),
        Verdict(2, 3, skip, text="too", method=method, message=IMPULSE),
    ]
    lines = immortal(settings, "log", "show", "counter", "--audit").output.splitlines()
    assert len(lines) == 4
    assert "(uid " in lines[0]
    assert lines[0].endswith(r"  skipped message 0 of record 1: it hangs no\x1b[2J \x9b\u202e")
    entries = immortal(settings, "log", "show", "counter", "--audit", "--json").output.splitlines()
    assert [json.loads(entry)["what"] for entry in entries][1:] == [
        "skipped message 1 of record 2: as well",
        "skipped message 3 of record 2: too",
        "skipped message 2 of record 1: an answer",
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("0:0", "after its checkpoint 1 there are records 1 to 2"),
        ("3:0", "record 3 is not one that 'counter' would replay"),
        ("1:4", "record 1 has no message 4: messages are counted from 0"),
    ],
)
def test_what_can_not_be_skipped(settings: InstanceSettings, message: str, said: str) -> None:
    assert said in immortal(settings, "skip", "counter", message, "--reason", "x", status=1).output
    assert skipped(settings) == []
    assert "no operator has changed anything" in immortal(settings, "log", "show", "counter", "--audit").stderr


def test_the_initial_message_can_not_be_skipped(settings: InstanceSettings) -> None:
    commit(settings, Transaction(checkpoint=CheckpointHeader(2, -1, 0, crc64(b""), TIME_NS)))
    said = immortal(settings, "skip", "counter", "0:0", "--reason", "x", status=1).output
    assert "is the initial message, which makes the first state" in said


def test_a_message_with_a_verdict_is_not_skipped(letters: InstanceSettings) -> None:
    said = immortal(letters, "skip", "counter", "1:3", "--reason", "x", status=1).output
    assert said == "error: message 3 of record 1 has a verdict already: undone\n"


@pytest.mark.parametrize("reason", ["", "  ", "x" * 5000])
def test_a_reason_is_needed(settings: InstanceSettings, reason: str) -> None:
    assert (
        "characters: expected 1 to 4096"
        in immortal(settings, "skip", "counter", "1:0", "--reason", reason, status=2).output
    )


def test_skip_of_a_running_instance(settings: InstanceSettings, asked: Asked) -> None:
    requests = asked({"skipped": True})
    immortal(settings, "skip", "counter", "1:0", "--reason", "it hangs")
    ((verb, request),) = requests
    who = request.pop("who")
    assert (verb, request) == ("skip", {"sequence_id": 1, "message_index": 0, "reason": "it hangs"})
    assert "(uid " in who
    assert skipped(settings) == []  # the coordinator's to do


def test_a_running_instance_refuses(settings: InstanceSettings, asked: Asked) -> None:
    asked(control.RefusedError("counter", "it is in the state already"))
    said = immortal(settings, "skip", "counter", "1:0", "--reason", "it hangs", status=1).output
    assert said == "error: it is in the state already\n"


def test_audit_stands_alone(settings: InstanceSettings) -> None:
    assert (
        "--audit can be combined with --json only"
        in immortal(settings, "log", "show", "counter", "--audit", "--limit", "3", status=2).output
    )


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_a_stopped_instance(letters: InstanceSettings) -> None:
    commit(letters, Transaction(suspect=Suspect(2, 1, 2, 2), audit=[AuditEntry(TIME_NS, "ann", "looked")]))
    said = immortal(letters, "status", "counter").output
    assert "counter: its app has ended without an error message 2 times in a row, at record 2, message 1\n" in said
    assert "counter: calls that failed: 1 refused, 1 undone, 1 killed; the app's output has each, and why\n" in said
    assert "counter: 3 dead letters, " in said
    row = json.loads(immortal(letters, "status", "counter", "--json").output)
    assert (row["letters"]["count"], row["verdicts"]) == (3, {"refused": 1, "undone": 1, "killed": 1})


def test_status_of_a_running_instance(letters: InstanceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    handling = {"method": f"Counter.{BAD}", "for_s": 31.4, "record": 312, "message": 0, "caller": "shop"}
    status = {
        "name": "counter",
        "phase": "normal",
        "handling": handling,
        "letters": {"count": 2, "bytes": 2048, "lost": 7},
        "verdicts": {"refused": 0, "undone": 2},
        "suspect": {"record": 312, "message": None, "runs": 1},
    }
    monkeypatch.setattr(control, "query", lambda folder, verb, *timeout_s: status)
    monkeypatch.setattr(control, "running", lambda folder: control.ControlFile(pid=1, control="", started_ns=0))
    said = immortal(letters, "status", "counter").output
    assert "handling Counter.no\\x1b[2J \\x9b\\u202e for 31 s, record 312, called by shop\n" in said
    assert "its app has ended without an error message once, at record 312\n" in said
    assert "counter: calls that failed: 2 undone; the app's output has each, and why\n" in said
    assert "2 dead letters, 2.0 KiB; dropped for lack of room: 7 ('immortal dead-letters" in said
    handling["caller"] = ""
    assert ", called by itself\n" in immortal(letters, "status", "counter").output
