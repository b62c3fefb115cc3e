"""Hostile structures through every door of running instances: as much of the campaign as CI has time for."""

from __future__ import annotations

from tests.fuzz.campaign import Campaign
from tests.helpers.effort import effort

MESSAGES = effort(4_000)


def test_instances_are_there_at_the_end_and_know_who_sent_what() -> None:
    campaign = Campaign(seed=7)
    campaign.run(MESSAGES)
    assert campaign.sent.total() >= MESSAGES
    assert len(campaign.sent) == 9, "all doors"
