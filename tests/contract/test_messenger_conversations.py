"""Conversations: messages for callbacks, each given once, whatever becomes of the connection or comes from the peer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from immortal.coordinator.messenger import limits as messenger_limits
from immortal.coordinator.messenger import listener as messenger_listener
from immortal.coordinator.messenger.envelope import (
    Envelope,
    Kind,
    UnknownEnvelopeError,
    as_conversation_message,
    decode_envelope,
    encode_message,
    encode_parts,
    encode_reply,
)
from immortal.coordinator.messenger.listener import Listener
from immortal.messenger import Answer, Messenger, MessengerError, Outcome, Received, RetryPolicy, ServerLoop
from tests.helpers.lossy import LossyNetwork
from tests.helpers.messengers import WAIT_SECONDS, House, echo, listen_when_free
from tests.helpers.proxy import DEADLINE_S, FaultProxy

CONVERSATIONS, TURNS = 20, 6


@pytest.fixture(params=["tcp", "ipc", "inproc"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    yield from _house(request.param, tmp_path)


@pytest.fixture(params=["tcp", "ipc"])
def networked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    yield from _house(request.param, tmp_path)


def _house(transport: str, folder: Path) -> Iterator[House]:
    house = House(transport, folder)
    yield house
    for messenger in house.messengers:
        messenger.close()
    house.context.destroy(linger=0)


class Teller:
    """Answers each message with a callback for the next one, up to the last turn; notes who was given what."""

    def __init__(self) -> None:
        self.given: dict[bytes, list[tuple[str, int]]] = {}

    def loop(self, received: Received) -> None:
        name, turn = received.parts
        assert received.replied == received.for_callback, "a callback has replied before"
        self.given.setdefault(name, []).append(("loop", int(turn)))
        if not received.for_callback:
            self._answer(received)

    def _expect(self, expected: bytes, expected_turn: int) -> ServerLoop:
        def callback(received: Received) -> None:
            name, turn = received.parts
            assert (name, int(turn), received.for_callback) == (expected, expected_turn, True)
            self.given[name].append(("callback", expected_turn))
            self._answer(received)

        return callback

    def _answer(self, received: Received) -> None:
        name, turn = received.parts
        following = int(turn) + 1
        callback = self._expect(name, following) if following <= TURNS else None
        received.reply(name, turn, callback=callback)

    @staticmethod
    def once_each() -> list[tuple[str, int]]:
        return [("loop", 1), *((who, turn) for turn in range(2, TURNS + 1) for who in ("callback", "loop"))]


class Asker:
    """Goes on with each conversation as long as the other side has a callback for it."""

    def __init__(self, messenger: Messenger, endpoint: str) -> None:
        self.answers: list[tuple[bytes, int]] = []
        self.ended: list[bytes] = []
        self.changed = threading.Condition()
        self._messenger, self._endpoint = messenger, endpoint

    def ask(self, name: bytes, turn: int = 1, callback_id: int = 0) -> None:
        def answered(answer: Answer) -> None:
            assert (answer.outcome, answer.parts) == (Outcome.REPLIED, [name, b"%d" % turn])
            with self.changed:
                self.answers.append((name, turn))
                if not answer.callback_id:
                    self.ended.append(name)
                self.changed.notify_all()
            if answer.callback_id:
                self.ask(name, turn + 1, answer.callback_id)

        self._messenger.converse(self._endpoint, [name, b"%d" % turn], answered, callback_id)


NAMES = [b"%d" % number for number in range(CONVERSATIONS)]
ALL_ANSWERS = sorted((name, turn) for name in NAMES for turn in range(1, TURNS + 1))


def cut(messenger: Messenger, endpoint: str) -> None:
    """The connection to ``endpoint`` ends with what is on its way, and another one is made, on any transport."""
    link = messenger._links.reopen(messenger._links[endpoint])
    if link.monitor_descriptor is None:
        link.outbox.retransmit_all()
        messenger._links.sending[link] = None
        messenger.flush()


def test_each_turn_is_given_once_over_cuts_to_its_callback_and_then_to_the_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the replies is lost as well, so that turns are sent again that were given already."""
    chance, send_reply, lost_count = random.Random(1), Listener._send, 0

    def lossy_send(self: Listener, *arguments: Any) -> None:
        nonlocal lost_count
        if chance.random() < 0.33:
            lost_count += 1
        else:
            send_reply(self, *arguments)

    monkeypatch.setattr(Listener, "_send", lossy_send)
    receiver, sender, teller = house.messenger(), house.messenger(), Teller()
    endpoint = receiver.listen(house.endpoint(), teller.loop)
    asker = Asker(sender, endpoint)
    for name in NAMES:
        asker.ask(name)
    house.drive(lambda: sender.counters().sent)
    while len(asker.ended) < CONVERSATIONS:
        before = len(asker.answers) + lost_count
        cut(sender, endpoint)
        house.drive(lambda before=before: len(asker.answers) + lost_count > before)
        if chance.random() < 0.5:  # else the replies that were not lost go down with the connection
            sender.process()
    assert sorted(asker.answers) == ALL_ANSWERS
    assert teller.given == {name: teller.once_each() for name in NAMES}
    assert receiver.counters().duplicates_dropped > CONVERSATIONS
    assert receiver.counters().replies_resent > CONVERSATIONS
    (conversation,) = receiver._listeners.all[0]._inbox._plain.links.values()
    assert conversation.callbacks == {}


