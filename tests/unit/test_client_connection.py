"""A client's talk with an instance, frame by frame, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.errors import CallConflict, CallRefused, ClientError, OutcomeUnknown
from immortal.appsdk.client.methods import NamedMethod
from immortal.appsdk.client.session import REQUEST_ACCEPTED, REQUEST_UNKNOWN, Call, Question
from immortal.protocol.client_frames import (
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    decode_client_frame,
    encode_client_frame,
    encode_methods,
    encode_replies,
)
from immortal.protocol.messages import decode_name
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.protocol.varint import decode_zigzag_int

T = ClientFrameType
COMMITTER_ID = 77
COORDINATOR_TIME_NS = 1_000_000_000_000


class Talk:
    """A connection, and the coordinator's part by hand."""

    def __init__(self, client_id: str | None = None) -> None:
        self.now_s = 100.0
        self.connection = Connection("a", client_id, self.now_s)

    @property
    def sent(self) -> list[ClientFrame]:
        """What is to be sent now."""
        return [decode_client_frame(data) for data in self.connection.data_to_send(self.now_s)]

    @property
    def types(self) -> list[str]:
        return [frame.frame_type.name for frame in self.sent]

    def say(self, frame_type: ClientFrameType, client_id: str | None = None, **fields: Any) -> None:
        values = {"committer_id": COMMITTER_ID} | fields
        frame = ClientFrame(frame_type, client_id or self.connection.client_id, "a", **values)
        self.connection.receive(encode_client_frame(frame), self.now_s)

    def reply(self, *replies: Reply, client_id: str | None = None) -> None:
        self.say(T.REPLY, client_id, count=len(replies), payload=encode_replies(replies), number=replies[-1].number)

    def call(self, method: int | str = 3, key: str | None = None) -> Call:
        made = Call(method, b"\x90", lambda call: None)
        self.connection.submit(made, key)
        return made

    def welcome(
        self, number: int = 0, methods: dict[int, str] | None = None, queries: Collection[int] = (), **fields: Any
    ) -> None:
        payload = encode_methods({3: "A.add"} if methods is None else methods, queries)
        self.say(T.WELCOME, number=number, time_ns=COORDINATOR_TIME_NS, payload=payload, **fields)


def opened(client_id: str | None = None) -> Talk:
    talk = Talk(client_id)
    assert talk.types == ["HELLO"]
    talk.welcome()
    return talk


def test_nothing_is_sent_before_the_welcome_but_hello_again() -> None:
    talk = Talk()
    talk.call()
    assert talk.types == ["HELLO"]
    assert talk.types == []
    talk.now_s += 0.05
    assert talk.types == ["HELLO"]
    talk.now_s += 0.05
    assert talk.types == []  # less and less often
    talk.now_s += 0.05
    assert talk.types == ["HELLO"]
    talk.welcome()
    assert talk.types == ["REQUEST"]


def test_while_nobody_answers_there_is_something_to_do_at_each_deadline() -> None:
    """Found by the soak: behind the moment of the first heartbeat it was asked for again and again, at once."""
    talk = Talk()
    for _ in range(200):
        assert talk.types == ["HELLO"] or talk.connection.needs_reconnect
        if talk.connection.needs_reconnect:
            talk.connection.reopened(talk.now_s)
            assert talk.types == ["HELLO"]
        assert talk.connection.next_deadline_s() > talk.now_s
        talk.now_s = talk.connection.next_deadline_s()
    assert talk.now_s > 130


def test_calls_that_wait_share_a_frame_and_say_what_is_acknowledged() -> None:
    talk = opened()
    calls = [talk.call() for _ in range(3)]
    (frame,) = talk.sent
    assert (frame.number, frame.count, frame.acknowledged) == (1, 3, 0)
    assert frame.time_ns == COORDINATOR_TIME_NS
    talk.reply(Reply(1, 1, b"\1"), Reply(2, 2))
    assert [call.outcome for call in calls] == [Reply(1, 1, b"\1"), Reply(2, 2), None]
    talk.now_s += 1
    talk.call()
    frame = talk.sent[0]
    assert (frame.number, frame.count, frame.acknowledged) == (4, 1, 2)
    assert frame.time_ns == COORDINATOR_TIME_NS + 10**9


