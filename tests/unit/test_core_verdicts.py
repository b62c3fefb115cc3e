"""Messages that fail alone, as the core has them: verdicts, what they hold back, dead letters, the operator's hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import AuditEntry, Letter, Transaction
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import (
    CLIENTS,
    ClientFrame,
    ClientFrameType,
    caller_of,
    encode_request,
    msgpack_string,
)
from immortal.protocol.extensions import AppDescription, Hello, encode_app_batch, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, RpcKind, decode_messages, encode_incoming_rpc, encode_message
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import OutputMarkEntry, decode_trailer
from immortal.protocol.verdicts import (
    LETTER_SIZE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    TRACE_CHARACTERS_MAX,
    Careful,
    Cause,
    Handling,
    Verdict,
    VerdictKind,
    decode_careful,
    decode_verdicts,
    encode_handling,
    encode_verdict,
)
from tests.helpers.core import (
    EXTENSIONS,
    NOW_NS,
    Driven,
    arguments,
    attach,
    call,
    checkpoint,
    first_start,
    records,
    rpc,
)

HELLO = encode_hello(Hello(EXTENSIONS, "fails"))
KEY = (1, 0, 0, 0)
LETTER = Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no", message=rpc(1), trace="Traceback")
FAILED = msgspec.structs.replace(LETTER, caller="b", message=b"", trace="")


def told(driven: Driven) -> list[Verdict]:
    """The verdicts that the app was sent."""
    found = []
    for record in records(bytes(driven.app_bytes)):
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.VERDICTS:
                found += decode_verdicts(record.content[start:end])
    return found


def careful(driven: Driven) -> Careful | None:
    """How the app was told to be careful."""
    for record in records(bytes(driven.app_bytes)):
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.CAREFUL:
                return decode_careful(record.content[start:end])
    return None


def with_record(*, auto: bool = True, limits: Limits | None = None) -> Driven:
    """An instance whose app was given record 1, one call of the peer b."""
    driven = Driven(limits=limits)
    driven.connect(HELLO)
    driven.data(first_start())
    driven.batch("t", 1, rpc(1))
    driven.settle()
    driven.auto = auto
    return driven


# --- method IDs that are reserved for the app itself ------------------------------------------------------------------


def test_a_peers_call_of_a_negative_method_fails_alone() -> None:
    driven = with_record()
    driven.forget()
    driven.app_bytes.clear()
    driven.batch("u", 2, rpc(2), rpc(3, method_id=-4), rpc(4))
    assert driven.replies == [("u", FrameType.TRIM_TO, 4)]
    (verdict,) = told(driven)
    assert (verdict.key, verdict.kind, verdict.cause) == ((2, 1, 0, 0), VerdictKind.REFUSED, Cause.FORBIDDEN)
    assert verdict.text == "'b' called method -4 of 'a': only an app itself may call negative ones"
    second = driven.crash()
    second.connect(HELLO)
    assert told(second) == [verdict], "each replay passes it over"


def test_a_part_of_a_batch_that_is_known_already_moves_no_verdict() -> None:
    driven = with_record()
    driven.batch("u", 2, rpc(2))
    driven.batch("again", 2, rpc(2), rpc(3, method_id=-4))
    (verdict,) = told(driven)
    assert verdict.key == (3, 0, 0, 0)


# --- a session -------------------------------------------------------------------------------------------------------


def test_an_app_that_asks_is_told_before_the_first_record() -> None:
    driven = Driven()
    driven.connect(HELLO)
    assert driven.heard == [(-1, "VERDICTS"), (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT")]
    driven.data(first_start())
    assert driven.heard[2:] == [(0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE")]
    second = driven.crash()
    second.connect(HELLO)
    assert second.heard == [
        b"state one",
        (-1, "VERDICTS"),
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT"),
    ]
    assert told(second) == []


def test_a_hello_that_comes_late_at_a_first_start() -> None:
    driven = Driven()
    driven.connect()
    driven.data(HELLO)
    assert driven.heard == [(-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT"), (-1, "VERDICTS")]
    driven.data(first_start())
    assert driven.heard[2:] == [(0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE")]


def test_no_record_goes_to_an_app_that_has_not_said_hello() -> None:
    second = with_record().crash()
    second.connect()
    assert second.heard == [b"state one"]
    second.batch("t", 2, rpc(2))
    assert second.heard == [b"state one"]
    second.data(HELLO)
    assert second.heard[1:3] == [(-1, "VERDICTS"), (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE")]


def test_a_base_app_is_told_nothing_and_waited_for_by_nobody() -> None:
    driven = Driven()
    driven.connect()
    driven.data(first_start())
    second = driven.crash()
    second.connect()
    assert second.heard == [b"state one", (0, "INITIAL_MESSAGE"), (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT")]
    second.data(encode_verdict(FAILED))
    assert second.of(ef.CloseApp)


def test_each_later_session_is_told_what_lies_behind_its_checkpoint() -> None:
    driven = with_record()
    driven.data(encode_verdict(LETTER))
    driven.batch("t", 2, rpc(2))
    later = msgspec.structs.replace(FAILED, sequence_id=2)
    driven.data(encode_verdict(later))
    second = driven.crash()
    second.connect(HELLO)
    assert told(second) == [LETTER.without_dead_letter(), later], "the order of the records, without the letters"
    second.data(checkpoint(b"state two"))
    second.batch("t", 3, rpc(3))
    third = second.crash()
    third.connect(HELLO)
    assert told(third) == []


def test_a_session_that_begins_at_an_older_checkpoint_is_told_more() -> None:
    driven = with_record()
    driven.data(encode_verdict(FAILED))
    second = driven.crash()
    second.connect(HELLO)
    second.data(checkpoint(b"state two"))
    third = second.crash()
    third.bad_checkpoints.add(2)
    third.connect(HELLO)
    assert told(third) == [FAILED]


# --- what an app may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (encode_verdict(msgspec.structs.replace(FAILED, sequence_id=2)), "Verdict on a message of record 2, it was"),
        (encode_handling(Handling(2, 0)), "a Handling of record 2, it was given the records up to 1"),
        (encode_verdict(msgspec.structs.replace(FAILED, text="x" * (TEXT_CHARACTERS_MAX + 1))), "4097 characters"),
        (encode_message(MessageType.VERDICT, b"\xc1"), "a Verdict message can't be read"),
        (encode_message(MessageType.HANDLING, b"\x91\xa0"), "a Handling message can't be read"),
    ],
)
def test_what_an_app_may_not_say(said: bytes, expected: str) -> None:
    driven = with_record()
    driven.data(said)
    (error,) = [text for level, text in driven.reports if level == "error"]
    assert expected in error
    assert driven.of(ef.CloseApp)
    assert not driven.store.summary().verdicts


def test_a_verdict_before_the_first_checkpoint() -> None:
    driven = Driven()
    driven.connect(HELLO)
    driven.data(encode_verdict(FAILED))
    assert "the app sent a Verdict in the phase 'first start'" in driven.reports[-1][1]


def test_the_first_verdict_counts() -> None:
    driven = with_record()
    driven.data(encode_verdict(FAILED) + encode_verdict(msgspec.structs.replace(FAILED, text="other")))
    assert driven.store.summary().verdicts == [FAILED]
    second = driven.crash()
    second.connect(HELLO)
    second.data(encode_verdict(msgspec.structs.replace(FAILED, text="another")))
    assert second.store.summary().verdicts == [FAILED]
    assert driven.machine.view.status(NOW_NS)["verdicts"] == {
        "refused": 0,
        "undone": 1,
        "kept": 0,
        "killed": 0,
        "skipped": 0,
        "taken_back": 0,
    }


def test_steps_of_a_handler_have_verdicts_of_their_own() -> None:
    driven = with_record()
    steps = [msgspec.structs.replace(FAILED, task=4, step=step) for step in (2, 1)]
    driven.data(b"".join(map(encode_verdict, steps)))
    assert driven.store.summary().verdicts == steps[::-1]


# --- nothing leaves before it is durable -----------------------------------------------------------------------------


def test_calls_behind_a_verdict_wait_for_it() -> None:
    driven = with_record()
    driven.open_stream()
    driven.reply(FrameType.TRIM_TO, 1)
    driven.forget()
    driven.auto = False
    driven.data(encode_verdict(FAILED) + call("b", 2))
    assert not driven.frames()
    assert not driven.store.summary().verdicts, "a crash here loses it, and nobody has seen anything of it"
    driven.disk()
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(2)]
    assert driven.store.summary().verdicts == [FAILED]


def test_verdicts_one_behind_the_other_hold_up_no_call_for_ever() -> None:
    """There is always one that is not durable; the calls before it are not held up for that."""
    driven = with_record(limits=Limits(peer_gather_bytes=0))
    driven.open_stream()
    driven.reply(FrameType.TRIM_TO, 1)
    driven.forget()
    driven.auto = False
    steps = [encode_verdict(msgspec.structs.replace(FAILED, task=1, step=step)) for step in range(1, 5)]
    driven.data(steps[0] + call("b", 2))
    for number, verdict in enumerate(steps[1:], 3):
        job = driven.jobs.popleft()
        assert isinstance(job, ef.Commit)
        driven.store.commit(job.transaction)
        driven.handle(ev.AppData(verdict + call("b", number)), ev.Committed(job.ticket))
    sent = b"".join(frame.payload for frame in driven.frames(FrameType.BATCH))
    assert sent == rpc(2) + rpc(3) + rpc(4), "all but the last verdict are durable"


def test_the_verdict_of_a_replay_holds_back_as_well() -> None:
    driven = with_record()
    driven.open_stream()
    second = driven.crash()
    second.auto = True
    second.connect(HELLO)
    second.auto = False
    second.data(attach("b") + encode_verdict(FAILED) + call("b", 1) + call("b", 2))
    second.reply(FrameType.WELCOME, 0)
    assert not second.frames(FrameType.BATCH)
    second.disk_all()
    assert [frame.payload for frame in second.frames(FrameType.BATCH)] == [rpc(1) + rpc(2)]


def test_calls_to_oneself_are_never_durable_before_it() -> None:
    driven = with_record(auto=False)
    driven.batch("t", 2, rpc(2))  # a commit that is on its way
    driven.data(encode_verdict(FAILED) + call("", 5))
    found: list[str] = []
    while driven.jobs:
        commit = driven.jobs[0]
        assert isinstance(commit, ef.Commit)
        found += ["verdict"] * len(commit.transaction.verdicts)
        found += ["own"] * ("" in commit.transaction.sources)
        driven.disk()
    assert found == ["verdict", "own"]


def test_answers_to_clients_wait_for_it() -> None:
    driven = with_record()
    request = ClientFrame(
        ClientFrameType.REQUEST, "c", "a", number=1, count=1, payload=encode_request(3, b"\x90"), time_ns=NOW_NS
    )
    driven.handle(ev.ClientFrameReceived("token", request))
    driven.forget()
    driven.auto = False
    answer = b"\x93" + msgpack_string(caller_of("c")) + b"\x01\x05"
    message = encode_incoming_rpc(3, 1, answer, RpcKind.RETURNED_VALUE)
    verdict = msgspec.structs.replace(FAILED, sequence_id=2, caller=caller_of("c"))
    driven.data(attach(CLIENTS) + encode_verdict(verdict))
    driven.data(encode_app_batch(MessageType.STREAM_BATCH, CLIENTS, 1, message))
    assert not driven.of(ef.ReplyToClient)
    driven.disk()
    assert [effect.frame.frame_type for effect in driven.of(ef.ReplyToClient)] == [ClientFrameType.REPLY]


def test_no_mark_tells_of_what_was_made_behind_it() -> None:
    """A record that is sealed earlier must not say what the app made later: without the verdict it would diverge."""
    driven = with_record(auto=False, limits=Limits(group_size_bytes=100))
    driven.data(attach("b"))
    driven.batch("t", 2, rpc(b"x" * 80))  # on its way
    driven.batch("t", 3, rpc(b"y" * 80))  # waits, and is full
    driven.data(encode_verdict(FAILED) + call("b", 2))
    driven.disk_all()
    driven.batch("t", 4, rpc(4))
    driven.disk_all()
    marked = [[mark.destination for mark in outputs_of(value)] for value in driven.store.read(2, 1 << 20)]
    assert marked == [[], [], ["b"]]


def outputs_of(value: bytes) -> Sequence[OutputMarkEntry]:
    header = decode_header(value)
    return decode_trailer(memoryview(value)[header.size_bytes :], header.check).outputs


# --- dead letters ----------------------------------------------------------------------------------------------------


def test_a_message_that_nobody_waits_for_becomes_a_letter() -> None:
    driven = with_record()
    driven.data(encode_verdict(LETTER))
    summary = driven.store.summary()
    assert list(summary.letters) == [KEY]
    assert driven.store.letter(KEY).verdict == LETTER
    status = driven.machine.view.status(NOW_NS)["letters"]
    assert status == {"count": 1, "bytes": 64 + len(rpc(1)) + len("no") + len("Traceback"), "lost": 0}


def test_what_a_letter_keeps_is_bounded() -> None:
    driven = with_record()
    large = b"m" * (LETTER_SIZE_BYTES_MAX + 1)
    driven.data(encode_verdict(msgspec.structs.replace(LETTER, message=large, trace="a" + "b" * TRACE_CHARACTERS_MAX)))
    kept = driven.store.letter(KEY).verdict
    assert (kept.message, kept.trace) == (b"", "b" * TRACE_CHARACTERS_MAX)


@pytest.mark.parametrize("limits", [Limits(letters_max=2), Limits(letters_bytes=200)])
def test_the_oldest_letters_go(limits: Limits) -> None:
    driven = with_record(limits=limits)
    for index in range(4):
        driven.data(encode_verdict(msgspec.structs.replace(LETTER, message_index=index)))
    assert list(driven.store.summary().letters) == [(1, 2, 0, 0), (1, 3, 0, 0)]
    assert driven.machine.view.status(NOW_NS)["letters"]["lost"] == 2  # type: ignore[index]
    second = driven.crash()
    assert second.machine.view.status(NOW_NS)["letters"]["count"] == 2  # type: ignore[index]


def answers(driven: Driven) -> list[tuple[object, dict]]:
    return [(effect.token, dict(effect.answer)) for effect in driven.of(ef.OperatorAnswered)]


def audit(transactions: list[Transaction]) -> list[AuditEntry]:
    return [entry for transaction in transactions for entry in transaction.audit]


def with_letter(verdict: Verdict = LETTER) -> Driven:
    driven = with_record()
    driven.data(encode_verdict(verdict))
    driven.forget()
    return driven


@pytest.mark.parametrize("keys", [None, [KEY, (9, 9, 0, 0), KEY]])
def test_letters_are_dropped(keys: list | None) -> None:
    driven = with_letter()
    driven.auto = False
    driven.handle(ev.LettersDropped(keys, "ann", "t"))
    assert answers(driven) == [], "answered before it is durable"
    (commit,) = driven.of(ef.Commit)
    assert commit.transaction.letters_removed == [KEY]
    assert audit([commit.transaction]) == [AuditEntry(NOW_NS, "ann", "dropped 1 dead letter: 1:0")]
    driven.disk()
    assert answers(driven) == [("t", {"dropped": 1})]
    assert not driven.store.summary().letters
    driven.handle(ev.LettersDropped(None, "ann", "u"))
    assert answers(driven)[1:] == [("u", {"dropped": 0})]


def test_a_retry_is_a_new_input() -> None:
    waits = encode_incoming_rpc(3, 0, b"\x93\xa0\x07\x05")  # by oneself, call 7, the argument 5
    driven = with_letter(msgspec.structs.replace(LETTER, message=waits))
    driven.auto = False
    driven.handle(ev.LettersRetried({KEY: Letter(driven.store.letter(KEY).verdict, 0)}, "ann", "t"))
    assert answers(driven) == []
    (commit,) = driven.of(ef.Commit)
    transaction = commit.transaction
    assert len(transaction.records) == 1, "not in one transaction with the letter's end"
    assert transaction.letters_removed == [KEY]
    assert audit([transaction]) == [AuditEntry(NOW_NS, "ann", "retried 1 dead letter: 1:0")]
    driven.disk()
    assert answers(driven) == [("t", {"retried": 1, "refused": {}})]
    assert arguments(bytes(driven.app_bytes)) == [encode_incoming_rpc(3, 2, b"\x91\x05")]
    driven.handle(ev.LettersRetried({KEY: Letter(LETTER, 0)}, "ann", "u"))
    assert answers(driven)[1:] == [("u", {"retried": 0, "refused": {"1:0": "there is no such letter"}})]


def test_a_call_of_method_0_is_retried_as_any() -> None:
    driven = with_letter(msgspec.structs.replace(LETTER, message=rpc(1, method_id=0)))
    driven.handle(ev.LettersRetried({KEY: driven.store.letter(KEY)}, "ann", "t"))
    assert answers(driven) == [("t", {"retried": 1, "refused": {}})]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "its message was too large to be kept"),
        (encode_incoming_rpc(3, 1, b"\x92\x01\x02", RpcKind.RETURNED_VALUE), "it is an answer, not a call"),
        (encode_incoming_rpc(-3, 2, b"\x90"), "it calls method -3: negative ones are the SDK's own"),
        (b"\x06\x07ab", "it is a message of type 7, not one RPC"),
        (encode_incoming_rpc(3, 0, b"\x91\x01"), "a call that waits does not begin with who waits and a number"),
    ],
)
def test_letters_that_are_no_calls_stay(message: bytes, reason: str) -> None:
    driven = with_letter(msgspec.structs.replace(LETTER, message=message))
    driven.handle(ev.LettersRetried({KEY: driven.store.letter(KEY)}, "ann", "t"))
    ((_, answer),) = answers(driven)
    assert answer["retried"] == 0
    assert reason in answer["refused"]["1:0"]
    assert list(driven.store.summary().letters) == [KEY]


# --- an upgrade that retries what was refused ------------------------------------------------------------------------

RETRY_REFUSED = encode_message(MessageType.RETRY_REFUSED)
VERSION_2 = encode_hello(Hello(EXTENSIONS, "test")) + encode_app_description(AppDescription(2))


def upgraded(first: Driven) -> Driven:
    """Its next life, brought to version 2 by an app that has been told to take the confirming checkpoint."""
    second = first.crash(upgrade_to=2)
    second.connect(VERSION_2)
    second.data(checkpoint(b"upgraded"))
    assert second.phase is Phase.CONFIRMING_UPGRADE
    second.forget()
    return second


def with_refusals() -> Driven:
    """One letter of each cause, on the messages 0, 1, ... of record 1."""
    driven = with_record()
    for cause in Cause:
        letter = msgspec.structs.replace(LETTER, message_index=int(cause), cause=cause, message=rpc(int(cause)))
        driven.data(encode_verdict(letter))
    return driven


@pytest.mark.parametrize("together", [True, False])
def test_an_upgrade_retries_what_was_refused_for_its_code(together: bool) -> None:
    driven = upgraded(with_refusals())
    for said in [checkpoint(b"two") + RETRY_REFUSED] if together else [checkpoint(b"two"), RETRY_REFUSED]:
        driven.data(said)
    assert list(driven.store.summary().letters) == [
        (1, int(cause), 0, 0) for cause in Cause if cause not in (Cause.METHOD, Cause.ARGUMENTS)
    ]
    entry = AuditEntry(NOW_NS, "the upgrade to version 2", "retried 2 dead letters: 1:1, 1:2")
    assert driven.store.audit() == [entry]
    expected = [encode_incoming_rpc(3, 2, index.to_bytes(4, "little")) for index in (1, 2)]
    assert arguments(bytes(driven.app_bytes)) == expected
    assert ("info", "the upgrade to version 2 retries dead letters that were refused") in driven.reports


def test_a_retry_that_was_not_durable_is_none() -> None:
    driven = upgraded(with_refusals())
    driven.auto = False
    driven.data(checkpoint(b"two") + RETRY_REFUSED)
    while driven.phase is not Phase.NORMAL:
        driven.disk()
    assert len(driven.crash().store.summary().letters) == len(Cause), "letters are gone, and nothing is called"


def test_without_an_upgrade_nothing_is_retried() -> None:
    driven = with_refusals()
    driven.data(RETRY_REFUSED)
    assert len(driven.store.summary().letters) == len(Cause)
    assert any("which belongs behind the checkpoint of an upgrade" in text for _, text in driven.reports)


# --- a message that is skipped ---------------------------------------------------------------------------------------


def skip(driven: Driven, sequence_id: int = 1, message: bytes | None = rpc(1), index: int = 0) -> dict:
    driven.handle(ev.MessageSkipped(sequence_id, index, "it loops", "ann", message, "t"))
    ((token, answer),) = answers(driven)
    assert token == "t"
    return answer


def test_a_message_is_skipped_while_no_app_is_there() -> None:
    driven = with_record()
    driven.close()
    driven.forget()
    assert skip(driven) == {"skipped": True}
    skipped = Verdict(1, 0, VerdictKind.SKIPPED, text="it loops", method="method 3", message=rpc(1))
    assert driven.store.letter(KEY).verdict == skipped
    assert ("warning", "ann skipped message 0 of record 1: it loops") in driven.reports
    assert audit([commit.transaction for commit in driven.of(ef.Commit)])[0].who == "ann"
    driven.connect(HELLO)
    assert told(driven) == [skipped.without_dead_letter()]


def test_who_waits_for_a_skipped_call_is_told() -> None:
    driven = with_record()
    driven.data(encode_app_description(AppDescription(1, {("", 3): "Orders.place"})))
    driven.close()
    driven.forget()
    skip(driven, message=encode_incoming_rpc(3, 0, b"\x92\xa1b\x07"))
    (verdict,) = driven.store.summary().verdicts
    assert (verdict.method, verdict.caller) == ("Orders.place", "b")
    assert not driven.store.summary().letters


def test_what_can_not_be_read_can_be_skipped() -> None:
    driven = with_record()
    driven.close()
    driven.forget()
    assert skip(driven, message=b"\x06\x00\xff\x06") == {"skipped": True}


@pytest.mark.parametrize(
    ("sequence_id", "message", "reason"),
    [
        (2, None, "there is no record 2: the log of 'a' ends with record 1"),
        (-1, None, "there is no record -1"),
        (1, None, "record 1 has no message 0"),
        (1, rpc(1), "an app of 'a' is connected, and may have handled message 0 of record 1 well"),
    ],
)
def test_what_is_not_skipped(sequence_id: int, message: bytes | None, reason: str) -> None:
    driven = with_record()
    assert reason in skip(driven, sequence_id, message)["refused"]
    assert not driven.of(ef.Commit)


def test_what_a_checkpoint_holds_is_not_skipped() -> None:
    driven = with_record()
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"state two"))
    driven.close()
    driven.forget()
    assert "the last checkpoint was taken behind record 1" in skip(driven)["refused"]


def test_one_that_has_a_verdict_is_not_skipped() -> None:
    driven = with_letter()
    driven.close()
    driven.forget()
    assert "has a verdict already" in skip(driven)["refused"]


def test_the_message_that_the_app_is_at_is_skipped_and_the_app_goes() -> None:
    driven = with_record()
    driven.data(encode_handling(Handling(1, 0, 7.0, "Orders.place", "b")))
    assert "(it is at record 1, message 0, called by b)" in skip(driven, index=1)["refused"]
    driven.forget()
    assert skip(driven) == {"skipped": True}
    assert driven.of(ef.CloseApp)
    driven.data(call("", 9, rpc_type=2))
    driven.close()
    assert driven.phase is Phase.WAITING
    driven.connect(HELLO)
    assert [verdict.kind for verdict in told(driven)] == [VerdictKind.SKIPPED]
    assert careful(driven) is None, "it was ended, it did not crash"


def test_one_that_runs_again_at_each_replay_can_still_be_skipped() -> None:
    driven = with_letter(msgspec.structs.replace(LETTER, kind=VerdictKind.KEPT))
    driven.close()
    driven.forget()
    assert skip(driven) == {"skipped": True}
    assert [verdict.kind for verdict in driven.store.summary().verdicts] == [VerdictKind.SKIPPED]
