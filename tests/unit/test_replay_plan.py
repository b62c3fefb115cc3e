"""Which checkpoint a replay begins at, and which upgrades lie on its way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from immortal.coordinator.core.errors import DamagedCheckpointError
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, VersionStart
from immortal.log import LogIdentity
from immortal.replay import ReplayError, ReplayPlan, Route, plan_route
from immortal.replay.app_process import default_app


class Source:
    """A log's answers: checkpoints 1 (before record 0), 2 (after 10), 3 (after 20); the last record is 30."""

    def __init__(self, *, damaged: set[int] | None = None, first_sequence_id: int = 0) -> None:
        self.identity = LogIdentity(2, "counter", 7, 0)
        self.problems: list[str] = []
        self.damaged = damaged or set()
        self.versions: list[VersionStart] = [VersionStart(1, -1, "counter:Counter")]
        self.headers = [
            CheckpointHeader(checkpoint_id, sequence_id, 0, 0, 0)
            for checkpoint_id, sequence_id in ((1, -1), (2, 10), (3, 20))
        ]
        self.first_sequence_id = first_sequence_id
        self.extensions: frozenset[int] | None = frozenset()

    def summary(self) -> LogSummary:
        return LogSummary(
            7, 1, self.first_sequence_id, 30, self.headers, {}, {}, {}, [], self.extensions, versions=self.versions
        )

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        raise AssertionError("no record is needed to plan")

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        if checkpoint_id in self.damaged:
            raise DamagedCheckpointError(f"chunk 0 of checkpoint {checkpoint_id} is damaged", checkpoint_id)
        return iter(())

    def route(self, plan: ReplayPlan) -> Route:
        return plan_route(plan, self, self.summary())


@pytest.mark.parametrize(
    ("plan", "checkpoint_id", "last"),
    [
        (ReplayPlan(), 3, 30),
        (ReplayPlan(last_sequence_id=25), 3, 25),
        (ReplayPlan(last_sequence_id=20), 3, 20),
        (ReplayPlan(last_sequence_id=20, last_message=0), 2, 20),
        (ReplayPlan(last_sequence_id=20, before_last=True), 2, 20),
        (ReplayPlan(last_sequence_id=19), 2, 19),
        (ReplayPlan(last_sequence_id=0), 1, 0),
        (ReplayPlan(checkpoint_id=1), 1, 30),
        (ReplayPlan(checkpoint_id=2, last_sequence_id=10), 2, 10),
        (ReplayPlan(follow=True), 3, None),
        (ReplayPlan(last_sequence_id=99, follow=True), 3, 99),
    ],
)
def test_the_newest_checkpoint_from_which_the_end_can_be_reached(
    plan: ReplayPlan, checkpoint_id: int, last: int | None
) -> None:
    route = Source().route(plan)
    assert (route.checkpoint.checkpoint_id, route.last_sequence_id) == (checkpoint_id, last)
    assert not route.notes


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ReplayPlan(last_sequence_id=31), "record 31 is not in the log: its last one is 30"),
        (
            ReplayPlan(checkpoint_id=4),
            "there is no checkpoint 4 in the log to begin at; it holds 1 (before record 0), 2",
        ),
        (ReplayPlan(checkpoint_id=3, last_sequence_id=15), "checkpoint 3 was taken after record 20"),
        (ReplayPlan(checkpoint_id=3, last_sequence_id=20, last_message=1), "checkpoint 3 was taken after record 20"),
    ],
)
def test_what_the_log_cannot_do_is_said(plan: ReplayPlan, said: str) -> None:
    with pytest.raises(ReplayError) as raised:
        Source().route(plan)
    assert said in str(raised.value)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_that_is_said() -> None:
    route = Source(damaged={3}).route(ReplayPlan())
    assert route.checkpoint.checkpoint_id == 2
    assert route.notes == ["checkpoint 3 is left out: chunk 0 of checkpoint 3 is damaged"]


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error() -> None:
    with pytest.raises(ReplayError, match="checkpoint 3 can't be used: chunk 0 of checkpoint 3 is damaged"):
        Source(damaged={3}).route(ReplayPlan(checkpoint_id=3))


def test_without_a_sound_checkpoint_nothing_can_be_replayed() -> None:
    with pytest.raises(ReplayError, match="no sound checkpoint"):
        Source(damaged={1, 2, 3}).route(ReplayPlan())