def test_one_with_an_id_of_its_own_acknowledges_nothing() -> None:
    talk = opened("script")
    talk.call()
    assert len(talk.sent) == 1
    talk.reply(Reply(1, 2))
    talk.call()
    assert talk.sent[0].acknowledged == 0


def test_what_is_not_answered_is_asked_for_less_and_less_often() -> None:
    talk = opened()
    talk.call()
    assert talk.types == ["REQUEST"]
    pauses = []
    for _ in range(6):
        before_s = talk.now_s
        talk.now_s = talk.connection.next_deadline_s()
        pauses.append(round(talk.now_s - before_s, 6))
        (frame,) = talk.sent
        assert (frame.frame_type, frame.requested_numbers()) == (T.PING, [1])
        talk.say(T.PONG, number=1)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_what_a_pong_does_not_know_is_sent_again() -> None:
    talk = opened()
    for _ in range(3):
        talk.call()
    assert talk.types == ["REQUEST"]
    talk.now_s += 0.1
    assert talk.types == ["PING"]
    talk.say(T.PONG, number=1)
    (frame,) = talk.sent
    assert (frame.frame_type, frame.number, frame.count) == (T.REQUEST, 2, 2)
    talk.say(T.PONG, number=1)  # an answer to what was sent before that
    assert talk.types == []


def test_a_busy_instance_is_asked_again_later() -> None:
    talk = opened()
    talk.call()
    assert talk.types == ["REQUEST"]
    talk.say(T.PONG, number=0, code=ClientCode.BUSY)
    assert talk.types == []
    talk.now_s += 0.1
    assert "REQUEST" in talk.types


def test_silence_leads_to_another_socket_and_all_is_sent_again() -> None:
    talk = opened()
    talk.call()
    talk.call()
    assert talk.types == ["REQUEST"]
    talk.reply(Reply(1, 2))
    for _ in range(20):
        talk.now_s += 0.2
        talk.connection.data_to_send(talk.now_s)
    assert talk.connection.needs_reconnect
    assert "nothing was heard for" in talk.connection.problem
    talk.connection.reopened(talk.now_s)
    assert talk.types == ["HELLO"]
    talk.welcome(2)
    (frame,) = [frame for frame in talk.sent if frame.frame_type is T.REQUEST]
    assert (frame.number, frame.count, frame.acknowledged) == (2, 1, 1)


def test_an_endpoint_of_somebody_else_is_left() -> None:
    talk = Talk()
    assert talk.types == ["HELLO"]
    talk.say(T.REFUSED, code=ClientCode.NOT_ME, reason="this is 'b'")
    assert talk.connection.needs_reconnect
    assert talk.connection.problem == "this is 'b'"


def test_an_instance_that_is_not_ready_is_greeted_again() -> None:
    talk = opened()
    talk.call()
    assert talk.types == ["REQUEST"]
    talk.say(T.REFUSED, code=ClientCode.NOT_READY, reason="it is stopping")
    assert talk.types == []
    talk.now_s += 1
    assert talk.types == ["HELLO"]
    talk.welcome()
    assert "REQUEST" in talk.types


def test_a_call_that_was_given_up_before_it_was_sent_leaves_no_gap() -> None:
    talk = Talk()
    first, second = talk.call(), talk.call()
    assert talk.connection.withdraw(first)
    assert talk.types == ["HELLO"]
    talk.welcome()
    (frame,) = talk.sent
    assert (frame.number, frame.count) == (1, 1)
    assert not talk.connection.withdraw(second)
    assert second.number == 1


