"""Links and listeners by themselves, with real sockets: what they do where a connection fails, or keys change."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
import zmq

from immortal.coordinator.messenger import link as messenger_link
from immortal.coordinator.messenger.limits import RECONNECT_REFUSED_NS, SILENCE_NS
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.outbox import Outbox
from immortal.coordinator.messenger.security import HandshakeGuard
from immortal.coordinator.messenger.sockets import Context, Shared, Warnings
from immortal.messenger import KeyPair, Messenger, RetryPolicy, Security

ENDPOINT = "tcp://127.0.0.1:9"
PAIR = KeyPair.new()


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "immortal.coordinator.messenger")
    return caplog


def link_of(context: Context, server_key: str | None = None) -> Link:
    pair = None if server_key is None else PAIR
    outbox = Outbox(RetryPolicy(), lambda: 0.0)
    return Link(Shared(context, 1, lambda: 0), ENDPOINT, 1, outbox, pair, server_key)


def test_a_listener_changes_its_socket_for_other_keys_of_its_own_and_not_for_other_callers() -> None:
    messenger = Messenger(security=Security(PAIR, {}, lambda endpoint: ()))
    messenger.listen("tcp://127.0.0.1:*", lambda received: None)
    (listener,) = messenger._listeners.all
    before = listener._socket
    messenger.secure(Security(PAIR, {PAIR.public: "a"}, lambda endpoint: ()))
    assert listener._socket is before
    assert listener.reopen_due_ns is None
    messenger.secure(Security(KeyPair.new(), {}, lambda endpoint: ()))
    assert listener._socket is not before
    assert listener.reopen_due_ns is not None
    messenger.close()


def test_a_handshake_that_has_succeeded_and_is_forgotten_counts_no_more(context: Context) -> None:
    handshakes = HandshakeGuard(context, context.socket(zmq.ROUTER), "handshakes", False, Warnings(lambda: 0))
    handshakes._succeeded_count = 2
    one, other = socket.socketpair()
    handshakes._unauthenticated = {1001: one, 1002: other}  # under ZeroMQ's descriptors
    handshakes._forget(1001, succeeded=True)
    assert handshakes._succeeded_count == 1
    handshakes._forget(1002)
    assert handshakes._succeeded_count == 1
    assert one.fileno() == other.fileno() == -1
    handshakes.close()


def test_a_link_that_is_given_up_waits_longer_the_next_time(context: Context, said: pytest.LogCaptureFixture) -> None:
    link = link_of(context)
    link.abandon_connection()
    assert link.outbox.silence_ns == 2 * SILENCE_NS
    assert link._counters.silences == 1
    assert f"{ENDPOINT} has not answered for {SILENCE_NS / 1e9:g} s; its connection is made anew" in said.text
    link.close()


@pytest.mark.parametrize(
    ("kind", "has_server_key", "reason"),
    [
        (messenger_link._REFUSED, False, "it does not let this instance's key in"),
        (messenger_link._REFUSED, True, "it does not let this instance's key in"),
        (messenger_link._OTHER_MECHANISM, False, "it takes only callers with keys, and this link has none for it"),
        (messenger_link._OTHER_MECHANISM, True, "it has no keys, and a key is expected of it"),
        (messenger_link._BROKEN_OFF, False, ""),
        (messenger_link._BROKEN_OFF, True, "it has another key than expected, or ended just then"),
    ],
)
def test_a_handshake_that_fails_is_told_and_tried_again(
    context: Context, said: pytest.LogCaptureFixture, kind: int, has_server_key: bool, reason: str
) -> None:
    link = link_of(context, PAIR.public if has_server_key else None)
    link._handshake_failed(kind, 5)
    link._handshake_failed(kind, 6)  # it was to be made anew already
    assert link.reopen_due_ns == 5 + RECONNECT_REFUSED_NS
    lines = [record.getMessage() for record in said.records]
    assert len(lines) == (1 if reason else 0)
    assert not reason or f"no connection to {ENDPOINT}: {reason}; it is tried again, nothing is lost" in lines[0]
    link.close()
