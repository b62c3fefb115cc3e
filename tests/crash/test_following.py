"""A follower beside a live instance, as real processes: it takes over when that is killed, and nothing is lost or done
twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.operator import control
from tests.helpers.counting import CALLS, WAIT_S, House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for run in house.runs:
        run.stop()


def test_a_follower_takes_over_under_load_and_nothing_is_lost_or_done_twice(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    second = house.run("counter", "--follow")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    house.until(lambda: second.said("recovering"), "the follower has a state")
    place = house.registry.load("counter").folder / "followers" / "1"
    house.until(lambda: control.query(place, "status")["phase"] == "following", "it follows")
    before = house.status("counter")["pid"]
    first.kill()
    house.until(lambda: second.said("recovered"), "it takes over")
    assert second.said("taking over")
    house.until(lambda: house.call("feeder", "totals")[:2] == [CALLS, CALLS], "all calls are answered")
    assert house.call("feeder", "totals")[2] == 0
    assert house.call("counter", "totals") == [CALLS, 0]
    status = house.status("counter")
    assert (status["role"], status["pid"] == before) == ("writing", False)
    assert second.stop() == 0


def test_of_two_followers_one_wins_and_the_other_goes_on(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    followers = [house.run("counter", "--follow") for _ in range(2)]
    house.until(lambda: all(one.said("recovering") for one in followers), "both follow")
    house.call("counter", "totals")
    first.kill()
    house.until(lambda: any(one.said("ready") for one in followers), "one takes over")
    winner, other = sorted(followers, key=lambda one: not one.said("ready"))
    assert house.call("counter", "totals") == [0, 0]
    assert not other.said("taking over")
    winner.kill()
    house.until(lambda: other.said("ready"), "the other one takes over in its turn")
    assert house.call("counter", "totals") == [0, 0]
    stopped = house.immortal("stop", "counter")
    assert (stopped.returncode, other.process.wait(WAIT_S)) == (0, 0), stopped.stderr


def test_without_anybody_to_follow_it_is_the_instance_at_once(house: House) -> None:
    alone = house.run("counter", "counting:Counter", "--follow")
    house.until(lambda: alone.said("ready"), "there is no log yet, and nobody who writes one")
    assert not alone.said("following")
    assert house.call("counter", "totals") == [0, 0]
    assert alone.stop() == 0
