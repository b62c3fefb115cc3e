"""OpenLineage events of jobs, received by a real receiver."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from immortal.pipeline.lineage import dataset_name, reported
from immortal.protocol.command_line import FailedError


class Receiver(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[dict[str, Any]] = []
        self.status = 201


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


def test_a_run_has_a_start_and_an_end_with_what_it_read_and_wrote(receiver: Receiver, tmp_path: Path) -> None:
    with reported("export", ["/srv/shop/log", "s3://backups/immortal#stock"], [str(tmp_path)]):
        pass
    first, last = receiver.events
    assert (first["eventType"], last["eventType"]) == ("START", "COMPLETE")
    assert first["run"]["runId"] == last["run"]["runId"]
    assert last["job"]["name"] == "immortal pipeline export"
    inputs = [(one["namespace"], one["name"]) for one in last["inputs"]]
    assert inputs == [("file", "/srv/shop/log"), ("s3://backups", "immortal#stock")]
    assert [one["name"] for one in last["outputs"]] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("error", "state"), [(OSError("no room"), "FAIL"), (KeyboardInterrupt(), "ABORT"), (SystemExit(3), "COMPLETE")]
)
def test_the_end_says_how_it_ended(receiver: Receiver, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), reported("audit", [], []):
        raise error
    last = receiver.events[-1]
    assert last["eventType"] == state
    said = last["run"]["facets"].get("errorMessage", {}).get("message")
    assert said == (None if state == "COMPLETE" else str(error))


def test_a_receiver_that_fails_does_not_fail_the_job(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    receiver.status = 400
    with reported("audit", [], []):
        pass
    assert capsys.readouterr().err.count("OpenLineage's receiver did not take an event") == 1


def test_settings_that_are_wrong_are_refused_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "nonsense")
    with pytest.raises(FailedError, match=r"does not take its settings: .*nonsense"), reported("audit", [], []):
        pytest.fail("the job ran")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("postgresql://auditor@db.example/immortal#shop", ("postgres://db.example", "immortal#shop")),
        ("file:///srv/archive", ("file", "/srv/archive")),
        ("gs://bucket", ("gs://bucket", "/")),
    ],
)
def test_names_follow_the_specification_and_have_no_user(source: str, name: tuple[str, str]) -> None:
    assert dataset_name(source) == name