@pytest.mark.parametrize(
    "forget",
    [
        lambda talk: talk.say(T.PONG, number=0),
        lambda talk: talk.say(T.REFUSED, code=ClientCode.FORGOTTEN, reason="who?"),
        lambda talk: talk.say(T.PONG, number=2, committer_id=COMMITTER_ID + 1),
    ],
)
def test_numbers_that_mean_nothing_any_more(forget: Any) -> None:
    talk = opened()
    done, waiting = talk.call(), talk.call()
    assert talk.types == ["REQUEST"]
    talk.reply(Reply(1, 2))
    before = talk.connection.client_id
    forget(talk)
    assert done.outcome == Reply(1, 2)
    assert isinstance(waiting.outcome, OutcomeUnknown)
    assert talk.connection.client_id != before
    after = talk.call()
    talk.now_s += 2
    if "HELLO" in talk.types:  # another log: its clock and methods are others too
        talk.welcome(committer_id=COMMITTER_ID + 1)
    numbers = [frame.number for frame in talk.sent if frame.frame_type is T.REQUEST]
    assert after.number == 1
    assert numbers in ([1], [])


def test_one_with_an_id_of_its_own_can_not_go_on_then() -> None:
    talk = opened("script")
    talk.call()
    assert talk.types == ["REQUEST"]
    talk.reply(Reply(1, 2))
    talk.say(T.PONG, number=0)
    assert isinstance(talk.call().outcome, OutcomeUnknown)


@pytest.mark.parametrize(("kind", "error"), [(ReplyKind.GONE, "not kept any more"), (ReplyKind.LOST, "cut by hand")])
def test_replies_that_are_none(kind: ReplyKind, error: str) -> None:
    talk = opened()
    made = talk.call()
    assert talk.types == ["REQUEST"]
    talk.reply(Reply(1, kind))
    assert isinstance(made.outcome, ClientError)
    assert error in str(made.outcome)


def test_a_request_that_makes_no_sense_fails() -> None:
    talk = opened()
    made = talk.call()
    assert talk.types == ["REQUEST"]
    talk.say(T.REFUSED, code=ClientCode.MALFORMED, reason="no call")
    assert isinstance(made.outcome, CallRefused)


def test_a_key_is_a_client_of_its_own_for_one_request() -> None:
    talk = opened()
    first, second = talk.call(key="k"), talk.call(key="k")
    (frame,) = talk.sent
    assert (frame.client_id, frame.number, frame.count, frame.acknowledged) == ("key k", 1, 1, 0)
    talk.reply(Reply(1, 1, b"\5"), client_id="key k")
    assert first.outcome == second.outcome == Reply(1, 1, b"\5")
    talk.call(key="k")  # asked once more, of the instance
    assert [frame.client_id for frame in talk.sent] == ["key k"]


def test_names_of_methods() -> None:
    talk = Talk()
    known, unknown = talk.call("add"), talk.call("subtract")
    assert talk.types == ["HELLO"]
    talk.welcome(methods={})  # its app is not up yet
    assert talk.types == []
    talk.now_s += 0.2
    assert talk.types == ["HELLO"]
    talk.welcome()
    assert talk.types == ["REQUEST"]
    assert known.method == 3
    assert isinstance(unknown.outcome, CallRefused)
    assert "(its handlers: add)" in str(unknown.outcome)
    late = talk.call("subtract")  # perhaps the app has been upgraded since
    talk.now_s += 10
    talk.welcome(1, methods={3: "A.add", 4: "A.subtract"}) if "HELLO" in talk.types else None
    assert "REQUEST" in talk.types
    assert late.method == 4


def test_names_of_queries() -> None:
    talk = opened()
    talk.welcome(methods={3: "A.add", 4: "A.total", 5: "A.immortal_give"}, queries=[4])
    query, plain, no_query, unknown = (talk.call(one) for one in ("@query.total", "total", "@query.add", "@query.x"))
    (frame,) = talk.sent
    assert (frame.count, query.method, plain.method) == (2, 4, 4)
    assert "'add' of 'a' is no query (its queries: total): it is called without .query" in str(no_query.outcome)
    assert "'a' has no query 'x' (its queries: total)" in str(unknown.outcome)
    nothing = talk.call("subtract")
    assert talk.types == []
    assert "no handler 'subtract' (its handlers: add, total)" in str(nothing.outcome)


