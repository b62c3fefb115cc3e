"""A coordinator that serves metrics observes what takes how long."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.processes import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


def scraped(url: str) -> dict[str, float]:
    """Values by name; of notices by theirs."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.labels.get("notice", one.name): one.value for one in samples if "le" not in one.labels}


def test_a_coordinator_observes_what_takes_how_long(house: House) -> None:
    house.register("alice", metrics="127.0.0.1:*")
    process, app = house.both("alice")
    url = process.line("metrics are served").partition("at=")[2]
    for number in range(3):
        app.impulse(number)
        app.until(lambda number=number: number in app.state["forwarded"])  # type: ignore[misc]
    first = scraped(url)
    assert first["CheckpointTaken"] == first["immortal_checkpoint_duration_seconds_count"] == 1
    assert first["Recovered"] == first["StreamStopped"] == 0  # a series that begins at 1 has no increase
    assert first["immortal_commit_duration_seconds_count"] >= 4
    assert first["immortal_sync_duration_seconds_count"] >= 4
    assert first["immortal_sync_duration_seconds_sum"] > 0
    assert first["immortal_commit_duration_seconds_sum"] > 0
    app.close()
    house.app("alice").ready()
    process.line("recovered")
    process.until(lambda status: scraped(url)["immortal_checkpoint_duration_seconds_count"] == 2)
    again = scraped(url)
    assert again["Recovered"] == again["immortal_recovery_duration_seconds_count"] == 1
    assert again["immortal_recovery_duration_seconds_sum"] > 0
    assert again["AppGone"] == 1