def test_conversations_over_a_network_that_cuts_connections() -> None:
    """With threads, a proxy between them, and cuts in the middle of whatever is on its way."""
    teller = Teller()
    retry = RetryPolicy(delay_ns_min=20_000_000)
    with (
        Messenger() as servers,
        Messenger(retry=retry) as messenger,
        FaultProxy(servers.listen("tcp://127.0.0.1:*", teller.loop)) as proxy,
    ):
        asker = Asker(messenger, proxy.endpoint)
        for name in NAMES:
            asker.ask(name)
        for wanted in range(10, CONVERSATIONS * TURNS, 10):
            with asker.changed:
                assert asker.changed.wait_for(lambda wanted=wanted: len(asker.answers) >= wanted, DEADLINE_S)
            proxy.cut()
        with asker.changed:
            assert asker.changed.wait_for(lambda: len(asker.ended) == CONVERSATIONS, DEADLINE_S)
    assert sorted(asker.answers) == ALL_ANSWERS
    assert teller.given == {name: teller.once_each() for name in NAMES}


@pytest.mark.parametrize("ordered", [True, False])
def test_conversations_over_a_network_that_loses_messages(ordered: bool) -> None:
    """The callback comes first, then the loop, also where messages waited for one before them."""
    teller = Teller()
    with (
        Messenger() as servers,
        Messenger() as messenger,
        LossyNetwork(servers.listen("tcp://127.0.0.1:*", teller.loop, ordered=ordered), loss=0.1) as network,
    ):
        asker = Asker(messenger, network.endpoint)
        for name in NAMES:
            asker.ask(name)
        with asker.changed:
            assert asker.changed.wait_for(lambda: len(asker.ended) == CONVERSATIONS, DEADLINE_S)
        assert (servers.counters().early_kept > 0) == ordered
    assert sorted(asker.answers) == ALL_ANSWERS
    assert teller.given == {name: teller.once_each() for name in NAMES}