@pytest.mark.parametrize("name", ["total[key]", "@query.total[key]"])
def test_keys_of_a_class_that_is_keyed_or_not(name: str) -> None:
    """A plain handler would take the key as its first argument."""
    talk = opened()
    call, unknown = talk.call(name), talk.call("x[key]")
    talk.welcome(methods={4: "A.total"}, queries=[4])
    assert talk.types == []
    assert "'a' has no keys, its class is not keyed: call 'a' without [...]" in str(call.outcome)
    assert "'a' has no handler 'x' (its handlers: total)" in str(unknown.outcome)
    talk = opened()
    call, plain = talk.call(name), talk.call("total")
    talk.welcome(methods={4: "A[key].total"}, queries=[4])
    assert talk.types == ["REQUEST"]
    assert (call.method, plain.method) == (4, 4)


def test_an_instance_that_names_no_queries() -> None:
    talk = opened()
    call = talk.call("@query.add")
    assert talk.types == []
    assert isinstance(call.outcome, CallRefused)
    assert "is no query (it marks none with @query, or is of an earlier version)" in str(call.outcome)


def test_a_client_that_knows_no_queries_takes_the_names() -> None:
    """Of two names of a method it takes the second one, as it is written here for earlier versions."""
    payload = encode_methods({3: "A.add", 4: "A.total"}, [4])
    count, offset = decode_zigzag_int(payload, 0)
    names: dict[int, str] = {}
    for _ in range(count):
        method_id, offset = decode_zigzag_int(payload, offset)
        names[method_id], offset = decode_name(payload, offset)
    assert names == {3: "A.add", 4: "A.total"}


def test_when_idle_there_are_heartbeats() -> None:
    talk = opened()
    assert talk.types == []
    talk.now_s = talk.connection.next_deadline_s()
    assert talk.types == ["PING"]
    talk.say(T.PONG)
    assert talk.connection.heartbeats == 1


def test_damaged_frames_and_those_of_others_are_passed_over() -> None:
    talk = opened()
    made = talk.call()
    assert talk.types == ["REQUEST"]
    talk.connection.receive(b"\xc1nonsense", talk.now_s)
    talk.reply(Reply(1, 2), client_id="somebody")
    assert made.outcome is None
    talk.reply(Reply(1, 2))
    talk.reply(Reply(1, 2))
    assert made.outcome == Reply(1, 2)


# --- handles ---------------------------------------------------------------------------------------------------------


def asked(talk: Talk, key: str = "k", *, starts: bool = False) -> Question:
    question = Question(starts, lambda call: None)
    talk.connection.ask_status(question, key)
    return question


def cancelled(talk: Talk, key: str = "k") -> Call:
    made = Call(CANCEL_CALL_METHOD_ID, b"\x92\x01\xa0", lambda call: None)
    talk.connection.cancel(made, key)
    return made


def test_a_call_that_is_started_is_there_with_the_first_pong() -> None:
    talk = opened()
    talk.call(key="k")
    question = asked(talk, starts=True)
    request, ping = talk.sent
    assert (request.frame_type, request.client_id, request.number) == (T.REQUEST, "key k", 1)
    assert (ping.frame_type, ping.client_id, ping.requested_numbers()) == (T.PING, "key k", [])
    talk.say(T.PONG, "key k", number=0)  # the request was lost
    assert question.outcome is None
    assert talk.types == ["REQUEST"]
    talk.now_s += 1
    assert talk.types == ["PING"]
    for _ in range(3):
        talk.say(T.PONG, "key k", number=1, code=ClientCode.PENDING)
        assert question.outcome is None, "a crash takes it back"
        assert talk.types == [], "the commit needs a moment"
        talk.now_s += 0.05
        assert "PING" in talk.types
    talk.say(T.PONG, "key k", number=1)
    assert question.outcome is REQUEST_ACCEPTED


