"""The receiver's side: which replies are kept, for how long, and which links are remembered."""

from __future__ import annotations

from typing import Any

import pytest

from immortal.coordinator.messenger import limits as messenger_limits
from immortal.coordinator.messenger.envelope import Kind
from immortal.coordinator.messenger.inbox import Arrival, CachedReply, Inbox, LinkState, ReceiveWindow
from immortal.coordinator.messenger.limits import (
    CALLBACK_OVERHEAD_BYTES,
    CALLBACKS_MAX,
    PEER_LINKS_MAX,
    PEER_REPLIES_SIZE_BYTES_MAX,
    REPLY_OVERHEAD_BYTES,
    SPAN_MAX,
)


def conversation(span_max: int = SPAN_MAX, **limits: int) -> LinkState:
    return LinkState(1, 1, ReceiveWindow(True, span_max), **limits)  # type: ignore[arg-type]


def test_a_reply_is_kept_until_its_sender_has_it() -> None:
    talk = conversation()
    for message_id in (1, 2, 3):
        assert talk.mark_received(message_id, 1) == Arrival.FIRST
        talk.store_reply(message_id, 10 + message_id, (b"x" * message_id,))
    assert talk.mark_received(2, 1) == Arrival.DUPLICATE
    assert talk.mark_received(5, 1) == Arrival.EARLY
    assert talk.replies[2].parts == (b"xx",)
    assert talk.replies[2].destination_callback_id == 12
    assert talk.replies_size_bytes == 6 + 3 * REPLY_OVERHEAD_BYTES
    talk.mark_received(4, 3)
    assert list(talk.replies) == [3]
    assert talk.replies_size_bytes == 3 + REPLY_OVERHEAD_BYTES
    talk.mark_received(10**18, 10**18)
    assert talk.replies == {}
    assert talk.replies_size_bytes == 0


def test_a_reply_whose_message_is_the_lowest_pending_one_is_kept_also_where_few_are() -> None:
    talk = conversation()
    for message_id in (1, 2, 3):
        talk.mark_received(message_id, 1)
    talk.store_reply(3, 13, (b"x",))
    talk.mark_received(4, 3)
    assert list(talk.replies) == [3]
    talk.mark_received(5, 5)
    assert talk.replies == {}


def test_a_reply_that_nobody_can_ask_for_is_not_kept() -> None:
    talk = conversation()
    talk.mark_received(1, 1)
    talk.mark_received(2, 2)
    talk.store_reply(1, 0, (b"x",))
    assert talk.replies == {}
    assert talk.replies_size_bytes == 0


def test_beyond_the_limit_the_oldest_bytes_are_let_go_but_not_that_there_was_a_reply() -> None:
    talk = conversation(replies_size_bytes_max=10 + 4 * REPLY_OVERHEAD_BYTES)
    for message_id in (1, 2, 3, 4):
        talk.mark_received(message_id, 1)
    talk.store_reply(2, 22, (b"x" * 4,))
    talk.store_reply(1, 21, ())
    talk.store_reply(3, 23, (b"x" * 4,))
    assert talk.replies_size_bytes == 8 + 3 * REPLY_OVERHEAD_BYTES
    talk.store_reply(4, 24, (b"x" * 4,))
    assert talk.replies[2].kind == Kind.REPLY_EXPIRED
    assert talk.replies[2].destination_callback_id == 22
    assert talk.replies[1].parts == ()
    assert talk.replies[3].parts == talk.replies[4].parts == (b"xxxx",)
    assert talk.replies_size_bytes == 8 + 4 * REPLY_OVERHEAD_BYTES


class Counted(dict[int, CachedReply]):
    """Counts what is looked at when it is gone through."""

    looked_at = 0

    def items(self) -> Any:
        for item in super().items():
            self.looked_at += 1
            yield item


def test_what_was_let_go_is_not_gone_through_again() -> None:
    # Each reply beyond the limit went through all that had been let go before it.
    talk = conversation(replies_size_bytes_max=1)
    talk.replies = counted = Counted()
    count = 300
    for message_id in range(1, count + 1):
        talk.mark_received(message_id, 1)
        talk.store_reply(message_id, 0, (b"x",))
    assert len(counted) == count
    assert sum(reply.kind == Kind.REPLY for reply in counted.values()) == 0
    assert counted.looked_at <= 2 * count
    talk.mark_received(count + 1, count + 1)
    assert (talk.replies, talk.replies_size_bytes, len(talk._unexpired)) == ({}, 0, 0)


