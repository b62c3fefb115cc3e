"""Whatever crashes or gets lost, each request of a client is done once, and gets the same reply each time."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal.appsdk.client.errors import OutcomeUnknown, ReplyGone
from immortal.appsdk.client.session import REQUEST_ACCEPTED, Call, Question
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import Reply
from tests.helpers.clients import World, is_conflict, value_of
from tests.helpers.effort import effort

METHODS = ("add", "add", "refuse", "add_later")
TINY = Limits(
    clients_max=3,
    client_replies_max=2,
    client_replies_bytes=40,
    replies_bytes=60,
    client_span_max=8,
    requests_open_max=4,
    group_size_bytes=300,
    app_window_bytes=400,
    read_size_bytes=200,
)
MOVES = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 7)), max_size=60)


def play(world: World, moves: list[tuple[int, int]]) -> tuple[list[Call], dict[int, set[int]], list[int]]:
    """Three clients, one of them by name; the calls to be finished, who has called with each key, and all tokens."""
    calls: list[Call] = []
    keyed: dict[int, set[int]] = {}  # by token, which stands for the key
    tokens: list[int] = []
    for number in range(3):
        world.open_client(number, "named" if number == 2 else None)
    for move, choice in moves:
        if move <= 1:
            tokens.append(len(tokens) + 1)
            calls.append(world.submit(choice % 3, METHODS[choice % 4], tokens[-1]))
        elif move == 2:
            key = f"order {choice % 2}"
            token = (2000 if choice >= 6 else 1000) + choice % 2  # of one key in four another call
            calls.append(world.submit(choice % 3, "add", token, key))
            keyed.setdefault(token, set()).add(choice % 3)
        elif move <= 4:
            world.client_turn(choice % 3)
        elif move <= 6:
            world.arrive_at_coordinator(choice)
        elif move <= 8:
            world.arrive_at_client(choice)
        elif move == 9:
            world.arrive_at_coordinator(choice, again=True)
            world.arrive_at_client(choice, again=True)
        elif move == 10:
            world.disk()
        elif move <= 12:
            world.app_turn()
        elif move == 13:
            world.now_s += (0.05, 0.3, 1.0, 4.0)[choice % 4]
        elif choice == 0:
            world.kill_app()
        elif choice == 1:
            world.kill_coordinator()
        elif choice == 2:
            world.take_checkpoint()
        elif choice == 3 and world.to_coordinator:
            world.to_coordinator.pop(0)
        elif choice == 4 and world.to_clients:
            world.to_clients.pop(0)
        elif choice >= 5:
            world.ask(choice % 3)
    return calls, keyed, tokens


@settings(
    max_examples=effort(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(MOVES)
def test_each_request_is_done_once(moves: list[tuple[int, int]]) -> None:
    world = World()
    calls, keyed, tokens = play(world, moves)
    if not calls:
        return
    world.settle(calls)
    entries = world.entries
    assert sorted(token for token in entries if token < 1000) == tokens
    assert sorted(token % 10 for token in entries if token >= 1000) == sorted({token % 10 for token in keyed})
    for call in calls:
        assert is_conflict(call.outcome) == (world.made[call][1] not in entries), world.made[call]
    places = [value_of(call.outcome) for call in calls if not is_conflict(call.outcome)]
    assert len(set(entries)) == len(entries)
    assert set(places) == {index + 1 for index in range(len(entries))}
    # The same once more, after a crash of everything: the same entries, and a script's rerun has the same replies.
    named = [call for call in calls if call.client_id == "named"]
    world.kill_coordinator()
    world.open_client(7, "named")
    named.sort(key=lambda call: call.number)
    again = [world.submit(7, *world.made[call]) for call in named]
    last = world.submit(7, "add", 9999)
    world.settle([*again, last])
    assert world.entries == [*entries, 9999]
    replies = {call.number: call.outcome for call in named}
    assert {call.number: call.outcome for call in again} == replies
    # Another script under the same name gets none of them, and does nothing.
    world.open_client(8, "named")
    others = [world.submit(8, "add", 5000 + index) for index in range(len(named))]
    world.settle(others)
    assert all(is_conflict(call.outcome) for call in others)
    assert world.entries == [*entries, 9999]


@settings(
    max_examples=effort(120), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(MOVES)
def test_what_a_query_shows_no_crash_takes_back(moves: list[tuple[int, int]]) -> None:
    """And it shows all that clients have had replies of. The state only grows, so each answer is a beginning of it."""
    world = World()
    calls, _, _ = play(world, moves)
    world.settle(calls)
    world.ask(0)
    world.settle(world.queries)
    shown = []
    for query in world.queries:
        assert isinstance(query.outcome, Reply)
        shown.append(msgspec.msgpack.decode(query.outcome.value))
    assert shown[-1] == world.entries
    assert all(one == shown[-1][: len(one)] for one in shown)


@settings(
    max_examples=effort(20), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(MOVES)
def test_a_call_that_counts_as_started_survives_a_crash_of_all(moves: list[tuple[int, int]]) -> None:
    world = World()
    play(world, moves)
    world.submit(0, "add", 7777, "started")
    question = Question(True, lambda call: None)
    world.connections[0].ask_status(question, "started")
    for turn in range(600):
        world.client_turn(0)
        while world.to_coordinator:
            world.arrive_at_coordinator(0)
        while world.to_clients:
            world.arrive_at_client(0)
        if question.outcome is not None:
            break
        if turn % 3 == 2:  # the disk is the slowest
            world.disk()
            world.app_turn()
        world.now_s += 0.05
    assert question.outcome is REQUEST_ACCEPTED or isinstance(question.outcome, Reply)
    world.kill_coordinator()
    world.connections.clear()
    world.open_client(7, None)
    world.settle([world.submit(7, "add", 9999)])
    assert 7777 in world.entries


@settings(
    max_examples=effort(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(MOVES)
def test_beyond_all_windows_none_is_done_twice(moves: list[tuple[int, int]]) -> None:
    world = World(TINY)
    calls, keyed, _ = play(world, moves)
    if not calls:
        return
    world.settle(calls)
    entries = world.entries
    # Of a key that was forgotten nobody knows, when another one first calls with it: what each has sent is done once.
    for token in set(entries):
        assert entries.count(token) <= len(keyed.get(token, {0})), token
    for call in calls:
        assert isinstance(call.outcome, Reply | ReplyGone | OutcomeUnknown), call.outcome
        if isinstance(call.outcome, Reply) and not is_conflict(call.outcome):
            assert 1 <= value_of(call.outcome) <= len(entries)