def test_a_call_of_another_process_waits_if_a_second_pong_has_no_reply_before_it() -> None:
    talk = opened()
    question = asked(talk)
    assert talk.types == ["PING"]
    talk.say(T.PONG, "key k", number=1)
    assert question.outcome is None, "its reply may come behind this"
    assert talk.types == ["PING"]
    talk.say(T.PONG, "key k", number=1)
    assert question.outcome is REQUEST_ACCEPTED
    done = asked(talk)
    assert talk.types == ["PING"]
    talk.say(T.PONG, "key k", number=1)
    talk.reply(Reply(1, ReplyKind.NOTHING), client_id="key k")
    assert done.outcome == Reply(1, ReplyKind.NOTHING)


def test_a_pong_of_before_the_question_says_nothing() -> None:
    talk = opened()
    talk.call(key="k")
    assert talk.types == ["REQUEST"]
    talk.now_s += 10
    assert talk.types == ["PING"]
    question = asked(talk)
    assert talk.types == ["REQUEST", "PING"]
    talk.say(T.PONG, "key k", number=1)
    assert talk.types == ["REQUEST", "PING"]
    talk.say(T.PONG, "key k", number=1)
    assert question.outcome is None
    talk.reply(Reply(1, ReplyKind.NOTHING), client_id="key k")
    assert question.outcome == Reply(1, ReplyKind.NOTHING)


def test_a_call_that_there_is_not_is_unknown() -> None:
    talk = opened()
    question, result = asked(talk), Call(3, b"", lambda call: None)
    talk.connection.attach(result, "k")
    cancel = cancelled(talk)
    talk.sent  # noqa: B018
    talk.say(T.PONG, "key k", number=0)
    assert question.outcome is REQUEST_UNKNOWN
    assert isinstance(result.outcome, OutcomeUnknown)
    assert isinstance(cancel.outcome, OutcomeUnknown)
    assert talk.types == []
    assert talk.call(key="k").outcome is None, "it can be started now"
    assert talk.sent[0].number == 1


def test_a_cancellation_is_the_second_request_of_its_key() -> None:
    talk = opened()
    cancel = cancelled(talk)
    again = cancelled(talk)
    (request, ping) = talk.sent
    assert (request.frame_type, request.client_id, request.number, request.count) == (T.REQUEST, "key k", 2, 1)
    assert ping.frame_type == T.PING
    talk.reply(Reply(2, ReplyKind.VALUE, b"\xc3"), client_id="key k")
    assert cancel.outcome == again.outcome == Reply(2, ReplyKind.VALUE, b"\xc3")


def test_a_call_with_a_key_whose_cancellation_is_open_is_the_first_request_all_the_same() -> None:
    talk = opened()
    talk.call(key="k")
    cancelled(talk)
    assert [frame.number for frame in talk.sent if frame.frame_type == T.REQUEST] == [1]
    talk.reply(Reply(1, ReplyKind.NOTHING), client_id="key k")
    again = talk.call(key="k")
    talk.now_s += 1
    assert [(frame.frame_type, frame.number) for frame in talk.sent] == [(T.REQUEST, 1), (T.PING, 0)]
    talk.reply(Reply(2, ReplyKind.VALUE, b"\xc2"), client_id="key k")
    assert again.outcome is None
    talk.reply(Reply(1, ReplyKind.NOTHING), client_id="key k")
    assert again.outcome == Reply(1, ReplyKind.NOTHING)


def test_a_start_that_is_given_up_before_it_was_sent_is_never_made() -> None:
    talk = Talk()
    made, question = talk.call(key="k"), asked(talk, starts=True)
    assert not question.sent
    assert talk.connection.withdraw(question)
    talk.welcome()
    assert "REQUEST" not in talk.types
    assert made.number == 0


def test_a_question_that_is_given_up_withdraws_nothing() -> None:
    talk = Talk()
    made, question = talk.call(key="k"), asked(talk)
    talk.connection.withdraw(question)
    talk.welcome()
    assert "REQUEST" in talk.types
    assert made.number == 1