def test_a_callback_may_leave_the_reply_to_the_loop(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    happened: list[str] = []

    def loop(received: Received) -> None:
        happened.append("loop")
        if not received.for_callback:
            received.reply(b"go on", callback=lambda received: happened.append("callback"))
        else:
            received.reply(b"from the loop")

    endpoint = receiver.listen(house.endpoint(), loop)
    answers: list[Answer] = []
    sender.converse(endpoint, b"1", answers.append)
    house.drive(lambda: answers)
    sender.converse(endpoint, b"2", answers.append, answers[0].callback_id)
    house.drive(lambda: len(answers) == 2)
    assert answers[1] == Answer([b"from the loop"], 0, Outcome.REPLIED)
    assert happened == ["loop", "callback", "loop"]


def test_a_callback_may_close_its_messenger(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    loops: list[list[bytes]] = []

    def loop(received: Received) -> None:
        loops.append(received.parts)
        received.reply(callback=lambda received: house.close(receiver))

    endpoint = receiver.listen(house.endpoint(), loop)
    answers: list[Answer] = []
    sender.converse(endpoint, b"1", answers.append)
    house.drive(lambda: answers)
    sender.converse(endpoint, b"2", answers.append, answers[0].callback_id)
    house.drive(lambda: receiver not in house.messengers)
    assert loops == [[b"1"]]


def _one_callback(house: House) -> tuple[Messenger, Messenger, str, int, list[list[bytes]]]:
    """(receiver, sender, endpoint, the ID of a callback given to the sender, what callbacks were given)."""
    receiver, sender = house.messenger(), house.messenger()
    called: list[list[bytes]] = []

    def callback(received: Received) -> None:
        called.append(received.parts)
        received.reply(b"done")

    def loop(received: Received) -> None:
        if not received.replied:
            received.reply(callback=callback)

    endpoint = receiver.listen(house.endpoint(), loop)
    answers: list[Answer] = []
    sender.converse(endpoint, b"open", answers.append)
    house.drive(lambda: answers)
    assert answers[0].callback_id
    return receiver, sender, endpoint, answers[0].callback_id, called


def test_a_callback_is_for_whom_it_was_given_to_and_once(house: House) -> None:
    receiver, sender, endpoint, callback_id, called = _one_callback(house)
    stranger = house.messenger()
    answers: list[Answer] = []
    unknown = Answer([], 0, Outcome.CALLBACK_UNKNOWN)
    stranger.converse(endpoint, b"another's", answers.append, callback_id)
    house.drive(lambda: answers)
    sender.converse(endpoint, b"never given", answers.append, callback_id + 1)
    house.drive(lambda: len(answers) == 2)
    sender.converse(endpoint, b"given", answers.append, callback_id)
    house.drive(lambda: len(answers) == 3)
    sender.converse(endpoint, b"a second time", answers.append, callback_id)
    house.drive(lambda: len(answers) == 4)
    assert answers == [unknown, unknown, Answer([b"done"], 0, Outcome.REPLIED), unknown]
    assert called == [[b"given"]]
    assert receiver.counters().callbacks_unknown == 3
    assert receiver.counters().received == 2, "what is for nobody is not given to the loop either"


def test_a_receiver_that_starts_anew_takes_nothing_for_a_callback_of_the_one_before(house: House) -> None:
    receiver, sender, endpoint, callback_id, called = _one_callback(house)
    house.close(receiver)
    house.drive(lambda: not sender.connected(endpoint))
    opened: list[Answer] = []
    loops: list[list[bytes]] = []

    def loop(received: Received) -> None:
        loops.append(received.parts)
        received.reply(callback=echo)

    listen_when_free(house.messenger(), endpoint, loop)
    sender.converse(endpoint, b"open", opened.append)  # as many callbacks given as before
    house.drive(lambda: opened)
    answers: list[Answer] = []
    sender.converse(endpoint, b"late", answers.append, callback_id)
    house.drive(lambda: answers)
    assert answers == [Answer([], 0, Outcome.CALLBACK_UNKNOWN)]
    assert (called, loops) == ([], [[b"open"]])


def test_that_a_callback_is_unknown_is_said_again_if_it_was_lost(house: House) -> None:
    receiver = house.messenger()
    loops: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), loops.append)
    with house.raw(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(endpoint)
        for _ in range(3):
            stranger.send_multipart([as_conversation_message(encode_message(1, 1, 1, 1, 5), 12345), b"x"])
        house.drive(lambda: receiver.counters().duplicates_dropped == 2)
        for _ in range(3):
            assert stranger.poll(int(WAIT_SECONDS * 1000))
            envelope = decode_envelope(stranger.recv())
            assert (envelope.kind, envelope.destination_callback_id) == (Kind.CALLBACK_UNKNOWN, 5)
    assert loops == []
    assert receiver.counters().callbacks_unknown == 1


def test_conversations_that_never_end_are_let_go_the_oldest_first(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger_limits, "CALLBACKS_MAX", 10)
    receiver, sender = house.messenger(), house.messenger()
    given: list[bytes] = []

    def callback(received: Received) -> None:
        given.append(received.parts[0])

    def loop(received: Received) -> None:
        received.reply(*() if received.for_callback else (b"go on",), callback=callback)

    endpoint = receiver.listen(house.endpoint(), loop)
    answers: list[Answer] = []
    for _ in range(30):
        sender.converse(endpoint, b"open", answers.append)
    house.drive(lambda: len(answers) == 30)
    (conversation,) = receiver._listeners.all[0]._inbox._plain.links.values()
    assert len(conversation.callbacks) == 10
    assert receiver.counters().callbacks_forgotten == 20
    followed: list[Outcome] = []
    for answer in list(answers):
        sender.converse(endpoint, b"on", lambda answer: followed.append(answer.outcome), answer.callback_id)
    house.drive(lambda: len(followed) == 30)
    # Each of the ten that go on is given another callback: only the next message makes room for it.
    assert followed == [Outcome.CALLBACK_UNKNOWN] * 20 + [Outcome.REPLIED] * 10
    assert len(conversation.callbacks) == 10
    assert given == [b"on"] * 10


def test_a_conversation_without_end_takes_no_more_memory_than_its_last_turn(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    turns = 0

    def callback(received: Received) -> None:
        received.reply(callback=callback)

    def loop(received: Received) -> None:
        if not received.replied:
            received.reply(callback=callback)

    endpoint = receiver.listen(house.endpoint(), loop)

    def answered(answer: Answer) -> None:
        nonlocal turns
        turns += 1
        if turns < 500:
            sender.converse(endpoint, b"x", answered, answer.callback_id)

    sender.converse(endpoint, b"x", answered)
    house.drive(lambda: turns == 500)
    (conversation,) = receiver._listeners.all[0]._inbox._plain.links.values()
    assert len(conversation.callbacks) == 1
    assert len(conversation.replies) == 1
    assert conversation.replies_size_bytes < 2000


def test_who_takes_no_callback_is_given_none(house: House) -> None:
    """A sender of an earlier build, or send_message()."""
    receiver, sender = house.messenger(), house.messenger()
    takes: list[bool] = []

    def loop(received: Received) -> None:
        takes.append(received.takes_callback)
        received.reply(b"yes", callback=echo)

    endpoint = receiver.listen(house.endpoint(), loop)
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"x", replies.append)
    house.drive(lambda: replies)
    assert (replies, takes) == ([[b"yes"]], [False])
    (conversation,) = receiver._listeners.all[0]._inbox._plain.links.values()
    assert conversation.callbacks == {}
    assert sender.counters().malformed == 0


def decode_as_before(data: bytes) -> Envelope:
    """As a build decodes that knows kinds 1 to 5 alone."""
    envelope = decode_envelope(data)
    if envelope.kind > Kind.NOT_KNOWN:
        raise UnknownEnvelopeError(f"an envelope of kind {envelope.kind} came in, known are [1, 2, 3, 4, 5]")
    return envelope


def test_with_a_receiver_of_an_earlier_build_conversations_have_one_turn(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messenger_listener, "decode_envelope", decode_as_before)
    monkeypatch.setattr(messenger_listener, "KNOWN", b"version 2, kinds 1 to 5")
    receiver, sender = house.messenger(), house.messenger()
    arrived: list[bytes] = []

    def loop(received: Received) -> None:
        arrived.append(received.parts[0])
        received.reply(*received.parts)

    endpoint = receiver.listen(house.endpoint(), loop, ordered=True)
    answers: list[Answer] = []
    replies: list[list[bytes]] = []
    for number in range(3):
        sender.converse(endpoint, b"%d" % number, answers.append)
        sender.send_message(endpoint, b"plain %d" % number, replies.append)
    house.drive(lambda: len(answers) == len(replies) == 3)
    assert answers == [Answer([b"%d" % number], 0, Outcome.REPLIED) for number in range(3)]
    assert arrived == [b"0", b"plain 0", b"1", b"plain 1", b"2", b"plain 2"]
    assert "it knows 'version 2, kinds 1 to 5'; conversations end there with the first reply" in caplog.text
    for later in range(3):  # it is told once on each connection, and remembered
        sender.converse(endpoint, b"later", answers.append)
        house.drive(lambda later=later: len(answers) == 4 + later)
    cut(sender, endpoint)
    sender.converse(endpoint, b"after a cut", answers.append)
    house.drive(lambda: len(answers) == 7)


def test_a_receiver_that_is_replaced_by_a_later_build_is_offered_conversations_again(
    networked: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = networked
    sender, earlier = house.messenger(), house.messenger()
    answers: list[Answer] = []
    with monkeypatch.context() as before:
        before.setattr(messenger_listener, "decode_envelope", decode_as_before)
        endpoint = earlier.listen(house.fixed_endpoint(), echo)
        sender.converse(endpoint, b"x", answers.append)
        house.drive(lambda: answers)
        house.close(earlier)
        house.drive(lambda: not sender.connected(endpoint))
    listen_when_free(house.messenger(), endpoint, lambda received: received.reply(callback=echo))
    sender.converse(endpoint, b"x", answers.append)
    house.drive(lambda: len(answers) == 2)
    assert [bool(answer.callback_id) for answer in answers] == [False, True]


def test_the_bytes_of_plain_messages_are_those_of_before_and_conversations_have_their_own_kind(house: House) -> None:
    sender = house.messenger(incarnation=9)
    with house.raw(zmq.ROUTER) as router:
        router.bind(house.endpoint())
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        sender.send_message(endpoint, b"plain", lambda parts: None)
        sender.send_message(endpoint, b"nobody waits")
        sender.converse(endpoint, b"turn", lambda answer: None, 77)
        sender.converse(endpoint, b"nobody waits", None, 78)
        house.drive(lambda: sender.counters().sent == 4)
        envelopes = []
        for _ in range(4):
            assert router.poll(int(WAIT_SECONDS * 1000))
            envelopes.append(router.recv_multipart()[1].hex(" ", 8))
    assert envelopes == [
        "0201000000000001 0000000000000009 0000000000000001 0000000000000001 0000000000000001 0000000000000000",
        "0201000000000001 0000000000000009 0000000000000002 0000000000000001 0000000000000000 0000000000000000",
        "0206000000000001 0000000000000009 0000000000000003 0000000000000001 0000000000000002 000000000000004d",
        "0206000000000001 0000000000000009 0000000000000004 0000000000000001 0000000000000000 000000000000004e",
    ]


def test_a_receiver_that_answers_with_callbacks_where_there_are_none(house: House) -> None:
    sender = house.messenger()
    replies: list[list[bytes]] = []
    with house.raw(zmq.ROUTER) as router:
        router.bind(house.endpoint())
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        sender.send_message(endpoint, b"x", replies.append)
        house.drive(lambda: sender.counters().sent)
        assert router.poll(int(WAIT_SECONDS * 1000))
        route, *_ = router.recv_multipart()
        for reply in (
            encode_reply(Kind.REPLY, 1, 1, 1, 1, 1, 55),
            encode_reply(Kind.CALLBACK_UNKNOWN, 1, 1, 1, 1, 1),
            as_conversation_message(encode_message(1, 1, 1, 1, 1), 1),
            encode_reply(Kind.REPLY, 1, 1, 1, 1, 1) + encode_parts([b"right"]),
        ):
            router.send_multipart([route, reply])
        house.drive(lambda: replies)
    assert replies == [[b"right"]]
    assert sender.counters().malformed == 3


def test_a_reply_that_is_no_longer_kept_still_has_its_callback(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    send_reply = Listener._send
    monkeypatch.setattr(Listener, "_send", lambda *arguments: None)
    receiver, sender = house.messenger(), house.messenger()
    called: list[Received] = []
    given: list[Received] = []

    def loop(received: Received) -> None:
        given.append(received)
        received.reply(b"too long" * 1000, callback=called.append)

    endpoint = receiver.listen(house.endpoint(), loop)
    receiver._listeners.all[0]._inbox.link(sender.incarnation, 1).replies_size_bytes_max = 1000
    answers: list[Answer] = []
    sender.converse(endpoint, b"open", answers.append)
    house.drive(lambda: given)
    monkeypatch.setattr(Listener, "_send", send_reply)
    cut(sender, endpoint)
    house.drive(lambda: answers)
    ((parts, callback_id, outcome),) = answers
    assert (parts, outcome) == ([], Outcome.REPLY_EXPIRED)
    monkeypatch.undo()
    sender.converse(endpoint, b"on", answers.append, callback_id)
    house.drive(lambda: called)
    assert called[0].parts == [b"on"]


@pytest.mark.parametrize("callback_id", [-1, 1 << 64])
def test_no_callback_id(house: House, callback_id: int) -> None:
    with pytest.raises(MessengerError, match=f"callback ID {callback_id}, expected the callback_id of an Answer"):
        house.messenger().converse("tcp://127.0.0.1:9", b"x", None, callback_id)
