"""A state that can't be saved, as the core has it: there is no checkpoint, or one without some messages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.notices import StateSavedAgain, StateUnsaved, TakenBack
from immortal.protocol.extensions import Hello, encode_hello
from immortal.protocol.messages import MessageType
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer
from immortal.protocol.verdicts import Unsaved, Verdict, VerdictKind, encode_unsaved, encode_verdict
from tests.helpers.core import EXTENSIONS, NOW_NS, Driven, attach, call, checkpoint, first_start, rpc

HELLO = encode_hello(Hello(EXTENSIONS, "saves"))
UNSAVED = Unsaved("too large", 1, 0, "A.add", "b", "b was told what it would not have been")
FAILED = encode_unsaved(UNSAVED)
BACK = Verdict(1, 0, VerdictKind.TAKEN_BACK, "StateError", "too large", method="A.add", message=rpc(1), behind=1)
TAKEN_BACK = encode_verdict(BACK, MessageType.TAKEN_BACK)
TAKE = "TAKE_CHECKPOINT"


def working(limits: Limits | None = None, *, auto: bool = True) -> Driven:
    """It has handled record 1, and has called b for it."""
    driven = Driven(limits=limits)
    driven.connect()
    driven.data(HELLO + first_start())
    driven.settle()
    driven.data(attach("b"))
    driven.batch("t", 1, rpc(1))
    driven.data(call("b", 1))
    driven.reply(FrameType.WELCOME, 0)
    driven.app_took_all()
    driven.forget()
    driven.auto = auto
    return driven


def unsaved(limits: Limits | None = None) -> Driven:
    driven = working(limits)
    driven.handle(ev.CheckpointRequested())
    driven.data(FAILED)
    return driven


def recovering(driven: Driven, replayed: bytes, said: bytes) -> Driven:
    """The next life, whose app makes that again and says that when it is asked for a checkpoint."""
    driven.auto = True
    driven.connect()
    driven.data(HELLO + attach("b") + replayed)
    if driven.phase is Phase.BECOMING_PRIMARY:
        driven.data(said)
    return driven


def types(driven: Driven) -> list[str]:
    return [str(name) for entry in driven.heard if isinstance(entry, tuple) for name in entry[1:]]


def told(driven: Driven, kind: type) -> list[object]:
    return [report.notice for report in driven.of(ef.Report) if isinstance(report.notice, kind)]


def said(driven: Driven) -> dict[str, object] | None:
    found = driven.machine.view.status(driven.now_ns)["unsaved"]
    assert found is None or isinstance(found, dict)
    return found


def test_it_goes_on_without_a_checkpoint_and_says_so() -> None:
    driven = unsaved(Limits(log_limit_bytes=10 << 20))
    assert driven.phase is Phase.NORMAL
    (notice,) = told(driven, StateUnsaved)
    assert isinstance(notice, StateUnsaved)
    where = "A.add, record 1, message 0, called by b"
    assert notice.message == f"{where}: too large (b was told what it would not have been)"
    assert "a recovery goes over 2 records" in notice.costs
    assert "'immortal skip a 1:0 --reason ...'" in notice.ways_out
    found = said(driven)
    assert found is not None
    assert (found["record"], found["message"], found["caller"], found["failures"]) == (1, 0, "b", 1)
    driven.batch("t", 2, rpc(2))
    driven.data(call("b", 2))
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(2)]
    driven.forget()
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"whole"))
    assert said(driven) is None
    assert told(driven, StateSavedAgain) == [StateSavedAgain(1)]
    assert len(driven.store.summary().checkpoints) == 2


def test_the_room_that_the_log_has_left_is_counted_down() -> None:
    driven = unsaved(Limits(log_limit_bytes=10 << 20))
    for used_bytes, left in ((1 << 20, "9 MiB of its 10 MiB"), (7 << 20, "3 MiB of its 10 MiB")):
        driven.handle(ev.LogMeasured(LogSpace(used_bytes, 100 << 20)), ev.CheckpointRequested())
        driven.data(FAILED)
        (*_, notice) = told(driven, StateUnsaved)
        assert isinstance(notice, StateUnsaved)
        assert left in notice.costs


def test_one_that_is_due_by_age_is_not_asked_for_again_at_once() -> None:
    driven = working(Limits(checkpoint_age_ns=60 * 10**9))
    driven.now_ns += 61 * 10**9
    driven.batch("t", 2, rpc(2))
    assert types(driven).count(TAKE) == 1
    driven.data(FAILED)
    driven.batch("t", 3, rpc(3))
    driven.batch("t", 4, rpc(4))
    assert types(driven).count(TAKE) == 1
    driven.now_ns += 61 * 10**9
    driven.batch("t", 5, rpc(5))
    assert types(driven).count(TAKE) == 2


def test_a_recovery_ends_without_a_checkpoint() -> None:
    driven = recovering(working().crash(), call("b", 1), FAILED)
    assert driven.phase is Phase.NORMAL
    assert said(driven) is not None
    driven.reply(FrameType.WELCOME, 0)
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(1)]
    driven.batch("t", 2, rpc(2))
    driven.data(call("b", 2))
    third = recovering(driven.crash(), call("b", 1) + call("b", 2), checkpoint(b"whole"))
    assert third.store.summary().checkpoints[-1].sequence_id == 2


def test_a_replay_that_differs_is_found_all_the_same() -> None:
    driven = working()
    driven.batch("t", 2, rpc(2))  # it has the mark of the call
    second = recovering(driven.crash(), call("b", 7), FAILED)
    assert isinstance(second.stop.error, DivergenceError)


def test_a_stop_does_not_wait_for_it() -> None:
    driven = working()
    driven.handle(ev.StopRequested())
    driven.data(FAILED)
    driven.app_took_all()
    assert driven.stop.error is None


def test_what_was_taken_back_counts_with_the_checkpoint_and_nothing_leaves_before() -> None:
    driven = working(auto=False)
    driven.handle(ev.CheckpointRequested())
    driven.forget()
    driven.data(TAKEN_BACK + call("b", 9) + checkpoint(b"without it"))
    driven.data(call("b", 10))
    assert driven.frames(FrameType.BATCH) == []
    assert driven.store.summary().verdicts == []
    driven.disk_all()
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(9) + rpc(10)]
    summary = driven.store.summary()
    assert summary.verdicts == [BACK.without_dead_letter()]
    assert (summary.checkpoints[-1].sequence_id, list(summary.letters)) == (1, [BACK.key])
    assert [batch.payload for batch in summary.checkpoints[-1].unacknowledged["b"]][-1:] == [rpc(9)]
    assert len(told(driven, TakenBack)) == 1
    assert recovering(driven.crash(), call("b", 10), checkpoint(b"on")).phase is Phase.NORMAL


@pytest.mark.parametrize("jobs", range(4))
def test_a_crash_meanwhile_leaves_a_log_with_the_message_or_without(jobs: int) -> None:
    driven = working(auto=False)
    driven.handle(ev.CheckpointRequested())
    driven.data(TAKEN_BACK + call("b", 9) + checkpoint(b"without it"))
    for _ in range(min(jobs, len(driven.jobs))):
        driven.disk()
    second = driven.crash()
    summary = second.store.summary()
    counts = summary.checkpoints[-1].sequence_id == 1
    assert summary.verdicts == ([BACK.without_dead_letter()] if counts else [])
    made = call("b", 10) if counts else call("b", 1)
    assert recovering(second, made, checkpoint(b"on")).phase is Phase.NORMAL


def test_a_record_meanwhile_has_no_mark_of_it() -> None:
    driven = working(auto=False)
    driven.handle(ev.CheckpointRequested())
    driven.data(TAKEN_BACK + call("b", 9))
    driven.batch("t", 2, rpc(2))
    driven.disk_all()
    value = driven.store.read(2, 1)[0]
    header = decode_header(value)
    assert "b" not in [mark.destination for mark in decode_trailer(value[header.size_bytes :], header.check).outputs
                       if mark.position > 1]  # fmt: skip
    second = recovering(driven.crash(), call("b", 1) + call("b", 2), checkpoint(b"on"))
    assert second.phase is Phase.NORMAL


def test_an_app_that_dies_meanwhile_has_taken_back_nothing() -> None:
    driven = working()
    driven.handle(ev.CheckpointRequested())
    driven.data(TAKEN_BACK + call("b", 9))
    driven.close()
    driven.recover(attach("b") + call("b", 1))
    assert driven.store.summary().verdicts == []


def test_an_operator_skips_it() -> None:
    driven = unsaved()
    driven.forget()
    driven.handle(ev.MessageSkipped(1, 0, "too much", "ann", rpc(1), "t"))
    assert types(driven) == ["TAKE_BACK", TAKE]
    assert driven.of(ef.OperatorAnswered) == []
    driven.data(TAKEN_BACK + checkpoint(b"without it"))
    assert [effect.answer for effect in driven.of(ef.OperatorAnswered)] == [{"skipped": True}]
    assert [entry.who for entry in driven.store.audit()] == ["ann"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (encode_unsaved(replace(UNSAVED, sequence_id=2, why="")), "skip A.add, record 2"),
        (encode_unsaved(UNSAVED), "b was told"),
        (checkpoint(b"saved"), "can be saved as it is"),
    ],
)
def test_a_skip_that_does_not_help_says_why(answer: bytes, text: str) -> None:
    driven = unsaved()
    driven.handle(ev.MessageSkipped(1, 0, "too much", "ann", rpc(1), "t"))
    driven.data(answer)
    (answered,) = driven.of(ef.OperatorAnswered)
    assert text in str(answered.answer["refused"])


def test_a_skip_waits_for_a_checkpoint_that_is_asked_for_already() -> None:
    driven = unsaved()
    driven.handle(ev.CheckpointRequested())
    driven.handle(ev.MessageSkipped(1, 0, "too much", "ann", rpc(1), "t"))
    driven.forget()
    driven.data(FAILED)
    assert driven.of(ef.OperatorAnswered) == []
    assert types(driven) == ["TAKE_BACK", TAKE]
    driven.data(TAKEN_BACK + checkpoint(b"without it"))
    assert [effect.answer for effect in driven.of(ef.OperatorAnswered)] == [{"skipped": True}]


def test_a_skip_is_answered_where_the_app_dies() -> None:
    driven = unsaved()
    driven.handle(ev.MessageSkipped(1, 0, "too much", "ann", rpc(1), "t"))
    driven.close()
    (answered,) = driven.of(ef.OperatorAnswered)
    assert "the app is gone" in str(answered.answer["refused"])


def test_other_messages_are_skipped_as_ever() -> None:
    driven = unsaved()
    driven.batch("t", 2, rpc(2))
    driven.handle(ev.MessageSkipped(2, 0, "too much", "ann", rpc(2), "t"))
    (answered,) = driven.of(ef.OperatorAnswered)
    assert "may have handled" in str(answered.answer["refused"])


@pytest.mark.parametrize(
    "said", [FAILED, TAKEN_BACK, encode_verdict(replace(BACK, behind=5), MessageType.TAKEN_BACK)], ids=str
)
def test_it_is_refused_where_no_checkpoint_was_asked_for(said: bytes) -> None:
    driven = working()
    driven.data(said)
    assert driven.machine.view.status(NOW_NS)["unsaved"] is None
    assert driven.of(ef.CloseApp)


def test_who_follows_says_that_it_has_none() -> None:
    writer = Driven()
    writer.connect()
    writer.data(HELLO + first_start())
    writer.settle()
    writer.batch("t", 1, rpc(1))
    follower = Driven(writer.store, follow=True)
    follower.connect(HELLO)
    follower.handle(ev.StandbyCheckpointRequested(2, 1))
    follower.data(FAILED)
    assert follower.phase is Phase.FOLLOWING
    assert any("too large" in text for _, text in follower.reports)
    follower.forget()
    follower.handle(ev.StandbyCheckpointRequested(3, 1))
    assert types(follower)[-1:] == [TAKE]


def test_who_follows_begins_anew_where_it_has_handled_what_was_taken_back() -> None:
    writer = Driven()
    writer.connect()
    writer.data(HELLO + first_start())
    writer.settle()
    writer.batch("t", 1, rpc(1))
    ahead, behind = (Driven(writer.store, follow=True) for _ in range(2))
    ahead.connect(HELLO)
    writer.handle(ev.CheckpointRequested())
    writer.data(TAKEN_BACK + checkpoint(b"without it"))
    writer.batch("t", 2, rpc(2))
    ahead.look()
    assert ahead.of(ef.CloseApp)
    behind.connect(HELLO)
    assert behind.phase is Phase.FOLLOWING