def test_a_sender_that_never_acknowledges_cannot_make_it_grow() -> None:
    talk = conversation(span_max=100)
    refused = 0
    for message_id in range(1, 1000):
        sighting = talk.mark_received(message_id, 1)
        refused += sighting == Arrival.REFUSED
        if sighting == Arrival.FIRST:
            talk.store_reply(message_id, 0, ())
    assert len(talk.replies) == 100
    assert refused == 899


def test_a_reply_is_tried_on_the_newest_connections_first() -> None:
    """What an older one has still brought is read in turns with what the newest brings."""
    talk = conversation()
    for route in (b"1", b"2", b"1", b"2", b"3", b"2", b"1"):
        talk.note_route(route)
    assert talk.routes[:3] == [b"3", b"2", b"1"]
    for number in range(100):
        talk.note_route(b"another %d" % number)
    assert talk.routes == [b"another %d" % number for number in (99, 98, 97, 96)]


def test_links_are_apart_and_the_one_unused_for_longest_is_forgotten() -> None:
    inbox = Inbox(links_max=2)
    first, second = inbox.link(1, 1), inbox.link(1, 2)
    assert first is not second
    assert inbox.link(1, 1) is first
    inbox.link(2, 1)
    assert len(inbox) == 2
    assert inbox.link(1, 1) is first
    assert inbox.link(1, 2) is not second


def test_no_peer_makes_the_links_of_another_be_forgotten() -> None:
    inbox = Inbox()
    honest = inbox.link(1, 1, "alice")
    honest.mark_received(1, 1)
    for incarnation in range(2, 3 * PEER_LINKS_MAX):
        inbox.link(incarnation, 1, "mallory")
    assert len(inbox) == 1 + PEER_LINKS_MAX
    assert inbox.link(1, 1, "alice") is honest


def test_what_the_replies_of_one_peer_take_is_bounded_over_all_its_links() -> None:
    inbox = Inbox()
    honest = inbox.link(1, 1, "alice")
    honest.store_reply(1, 0, (b"kept",))
    reply = bytes(1 << 20)
    for incarnation in range(2, 20):
        talk = inbox.link(incarnation, 1, "mallory")
        for message_id in range(1, 9):
            talk.store_reply(message_id, 0, (reply,))
    kept = {id(talk): talk for talk in inbox._caches["mallory"].links.values()}
    assert sum(talk.replies_size_bytes for talk in kept.values()) <= PEER_REPLIES_SIZE_BYTES_MAX + 9 * len(reply)
    assert inbox.link(1, 1, "alice").replies[1].parts == (b"kept",)


def test_a_callback_is_kept_for_one_message_and_counts_with_the_replies() -> None:
    talk = conversation()
    assert talk.store_callback(5, print)
    assert talk.replies_size_bytes == talk.stored.size_bytes == CALLBACK_OVERHEAD_BYTES
    assert talk.pop_callback(6) is None
    assert talk.pop_callback(5) is print
    assert talk.pop_callback(5) is None
    assert talk.replies_size_bytes == talk.stored.size_bytes == 0


def test_beyond_the_limit_the_oldest_callback_is_let_go() -> None:
    talk = conversation()
    for callback_id in range(1, CALLBACKS_MAX + 1):
        assert talk.store_callback(callback_id, print)
    assert not talk.store_callback(CALLBACKS_MAX + 1, print)
    assert (talk.pop_callback(1), talk.pop_callback(2)) == (None, print)
    assert len(talk.callbacks) == CALLBACKS_MAX - 1
    assert talk.replies_size_bytes == (CALLBACKS_MAX - 1) * CALLBACK_OVERHEAD_BYTES


def test_what_the_callbacks_of_one_peer_take_is_bounded_with_its_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messenger_limits, "PEER_REPLIES_SIZE_BYTES_MAX", 10 * CALLBACK_OVERHEAD_BYTES)
    inbox = Inbox()
    for link_id in range(1, 8):
        for callback_id in range(4):
            inbox.link(1, link_id, "mallory").store_callback(callback_id, print)
    kept = inbox._caches["mallory"].links.values()
    assert sum(len(talk.callbacks) for talk in kept) <= 10 + 4
