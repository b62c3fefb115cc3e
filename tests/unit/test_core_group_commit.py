"""Group commit: idle commits at once, busy gathers; the order of tickets; what rides along."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.errors import InvariantError
from immortal.coordinator.core.group_commit import COMMITS_ON_THEIR_WAY_MAX, GroupCommit
from immortal.coordinator.core.interfaces import OutputMark
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry
from tests.helpers.core import COMMITTER_ID, NOW_NS, Driven, arguments, attach, call, rpc

SOURCE = BatchSource(BatchKind.STREAM, "b", 1, 1, 0)


def commits(driven: Driven) -> list[ef.Commit]:
    return driven.of(ef.Commit)


def fresh(group_size_bytes: int = 100) -> GroupCommit:
    groups = GroupCommit(group_size_bytes)
    groups.load(MemoryLogStore(COMMITTER_ID).summary())
    groups.is_held = False
    return groups


# --- through the machine ---------------------------------------------------------------------------------------------


def test_a_group_is_closed_at_its_size() -> None:
    driven = Driven.started(auto=False, limits=Limits(group_size_bytes=250))
    driven.batch("t", 1, rpc(b""))
    for position in range(2, 8):
        driven.batch("t", position, rpc(b"x" * 90))
    driven.disk_all()
    sizes = [commit.size_bytes for commit in commits(driven)]
    assert sizes[1:] == [2 * len(rpc(b"x" * 90))] * 3
    assert len(arguments(bytes(driven.app_bytes))) == 7


def test_one_message_larger_than_a_group_is_a_group_of_its_own() -> None:
    driven = Driven.started(auto=False, limits=Limits(group_size_bytes=100))
    for position, size in ((1, 1), (2, 5000), (3, 1)):
        driven.batch("t", position, rpc(b"x" * size))
    driven.disk_all()
    assert len(commits(driven)) == 3
    assert len(arguments(bytes(driven.app_bytes))) == 3


def test_tickets_and_sequence_ids_grow_by_one() -> None:
    driven = Driven.started(auto=False, limits=Limits(group_size_bytes=60))
    for position in range(1, 20):
        driven.batch("t", position, rpc(b"x" * 50))
    driven.disk_all()
    tickets = [commit.ticket for commit in commits(driven)]
    assert tickets == list(range(tickets[0], tickets[0] + 19))
    assert [sequence_id for commit in commits(driven) for sequence_id, _ in commit.transaction.records] == list(
        range(1, 20)
    )


def test_acknowledgements_alone_never_cause_a_commit_but_ride_along() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.forget()
    driven.reply(FrameType.TRIM_TO, 1)
    assert commits(driven) == []
    assert driven.store.summary().acknowledged == {"b": 0}
    driven.batch("t", 1, rpc(1))
    assert driven.store.summary().acknowledged == {"b": 1}


def test_the_trailer_names_each_source_and_how_far_the_outputs_had_got() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    driven.data(attach("b") + call("b", 1) + call("", 2) + call("", 3, rpc_type=2))
    driven.batch("t", 2, rpc(2), rpc(3), time_ns=99)
    driven.disk_all()
    (value,) = driven.store.read(2, 1)
    header, trailer = verify_value(value, 2, COMMITTER_ID)
    assert header.sequence_id == 2
    kinds = [(source.kind, source.name, source.first_position, source.count) for source in trailer.batches]
    assert kinds == [(BatchKind.IMPULSES, "", 1, 1), (BatchKind.STREAM, "", 1, 1), (BatchKind.STREAM, "b", 2, 2)]
    assert trailer.batches[2].send_time_ns == 99
    assert {mark.destination: mark.position for mark in trailer.outputs} == {"": 1, "b": 1}
    assert driven.store.summary().sources["b"].position == 3


def test_marks_wait_for_a_record() -> None:
    # Taken in a turn whose commit held none, they were in no trailer at all.
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0)  # commits who b is
    assert len(commits(driven)) == 1
    driven.batch("t", 1, rpc(1))
    driven.batch("t", 2, rpc(2))
    values = driven.store.read(1, 10_000)
    marks = [verify_value(value, 1 + index, COMMITTER_ID)[1].outputs for index, value in enumerate(values)]
    assert marks == [[OutputMarkEntry("b", 1, crc64(rpc(1)))], []]


# --- alone -----------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_commit() -> None:
    log = fresh()
    assert log.next_commit(NOW_NS, {}) is None
    log.open.transaction.acknowledged["b"] = 3
    assert log.next_commit(NOW_NS, {}) is None
    assert not log.commits_next


def test_what_is_outside_the_record_makes_a_commit_without_one() -> None:
    log = fresh()
    log.append_outside_record(0).transaction.epoch = 5
    group = log.next_commit(NOW_NS, {})
    assert group is not None
    assert (group.sequence_id, group.transaction.records, group.transaction.epoch) == (None, [], 5)
    log.committed(group.ticket)
    assert log.durable_sequence_id == -1
    assert log.durable_ticket == group.ticket


def test_input_behind_a_sealed_group_goes_into_the_next() -> None:
    log = fresh()
    log.append((rpc(1),), 10, SOURCE)
    first = log.next_commit(NOW_NS, {})
    second = log.append((rpc(2),), 10, SOURCE)
    assert first is not None
    assert second.ticket == first.ticket + 1
    assert log.next_commit(NOW_NS, {}) is None
    log.committed(first.ticket)
    sealed = log.next_commit(NOW_NS, {"b": OutputMark(4, 5)})
    assert sealed is second
    assert sealed.sequence_id == 1
    assert verify_value(sealed.transaction.records[0][1], 1, COMMITTER_ID)[1].outputs == [OutputMarkEntry("b", 4, 5)]


def test_full_groups_do_not_wait_for_each_other_but_the_last_one_does() -> None:
    log = fresh(group_size_bytes=15)
    for _ in range(COMMITS_ON_THEIR_WAY_MAX + 3):
        log.append((rpc(1),), 10, SOURCE)
    on_their_way = []
    while (group := log.next_commit(NOW_NS, {})) is not None:
        on_their_way.append(group)
    assert [group.ticket for group in on_their_way] == list(range(1, COMMITS_ON_THEIR_WAY_MAX + 1))
    assert [group.sequence_id for group in on_their_way] == list(range(COMMITS_ON_THEIR_WAY_MAX))
    with pytest.raises(InvariantError, match="commit 2 is done, but was not on its way"):
        log.committed(2)
    log.committed(1)
    assert (log.durable_ticket, log.durable_sequence_id) == (1, 0)
    assert log.next_commit(NOW_NS, {}) is not None
    log.committed(2)
    assert log.next_commit(NOW_NS, {}) is not None
    log.committed(3)
    assert log.next_commit(NOW_NS, {}) is None, "the open group must gather while others are on their way"
    for ticket in range(4, COMMITS_ON_THEIR_WAY_MAX + 3):
        log.committed(ticket)
    assert log.next_commit(NOW_NS, {}) is not None


def test_the_app_gets_the_record_without_its_trailer() -> None:
    log = fresh()
    log.with_record_time = True
    log.append((rpc(1), rpc(2)), 20, SOURCE)
    group = log.next_commit(NOW_NS, {})
    assert group is not None
    assert group.record is not None
    value = group.transaction.records[0][1]
    assert len(group.record) == decode_header(value).size_bytes < len(value)
    types = [message_type for message_type, _, _ in decode_messages(bytes(group.record)[24:])]
    assert types == [MessageType.RECORD_TIME, MessageType.RPC, MessageType.RPC]


@pytest.mark.parametrize("ticket", [1, 3])
def test_only_the_commit_on_its_way_can_be_done(ticket: int) -> None:
    log = fresh()
    log.append_outside_record(0)
    if ticket == 3:
        assert log.next_commit(NOW_NS, {}) is not None
    with pytest.raises(InvariantError, match=f"commit {ticket} is done, but was not on its way"):
        log.committed(ticket)


def test_bytes_of_the_app_are_counted_until_they_are_durable() -> None:
    log = fresh(group_size_bytes=15)
    for _ in range(3):
        log.append((rpc(1),), 10, SOURCE, from_app=True)
    log.append((rpc(1),), 10, SOURCE)
    counted = [log.from_app_bytes]
    while (group := log.next_commit(NOW_NS, {})) is not None:
        log.committed(group.ticket)
        counted.append(log.from_app_bytes)
    assert counted == [30, 20, 10, 0, 0]