# --- a key that is another call's -------------------------------------------------------------------------------------


def with_methods(talk: Talk) -> Talk:
    talk.say(T.WELCOME, payload=encode_methods({3: "C.add", 4: "C.take"}))
    talk.sent  # noqa: B018
    return talk


def made(talk: Talk, method: int | str, arguments: bytes, key: str = "k") -> Call:
    call = Call(method, arguments, lambda call: None)
    talk.connection.submit(call, key)
    return call


def conflict_of(call: Call) -> CallConflict:
    assert isinstance(call.outcome, Reply)
    with pytest.raises(CallConflict) as caught:
        NamedMethod("add").value(call.outcome)
    return caught.value


@pytest.mark.parametrize(("method", "arguments"), [("add", b"\x91\x02"), ("take", b"\x91\x01"), (4, b"\x91\x01")])
def test_a_call_with_the_key_of_another_one_that_waits_here_is_refused(method: int | str, arguments: bytes) -> None:
    talk = with_methods(opened())
    first = made(talk, "add", b"\x91\x01")
    assert [frame.number for frame in talk.sent] == [1]
    error = conflict_of(made(talk, method, arguments))
    assert error.known.startswith("add with 2 bytes")
    assert error.given.startswith(("add with 2 bytes", "take with 2 bytes"))
    assert made(talk, "add", b"\x91\x01").outcome is None
    assert first.outcome is None
    assert talk.types == []


def test_a_call_whose_arguments_only_end_like_those_of_the_other_is_another_one() -> None:
    talk = with_methods(opened())
    made(talk, 3, b"\x91\x90")
    talk.sent  # noqa: B018
    conflict_of(made(talk, 3, b"\x90"))


def test_a_call_with_a_key_that_was_answered_is_sent_again_so_that_it_is_compared() -> None:
    talk = with_methods(opened())
    made(talk, 3, b"\x91\x01")
    asked(talk)
    talk.sent  # noqa: B018
    talk.reply(Reply(1, ReplyKind.NOTHING), client_id="key k")
    made(talk, "take", b"\x91\x01")
    request = talk.sent[0]
    assert (request.frame_type, request.number, request.payload[-2:]) == (T.REQUEST, 1, b"\x91\x01")


def test_what_others_may_have_sent_too_is_asked_for_by_sending_it_again() -> None:
    talk = with_methods(opened("script"))
    made(talk, 3, b"\x91\x01")
    talk.call(3)
    assert [frame.client_id for frame in talk.sent] == ["script", "key k"]
    for _ in range(2):
        talk.now_s += 1
        frames = talk.sent
        assert all(not frame.requested_numbers() for frame in frames if frame.frame_type == T.PING), frames
    assert {frame.client_id for frame in frames if frame.frame_type == T.REQUEST} == {"script", "key k"}


def test_a_handle_says_which_method_it_is_of() -> None:
    talk = with_methods(opened())
    talk.connection.attach(Call("take", b"", lambda call: None), "k")
    (ping,) = talk.sent
    assert (ping.requested_numbers(), ping.reason) == ([1], "4")
    other = Call("add", b"", lambda call: None)
    talk.connection.attach(other, "k")
    assert "a call of take" in str(conflict_of(other))


def test_a_question_before_the_result_hides_no_other_method() -> None:
    talk = with_methods(opened())
    asked(talk)
    (ping,) = talk.sent
    assert ping.reason == ""
    talk.connection.attach(Call("take", b"", lambda call: None), "k")
    talk.now_s += 1
    (ping,) = talk.sent
    assert ping.reason == "4"


def test_a_handle_of_a_method_that_there_is_not_is_refused() -> None:
    talk = with_methods(opened())
    result = Call("gone", b"", lambda call: None)
    talk.connection.attach(result, "k")
    talk.sent  # noqa: B018
    assert isinstance(result.outcome, CallRefused)
