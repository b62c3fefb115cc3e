"""Queries that are not logged, in the SDK: run between two records, and whatever one does, the state is the log's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers import queries as module
from immortal.errors import RecoveryNeeded
from immortal.protocol.client_frames import ReplyKind
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType
from immortal.protocol.queries import QueryAnswer, QueryQuestion, decode_query_answer, encode_query
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from tests.helpers.core import COMMITTER_ID
from tests.helpers.sdk import Life, first_start_with_verdicts
from tests.helpers.wire import call, logged
from tests.unit.test_sdk_queries import Large, Shop

TIME_NS = 1_800_000_000_000_000_000


def question(method_id: int, *arguments: Any, ticket: int = 1) -> bytes:
    """As the app gets it: a control record."""
    asked = QueryQuestion(ticket, method_id, msgspec.msgpack.encode(arguments), TIME_NS)
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, encode_query(asked))


def answers(life: Life) -> list[QueryAnswer]:
    sent = [one for one in life.output.messages if one.message_type == MessageType.QUERY_ANSWERED]
    return [decode_query_answer(one.data) for one in sent]


def ask(life: Life, method_id: int, *arguments: Any) -> QueryAnswer:
    life.give(question(method_id, *arguments))
    return answers(life)[-1]


def value(answer: QueryAnswer) -> Any:
    assert answer.kind == ReplyKind.VALUE
    return msgspec.msgpack.decode(answer.value)


def raised(answer: QueryAnswer) -> list[Any]:
    """Name, arguments and attributes."""
    assert answer.kind == ReplyKind.RAISED
    found: list[Any] = msgspec.msgpack.decode(b"\x93" + answer.value)
    return found


def test_it_sees_what_has_been_handled_and_leaves_nothing_behind() -> None:
    life = first_start_with_verdicts(Shop)
    assert value(ask(life, 2)) == 3
    life.give(logged(1, [call(1, "pen", 4)]))
    types = list(life.sent_types)
    assert value(ask(life, 2)) == 7
    assert value(ask(life, 3, "pen")) == [1, 2, 4]
    assert life.sent_types[len(types) :] == [MessageType.QUERY_ANSWERED] * 2
    life.give(logged(2, [call(1, "pen", 4)]))
    assert value(ask(life, 2)) == 11, "records go on where they were"


def test_what_it_declares_and_what_it_does_not() -> None:
    life = first_start_with_verdicts(Shop)
    assert raised(ask(life, 3, "ink")) == ["MissingError", ["ink"], {}]
    name, arguments, _ = raised(ask(life, 6, "raise"))
    assert (name, arguments) == ("~failed", ["KeyError", "'raised'", ""])
    assert life.verdicts == [], "there is no message that has failed"
    assert value(ask(life, 2)) == 3


def test_its_time_is_that_of_the_instance() -> None:
    life = first_start_with_verdicts(Shop)
    life.give(logged(1, [call(1, "pen", 4)]))
    before = life.dispatcher.context.record_time_ns
    text = value(ask(life, 4))
    found = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    assert found == datetime.fromtimestamp(TIME_NS / 1e9, UTC)
    assert life.dispatcher.context.record_time_ns == before


@pytest.mark.parametrize("what", ["call", "call itself", "signal", "random", "uuid4", "sleep", "effect"])
def test_what_reaches_beyond_reading_is_refused(what: str) -> None:
    life = first_start_with_verdicts(Shop)
    types = list(life.sent_types)
    name, arguments, _ = raised(ask(life, 6, what))
    assert name == "~failed"
    assert arguments[0] in ("QueryError", "UsageError")
    assert life.sent_types[len(types) :] == [MessageType.QUERY_ANSWERED], "nothing has left"


@pytest.mark.parametrize(
    "what", ["set", "set the same", "set a default", "delete", "append", "another handler", "append and raise"]
)
def test_a_state_that_it_has_changed_is_made_anew_from_the_log(what: str) -> None:
    life, twin = first_start_with_verdicts(Shop), first_start_with_verdicts(Shop)
    for one in (life, twin):
        one.give(logged(1, [call(1, "pen", 4)]))
    answer = ask(life, 6, what)
    assert answer.changed
    name, arguments, _ = raised(answer)
    assert (name, arguments[0]) == ("~failed", "QueryError")
    assert "has changed" in arguments[1]
    assert _state(life) == _state(twin)
    for one in (life, twin):
        one.give(logged(2, [call(7), call(1, "ink", 1)]))
    assert _state(life) == _state(twin)
    assert _calls(life) == _calls(twin), "and it calls as if nothing had been, each call once"
    assert life.verdicts == []


def _state(life: Life) -> dict[str, Any]:
    instance = life.dispatcher.instance
    return {name: getattr(instance, name) for name in ("items", "count", "kind")}


def _calls(life: Life) -> list[bytes]:
    return [one.data for one in life.output.messages if one.message_type == MessageType.STREAM_BATCH]


def test_without_a_copy_of_the_state_the_app_is_recovered() -> None:
    """Of a large state there is none in memory: the next start makes it from checkpoint and log."""
    life = first_start_with_verdicts(Shop)
    life.dispatcher._rewinds.copies.forget()
    with pytest.raises(RecoveryNeeded, match="a query has changed the state"):
        life.give(question(6, "set"))
    for chunk in life.dispatcher.data_to_send():
        life.output.receive_data(bytes(chunk))
    assert answers(life)[-1].changed, "who has asked is told before"


def test_in_service_comparing_has_a_budget_of_its_own() -> None:
    """Of 80 KB, made twice, 64 KiB for each query: each third is compared, and the first of each method."""
    life = first_start_with_verdicts(Large)
    life.give(logged(1, [call(1, 80_000)]))
    found = [ask(life, 2, True).changed for _ in range(30)]
    assert found[0]
    assert 10 <= sum(found) <= 12
    small = first_start_with_verdicts(Large)
    assert all(ask(small, 2, True).changed for _ in range(30))
    large = first_start_with_verdicts(Large)
    large.dispatcher.tasks.queries.state_size_bytes = module.COMPARED_SIZE_BYTES_MAX + 1
    assert not ask(large, 2, True).changed


def test_what_it_can_not_be_called_with() -> None:
    life = first_start_with_verdicts(Shop)
    for method_id, arguments, text in (
        (1, ("pen", 4), "has no query with the method ID 1"),
        (99, (), "has no query with the method ID 99"),
        (3, (5,), "Shop.find: parameter 'name'"),
        (3, (), "takes 1 arguments"),
    ):
        name, words, _ = raised(ask(life, method_id, *arguments))
        assert name == "~refused"
        assert text in words[0]


def test_an_answer_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.dispatch.invocation.ANSWER_SIZE_BYTES_MAX", 2)
    name, words, _ = raised(ask(first_start_with_verdicts(Shop), 3, "pen"))
    assert (name, "at most 2 are possible" in words[0]) == ("~refused", True)


def test_before_the_app_is_primary_there_are_none() -> None:
    life = Life.of(Shop)
    with pytest.raises(RemoteProtocolError, match="before the app was told that it is primary"):
        life.give(question(2))
    assert isinstance(life.dispatcher, Dispatcher)
