"""The metrics of a status, as Prometheus reads them."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from immortal.coordinator.notices.metrics_server import MetricsError
from immortal.coordinator.operator.control import NotRunningError
from tests.helpers.notices import serve_status

STATUS: dict[str, Any] = {
    "name": "counter",
    "phase": "normal",
    "epoch": 4,
    "version": 2,
    "sequence_id": 99,
    "backlog_records": 3,
    "unsent_bytes": 10,
    "app_connected": True,
    "app_silent_s": 1.5,
    "commit_ms": 0.5,
    "checkpoint": {"id": 7, "sequence_id": 90, "size_bytes": 1234, "age_s": 60.0},
    "inputs": {"reader": {"position": 500, "window_bytes": 65536}},
    "outputs": {
        "feeder": {
            "position": 20,
            "acknowledged": 18,
            "waiting_bytes": 77,
            "memory_bytes": 70,
            "spilled_bytes": 7,
            "window_bytes": 4096,
            "connected": False,
            "error": "'feeder' was committer 1 and is 2 now",
        }
    },
    "verdicts": {"undone": 7, "killed": 0},
    "forbidden": {"web": 3},
    "held_back": {"web": 4},
    "open_calls": {"reader": 2},
    "letters": {"count": 2, "bytes": 300, "lost": 1},
    "suspect": {"record": 12, "message": None, "runs": 2},
    "handling": {"method": "Orders.place", "for_s": 12.5, "record": 12, "message": 0, "caller": None},
    "app_paused": True,
    "held_up_for": ["feeder"],
    "log": {"used_bytes": 5000, "limit_bytes": None, "free_bytes": 10_000, "full": None},
}


LABELS = ("peer", "caller", "kind")


def scraped(url: str) -> dict[tuple[str, str], float]:
    """Value by metric and peer, caller or kind."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["instance_name"] for sample in samples} == {"counter"}
    return {
        (one.name, next((one.labels[key] for key in LABELS if key in one.labels), "")): one.value for one in samples
    }


def test_what_is_served() -> None:
    assert scraped(serve_status("127.0.0.1:*", lambda: STATUS)) == {
        ("immortal_up", ""): 1,
        ("immortal_phase_info", ""): 1,
        ("immortal_app_connected", ""): 1,
        ("immortal_version", ""): 2,
        ("immortal_epoch", ""): 4,
        ("immortal_log_records", ""): 100,
        ("immortal_backlog_records", ""): 3,
        ("immortal_app_unsent_bytes", ""): 10,
        ("immortal_app_silent_seconds", ""): 1.5,
        ("immortal_commit_seconds", ""): 0.0005,
        ("immortal_checkpoint_age_seconds", ""): 60,
        ("immortal_checkpoint_size_bytes", ""): 1234,
        ("immortal_dead_letters", ""): 2,
        ("immortal_dead_letters_bytes", ""): 300,
        ("immortal_dead_letters_lost_total", ""): 1,
        ("immortal_suspect_runs", ""): 2,
        ("immortal_handling_seconds", ""): 12.5,
        ("immortal_verdicts_total", "undone"): 7,
        ("immortal_verdicts_total", "killed"): 0,
        ("immortal_refused_calls_total", "web"): 3,
        ("immortal_held_back_total", "web"): 4,
        ("immortal_open_calls", "reader"): 2,
        ("immortal_received_messages_total", "reader"): 500,
        ("immortal_sent_messages_total", "feeder"): 20,
        ("immortal_acknowledged_messages_total", "feeder"): 18,
        ("immortal_waiting_bytes", "feeder"): 77,
        ("immortal_memory_bytes", "feeder"): 70,
        ("immortal_spilled_bytes", "feeder"): 7,
        ("immortal_window_bytes", "feeder"): 4096,
        ("immortal_granted_window_bytes", "reader"): 65536,
        ("immortal_held_up", "feeder"): 1,
        ("immortal_app_paused", ""): 1,
        ("immortal_log_used_bytes", ""): 5000,
        ("immortal_log_disk_free_bytes", ""): 10_000,
        ("immortal_log_full", ""): 0,
        ("immortal_checkpoints_failed", ""): 0,
        ("immortal_unsaved_seconds", ""): 0,
        ("immortal_peer_connected", "feeder"): 0,
        ("immortal_stream_stopped", "feeder"): 1,
    }


def test_a_coordinator_that_does_not_answer_is_down() -> None:
    def ask() -> dict[str, Any]:
        raise NotRunningError("it does not run")

    assert scraped(serve_status("127.0.0.1:*", ask)) == {("immortal_up", ""): 0}


@pytest.mark.parametrize("address", ["9400", "127.0.0.1", "localhost:port", ""])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(MetricsError, match="expected HOST:PORT"):
        serve_status(address, dict)


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsError, match="can't serve the metrics of 'counter' at"):
            serve_status(f"127.0.0.1:{port}", dict)