def test_what_was_trimmed_away_is_named() -> None:
    source = Source(first_sequence_id=11)
    with pytest.raises(ReplayError, match="the oldest one is 2, taken after record 10"):
        source.route(ReplayPlan(last_sequence_id=5))


def test_a_log_without_a_first_start_is_empty() -> None:
    source = Source()
    source.extensions = None
    with pytest.raises(ReplayError, match="never completed its first start"):
        source.route(ReplayPlan())


def versions(source: Source, plan: ReplayPlan) -> list[int]:
    return [start.version for start in source.route(plan).versions]


def test_upgrades_on_the_way_are_repeated_in_their_order() -> None:
    source = Source()
    source.versions += [VersionStart(2, 12), VersionStart(3, 15)]
    assert versions(source, ReplayPlan(checkpoint_id=2)) == [2, 3]
    assert versions(source, ReplayPlan(checkpoint_id=2, last_sequence_id=15)) == [2]
    assert versions(source, ReplayPlan(checkpoint_id=2, last_sequence_id=15, last_version=3)) == [2, 3]
    assert versions(source, ReplayPlan(checkpoint_id=2, last_sequence_id=12)) == []
    assert versions(source, ReplayPlan(checkpoint_id=2, follow=True)) == [2, 3]
    assert versions(source, ReplayPlan(checkpoint_id=2, upgrade_to=3)) == []


def test_a_checkpoint_that_an_upgrade_made_has_it_behind_itself() -> None:
    source = Source()
    source.headers[2] = CheckpointHeader(3, 20, 0, 0, 0, version=2)
    source.versions += [VersionStart(2, 20)]
    assert versions(source, ReplayPlan()) == []
    assert versions(source, ReplayPlan(checkpoint_id=2)) == [2]
    assert source.route(ReplayPlan(checkpoint_id=2)).last_version == 2


def test_an_upgrade_right_behind_a_checkpoint_of_the_old_version_is_on_the_way() -> None:
    source = Source()
    source.versions += [VersionStart(2, 20)]
    assert versions(source, ReplayPlan(checkpoint_id=3)) == [2]


def test_the_state_at_a_record_is_that_of_the_version_that_handled_it() -> None:
    source = Source()
    source.headers[2] = CheckpointHeader(3, 20, 0, 0, 0, version=2)
    source.versions += [VersionStart(2, 20), VersionStart(3, 30)]
    assert source.route(ReplayPlan(last_sequence_id=20)).checkpoint.checkpoint_id == 2
    assert source.route(ReplayPlan(last_sequence_id=20, last_version=2)).checkpoint.checkpoint_id == 3
    assert versions(source, ReplayPlan(last_sequence_id=30)) == []
    assert versions(source, ReplayPlan()) == [3]
    source.headers[:2] = []
    source.first_sequence_id = 21
    assert source.route(ReplayPlan(last_sequence_id=20)).checkpoint.checkpoint_id == 3  # all that is kept


def test_a_version_may_come_back() -> None:
    source = Source()
    source.headers[2] = CheckpointHeader(3, 20, 0, 0, 0, version=1)
    source.versions += [VersionStart(2, 15), VersionStart(1, 20)]
    assert versions(source, ReplayPlan(checkpoint_id=3)) == []
    assert versions(source, ReplayPlan(checkpoint_id=2, last_sequence_id=20)) == [2]
    assert versions(source, ReplayPlan(checkpoint_id=2, last_sequence_id=20, last_version=1)) == [2, 1]


def test_the_app_is_the_registered_one_for_the_newest_version_and_the_logged_one_for_others() -> None:
    source = Source()
    source.versions += [VersionStart(2, 12, "counter2:Counter")]
    summary = source.summary()
    assert default_app("counter", "today:Counter", summary, 2) == "today:Counter"
    assert default_app("counter", "today:Counter", summary, 1) == "counter:Counter"
    assert default_app("counter", None, summary, 2) == "counter2:Counter"
    source.versions[0] = VersionStart(1, -1, "__main__:Counter")
    assert default_app("counter", "today:Counter", source.summary(), 1) == "today:Counter"
    source.versions[:] = []
    assert default_app("counter", "today:Counter", source.summary(), 1) == "today:Counter"
    with pytest.raises(ReplayError, match="give it with --app"):
        default_app("counter", None, source.summary(), 1)
