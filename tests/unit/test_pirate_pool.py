"""The pool's rules, one by one: it has no socket and no clock, so each is said and looked at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from immortal.appsdk.patterns.pirate.pool import Action, AttemptHistory, GiveUp, Ping, Policy, Pool, Send, State, Why

POLICY = Policy(tries=3, try_timeout_s=2.0, heartbeat_s=1.0, silence_s=2.5, removal_s=60.0)
STORE = b"one store"


def live(*names: str, domain: bytes = STORE) -> Pool:
    """A pool at time 0 whose servers have all said a word."""
    pool = Pool(names, POLICY, 0.0)
    pool.actions(0.0)
    for name in names:
        pool.ponged(name, domain, 0.0, 0.0)
    return pool


def sends(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(action.server, action.number) for action in actions if isinstance(action, Send)]


def pings(actions: Sequence[Action]) -> list[str]:
    return [action.server for action in actions if isinstance(action, Ping)]


def given_up(actions: Sequence[Action]) -> list[GiveUp]:
    return [action for action in actions if isinstance(action, GiveUp)]


# --- whom a request goes to -------------------------------------------------------------------------------------------


def test_a_server_gets_nothing_before_a_word_of_it() -> None:
    pool = Pool(["a", "b"], POLICY, 0.0)
    pool.submit(1, 30.0)
    assert pool.actions(0.0) == [Ping("a"), Ping("b")]
    pool.ponged("b", STORE, 0.0, 0.1)
    assert sends(pool.actions(0.1)) == [("b", 1)]


def test_the_least_recently_used_is_next() -> None:
    pool = live("a", "b", "c")
    order = []
    for number in range(1, 7):
        pool.submit(number, 30.0)
        ((server, _),) = sends(pool.actions(0.0))
        order.append(server)
        assert pool.replied(server, number, 0.0)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_server_has_one_request_at_a_time_and_the_others_wait_in_order() -> None:
    pool = live("a", "b")
    for number in (1, 2, 3, 4):
        pool.submit(number, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1), ("b", 2)]
    assert pool.replied("b", 2, 0.5)
    assert sends(pool.actions(0.5)) == [("b", 3)]


# --- tries ------------------------------------------------------------------------------------------------------------


def test_the_only_server_is_tried_so_often_and_only_while_it_says_something() -> None:
    pool = live("a")
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    assert sends(pool.actions(2.0)) == []  # timed out: it is asked for a word first
    assert pool.servers == {"a": State.DEAD}
    pool.ponged("a", STORE, 0.0, 2.1)
    assert sends(pool.actions(2.1)) == [("a", 1)]
    pool.actions(4.2)
    pool.ponged("a", STORE, 0.0, 4.3)
    assert sends(pool.actions(4.3)) == [("a", 1)]
    (end,) = given_up(pool.actions(6.4))
    assert end == GiveUp(1, Why.TRIES, {"a": 3}, AttemptHistory(STORE, ("a",)))


def test_of_several_each_is_tried_once() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    assert sends(pool.actions(2.0)) == [("b", 1)]
    pool.ponged("a", STORE, 0.0, 2.1)  # it is back, and was tried
    assert sends(pool.actions(2.1)) == []
    (end,) = given_up(pool.actions(4.0))
    assert (end.why, end.tries) == (Why.TRIES, {"a": 1, "b": 1})


def test_a_dead_server_that_was_not_tried_is_waited_for() -> None:
    pool = live("a", "b")
    pool.lost("b", 0.0)
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    assert given_up(pool.actions(2.0)) == []
    pool.ponged("b", STORE, 0.0, 20.0)
    assert sends(pool.actions(20.0)) == [("b", 1)]


def test_its_time_ends_it_whoever_has_it() -> None:
    pool = live("a")
    pool.submit(1, 1.5)
    pool.actions(0.0)
    assert pool.next_deadline_s() == 1.5
    (end,) = given_up(pool.actions(1.5))
    assert (end.why, end.trail.asked) == (Why.TIME, ("a",))
    pool.submit(2, 30.0)
    assert sends(pool.actions(1.5)) == [("a", 2)]


def test_the_only_one_that_may_have_it_is_not_given_up_while_words_of_it_come() -> None:
    """An instance is asked about its call, and says that it has it: its handler may take long."""
    pool = live("a")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    for second in range(1, 20):
        pool.ponged("a", STORE, 0.0, float(second))
        assert pool.actions(float(second)) == []
    assert pool.next_deadline_s() == 20.0
    pool.actions(20.0)  # a word was heard at 19
    assert pool.servers == {"a": State.LIVE}
    pool.actions(22.0)
    assert pool.servers == {"a": State.DEAD}


def test_where_another_may_have_it_words_are_not_enough() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0, idempotent=True)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    pool.ponged("a", STORE, 0.0, 1.0)
    assert sends(pool.actions(2.0)) == [("b", 1)]


def test_a_broken_connection_sends_it_on_at_once() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    pool.lost("a", 0.1)
    assert sends(pool.actions(0.1)) == [("b", 1)]


def test_who_has_no_room_was_not_tried() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    pool.turned_away("a", 1, 0.0)
    assert sends(pool.actions(0.0)) == [("b", 1)]
    pool.turned_away("b", 1, 0.0)
    assert sends(pool.actions(0.05)) == []
    assert sends(pool.actions(pool.next_deadline_s())) == [("a", 1)]
    assert pool.servers == {"a": State.LIVE, "b": State.LIVE}


# --- servers that die, and come back ----------------------------------------------------------------------------------


def test_nothing_is_sent_to_a_dead_one_until_a_word_of_it() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    pool.actions(2.0)  # a has timed out, b has it
    assert pool.replied("b", 1, 2.1)
    for number in (2, 3):
        pool.submit(number, 30.0)
    assert sends(pool.actions(2.2)) == [("b", 2)]
    pool.ponged("a", STORE, 0.0, 2.3)
    assert sends(pool.actions(2.3)) == [("a", 3)]


def test_only_who_has_nothing_to_do_is_pinged() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    assert pings(pool.actions(0.0)) == []
    assert pings(pool.actions(1.0)) == ["b"]
    pool.replied("a", 1, 1.1)
    assert pings(pool.actions(2.0)) == ["b"]
    assert pings(pool.actions(2.1)) == ["a"]  # a word is as good as an answer to a ping


def test_silence_kills() -> None:
    pool = live("a")
    assert pings(pool.actions(1.0)) == ["a"]
    pool.actions(2.0)
    pool.actions(3.0)
    assert pool.servers == {"a": State.LIVE}
    pool.actions(3.5)
    assert pool.servers == {"a": State.DEAD}


def test_who_is_silent_for_long_is_waited_for_no_more_but_pinged() -> None:
    pool = live("a", "b")
    pool.submit(1, 300.0)
    pool.lost("b", 0.0)
    pool.actions(0.0)
    pool.actions(2.0)
    pool.ponged("a", STORE, 0.0, 59.9)
    assert given_up(pool.actions(59.9)) == []
    actions = pool.actions(60.0)
    assert pool.servers["b"] is State.REMOVED
    assert sends(actions) == [("a", 1)]  # the only one by now, so it is tried again
    assert pings(pool.actions(60.9)) == ["b"]
    pool.ponged("b", STORE, 0.0, 61.0)
    assert pool.servers["b"] is State.LIVE


def test_with_all_removed_a_request_fails_at_once() -> None:
    pool = Pool(["a"], POLICY, 0.0)
    pool.actions(60.0)
    pool.submit(1, 300.0)
    (end,) = given_up(pool.actions(61.0))
    assert (end.why, end.trail) == (Why.NOBODY, AttemptHistory())


def test_who_answers_and_gets_nothing_done_is_not_readmitted() -> None:
    pool = live("a", "b")
    pool.ponged("a", STORE, 2.0, 0.5)
    assert pool.servers["a"] is State.DEAD
    pool.ponged("a", STORE, 0.1, 1.5)
    assert pool.servers["a"] is State.LIVE


def test_servers_come_and_go() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    pool.update(["b", "c"], 0.1)
    assert sends(pool.actions(0.1)) == [("b", 1)]
    assert list(pool.servers) == ["b", "c"]
    assert not pool.replied("a", 1, 0.2)
    pool.update([], 0.3)
    (end,) = given_up(pool.actions(0.3))
    assert end.number == 1


# --- who may have it next ---------------------------------------------------------------------------------------------


def test_a_request_that_was_begun_stays_where_its_reply_is_found() -> None:
    pool = live("a")
    pool.update(["a", "b"], 0.0)
    pool.ponged("b", b"another store", 0.0, 0.0)
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    pool.lost("a", 0.1)
    assert sends(pool.actions(0.1)) == []
    pool.ponged("a", STORE, 0.0, 5.0)
    assert sends(pool.actions(5.0)) == [("a", 1)]


def test_an_idempotent_one_goes_anywhere() -> None:
    pool = live("a")
    pool.update(["a", "b"], 0.0)
    pool.ponged("b", b"another store", 0.0, 0.0)
    pool.submit(1, 30.0, idempotent=True)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    pool.lost("a", 0.1)
    assert sends(pool.actions(0.1)) == [("b", 1)]


@pytest.mark.parametrize("how", ["unsent", "turned_away"])
def test_one_that_was_not_begun_goes_anywhere(how: str) -> None:
    pool = live("a")
    pool.update(["a", "b"], 0.0)
    pool.ponged("b", b"another store", 0.0, 0.0)
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    getattr(pool, how)("a", 1, 0.1)
    assert sends(pool.actions(0.1)) == [("b", 1)]


def test_one_that_was_given_up_goes_on_where_it_may_have_been_begun() -> None:
    pool = live("a")
    pool.update(["a", "b"], 0.0)
    pool.ponged("b", b"another store", 0.0, 0.0)
    pool.submit(1, 1.0)
    pool.actions(0.0)
    (end,) = given_up(pool.actions(1.0))
    pool.submit(1, 30.0, trail=end.trail)
    assert pool.replied("a", 1, 1.1), "a reply to its first life"
    pool.submit(2, 2.0)
    assert sends(pool.actions(1.2)) == [("b", 2)]
    (end,) = given_up(pool.actions(2.0))
    pool.lost("b", 2.0)
    pool.submit(2, 30.0, trail=end.trail)
    assert sends(pool.actions(2.1)) == []  # a has another store


def test_the_deadline_of_its_first_life_is_not_that_of_its_second() -> None:
    pool = Pool([], POLICY, 0.0)
    pool.submit(1, 10.0)
    (end,) = given_up(pool.actions(0.0))
    pool.update(["a"], 1.0)
    pool.submit(1, 30.0, trail=end.trail)
    assert given_up(pool.actions(10.0)) == []
    assert len(given_up(pool.actions(30.0))) == 1


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_late_reply_counts_and_frees_who_has_it_now() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    assert sends(pool.actions(2.0)) == [("b", 1)]
    assert pool.replied("a", 1, 2.1)
    assert pool.servers == {"a": State.LIVE, "b": State.LIVE}
    pool.submit(2, 30.0)
    pool.submit(3, 30.0)
    assert sends(pool.actions(2.1)) == [("a", 2), ("b", 3)]
    assert not pool.replied("b", 1, 2.2), "it was replied to before"


def test_a_reply_of_who_was_not_asked_is_none() -> None:
    pool = live("a", "b")
    pool.submit(1, 30.0)
    assert sends(pool.actions(0.0)) == [("a", 1)]
    assert not pool.replied("b", 1, 0.1)
    assert not pool.replied("c", 1, 0.1)
    assert pool.replied("a", 1, 0.1)


def test_a_request_that_nobody_wants_any_more_leaves_its_server_free() -> None:
    pool = live("a")
    pool.submit(1, 30.0)
    pool.actions(0.0)
    pool.withdraw(1)
    pool.submit(2, 30.0)
    assert sends(pool.actions(0.1)) == [("a", 2)]


@pytest.mark.parametrize(
    ("wrong", "text"), [({"tries": 0}, "at least 1"), ({"heartbeat_s": 0.0}, "more than 0"), ({"silence_s": -1.0}, "0")]
)
def test_a_policy_that_makes_no_sense(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Policy(**wrong)  # type: ignore[arg-type]
