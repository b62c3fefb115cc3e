"""The histogram of the wait until execution, of a real app that falls behind."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from immortal.client import connect
from tests.helpers.cli import HOME, Run, immortal

DEADLINE_S = 40.0
LOOK_S = 0.1
SERVICE = """
import time

from immortal import Immortal, rpc


class Worker(Immortal):
    done: int

    def __init__(self) -> None:
        self.done = 0

    @rpc
    def work(self) -> None:
        time.sleep(0.1)  # what takes long
        self.done += 1
"""


def test_it_says_how_far_the_app_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    (tmp_path / "service.py").write_text(SERVICE)
    immortal(tmp_path, "register", "worker", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "worker", "service:Worker", "--metrics", "127.0.0.1:*")
    try:
        url = run.line("metrics are served").partition("at=")[2].strip()
        run.line("ready")

        def samples(beyond_s: float = 0.0) -> float:
            """How many waited for longer."""
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                text = answer.read().decode()
            families = {family.name: family.samples for family in text_string_to_metric_families(text)}
            buckets = [one for one in families["immortal_execution_wait_seconds"] if one.name.endswith("_bucket")]
            up_to = {float(one.labels["le"]): one.value for one in buckets}
            below = max([value for bound, value in up_to.items() if bound <= beyond_s], default=0.0)
            return up_to[float("inf")] - below

        def timed(what: str) -> float:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                text = answer.read().decode()
            return sum(
                one.value
                for family in text_string_to_metric_families(text)
                for one in family.samples
                if one.name == f"immortal_handler_seconds_{what}" and one.labels["method"] == "Worker.work"
            )

        until(lambda: samples() >= 1)
        with connect("worker") as worker:
            for _ in range(30):
                worker.work.fork()
            until(lambda: samples(beyond_s=0.25) >= 1)
            for _ in range(5):
                worker.work()
            until(lambda: timed("count") >= 1)
            assert timed("sum") / timed("count") >= 0.1
        assert run.stop() == 0
    finally:
        run.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(LOOK_S)
