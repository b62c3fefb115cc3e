"""`immortal trace export`: what viewers are given fits together, and is the same each time."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.replay.trace import exporters
from tests.helpers.cli import DEADLINE_S, HOME, Run, command_line, immortal
from tests.helpers.fleet import flip_byte
from tests.helpers.sight_fleet import make_fleet

WORDS = ["the", "cat", "the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    make_fleet(folder, WORDS)
    return folder


def perfetto(folder: Path, name: str, *options: str) -> dict[str, Any]:
    immortal(folder, "trace", "export", *options, "--perfetto", name)
    file = folder / name
    read: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()) if name.endswith("gz") else file.read_bytes())
    return read


def otlp(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """The spans, each with the "service" of its resource."""
    immortal(folder, "trace", "export", *options, "--otlp", name)
    found = [span for line in (folder / name).read_text().splitlines() for span in spans_of(json.loads(line))]
    return sorted(found, key=lambda span: span["spanId"])


def spans_of(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for one in request["resourceSpans"]:
        (name,) = one["resource"]["attributes"]
        assert name["key"] == "service.name"
        for scope in one["scopeSpans"]:
            for span in scope["spans"]:
                yield {**span, "service": name["value"]["stringValue"]}


def attribute(span: dict[str, Any], name: str) -> Any:
    (value,) = [one["value"] for one in span["attributes"] if one["key"] == f"immortal.{name}"]
    return int(value["intValue"]) if "intValue" in value else value["stringValue"]


def test_perfetto_has_a_slice_for_each_message_and_an_arrow_to_it(folder: Path) -> None:
    events = perfetto(folder, "arrows.json", "reader", "counter")["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    handled = Counter((processes[e["pid"]], e["name"]) for e in slices if lanes[e["pid"], e["tid"]] == "handled")
    assert handled["counter", "Counter.count"] == handled["reader", "answer of Counter.count"] == len(WORDS)
    assert handled["reader", "Reader.line"] == len(WORDS)

    def enclosing(arrow: dict[str, Any]) -> list[dict[str, Any]]:
        place = arrow["pid"], arrow["tid"]
        return [e for e in slices if (e["pid"], e["tid"]) == place and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]]

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == handled.total()
    assert starts.keys() == ends.keys()
    for name, start in starts.items():
        assert start["ts"] <= ends[name]["ts"]
        assert enclosing(start)
        assert enclosing(ends[name])
    (call,) = [e for e in slices if e["name"] == "Counter.count" and e["args"]["position"] == 1]
    place = f"counter/{call['args']['record']}:{call['args']['message']}"
    assert processes[starts[place]["pid"]] == "reader"
    assert lanes[starts[place]["pid"], starts[place]["tid"]] == "to counter"


def test_bars_begin_and_end(folder: Path) -> None:
    events = perfetto(folder, "bars.json.gz", "reader", "counter")["traceEvents"]
    begun = {(e["cat"], e["id"]): e for e in events if e["ph"] == "b"}
    ended = {(e["cat"], e["id"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(begun[key]["ts"] < ended[key]["ts"] for key in begun)
    assert [e["name"] for (category, _), e in begun.items() if category == "waited for"] == ["Counter.count"] * 3


def test_a_call_leads_to_its_handler_and_causes_to_their_effects(folder: Path) -> None:
    spans = {span["spanId"]: span for span in otlp(folder, "causes.jsonl", "reader", "counter", "--causes")}
    for note in [span for span in spans.values() if span["name"] == "Counter.note"]:
        way = []
        span = note
        while True:
            way.append((span["service"], span["name"]))
            if "parentSpanId" not in span:
                break
            assert spans[span["parentSpanId"]]["traceId"] == note["traceId"]
            span = spans[span["parentSpanId"]]
        assert way == [
            ("counter", "Counter.note"),
            ("reader", "call Counter.note"),
            ("reader", "answer of Counter.count"),
            ("counter", "answer of Counter.count on its way"),
            ("counter", "Counter.count"),
            ("reader", "call Counter.count"),
            ("reader", "Reader.line"),
            ("outside", "call Reader.line"),
        ]
    lines = [span["traceId"] for span in spans.values() if span["name"] == "Reader.line"]
    assert len(set(lines)) == len(WORDS)
    waited = [span for span in spans.values() if span["name"] == "Counter.count"]
    assert all(int(span["endTimeUnixNano"]) > int(span["startTimeUnixNano"]) for span in waited)


SHOP = """
from datetime import timedelta

import immortal
from immortal import Immortal, rpc


def charge(cents: int) -> str:
    return f"receipt {cents}"


class Shop(Immortal):
    receipts: list[str]

    def __init__(self) -> None:
        self.receipts = []

    @rpc
    async def buy(self, cents: int) -> None:
        await immortal.sleep(timedelta(milliseconds=30))
        await immortal.step(self.note, await immortal.effect(charge, cents))

    @rpc
    def note(self, receipt: str) -> None:
        self.receipts.append(receipt)
        self.noted.fork(receipt)

    @rpc
    def noted(self, receipt: str) -> None:
        pass
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two customers have bought; the instance has stopped."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(SHOP)
    immortal(folder, "register", "shop", "--peer", "tcp://127.0.0.1:*", "--app", "shop:Shop")
    run = Run(folder, "shop")
    try:
        run.line("ready")
        for cents in ("5", "6"):
            immortal(folder, "call", "shop", "buy", cents)
        immortal(folder, "stop", "shop")
    finally:
        run.kill()
    return folder


def test_effects_and_timers_have_spans_with_the_handler_that_began_them(shop: Path) -> None:
    found = otlp(shop, "waits.jsonl", "shop", "--causes")
    assert otlp(shop, "again.jsonl", "shop", "--causes") == found
    spans = {span["spanId"]: span for span in found}
    assert len(spans) == len(found)
    buys = {span["spanId"]: span["traceId"] for span in found if span["name"] == "Shop.buy"}
    assert len(buys) == len(set(buys.values())) == 2
    for name in ("timer", "effect charge"):
        some = [span for span in found if span["name"] == name]
        assert {span["parentSpanId"]: span["traceId"] for span in some} == buys
        for span in some:
            assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"])
            assert attribute(span, "began_record") < attribute(span, "record")
            if name != "timer":
                assert attribute(span, "effect").startswith("charge(cents=")
            assert attribute(span, "moment") == f"/i/shop/travel?at={attribute(span, 'record')}:0"
    timers = [span for span in found if span["name"] == "timer"]
    assert all(int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) >= 30_000_000 for span in timers)
    noted = [span for span in found if span["name"] == "Shop.noted"]
    assert {span["traceId"] for span in noted} == set(buys.values())  # what came of the effect is in the trace
    assert not any(span["name"] in ("timer", "effect charge") for span in otlp(shop, "plain.jsonl", "shop"))
    first, second = sorted(timers, key=lambda span: attribute(span, "record"))
    begins = str(attribute(first, "record") + 1)
    later = {span["spanId"] for span in otlp(shop, "later.jsonl", "shop", "--causes", "--from", begins)}
    assert second["spanId"] in later
    assert first["spanId"] not in later


def test_a_collector_is_sent_effects_and_timers(shop: Path) -> None:
    expected = otlp(shop, "expected.jsonl", "shop", "--causes")
    options = ("--from", "2000-01-01", "--causes")
    with Collector(200) as collector:
        command = command_line("trace", "follow", "shop", "--otlp", collector.url, *options)
        with subprocess.Popen(command, cwd=shop) as following:
            # no log has the answers that clients got, so those handlers are sent as it ends
            collector.wait_for(lambda spans: len(spans) == len(expected) - 2)
            following.send_signal(signal.SIGTERM)
        assert following.returncode == 0
        assert sorted(collector.spans, key=lambda span: span["spanId"]) == expected


def test_ids_are_the_same_each_time_and_lead_back(folder: Path) -> None:
    with_causes = otlp(folder, "first.jsonl", "reader", "counter", "--causes")
    without = otlp(folder, "second.jsonl", "counter")
    again = otlp(folder, "third.jsonl", "counter")
    assert again == without
    places = {(attribute(s, "record"), attribute(s, "message"), s["kind"]): s["spanId"] for s in without}
    assert len(places) == len(without) == len({span["spanId"] for span in without})
    of_counter = [span for span in with_causes if attribute(span, "instance") == "counter"]
    assert {span["spanId"] for span in of_counter} == set(places.values())
    shown = [json.loads(line) for line in immortal(folder, "log", "show", "counter", "--json").splitlines()]
    span = next(span for span in without if span["name"] == "Counter.count")
    message = shown[attribute(span, "record")]["messages"][1:][attribute(span, "message")]  # the first is RECORD_TIME
    assert message["method"] == "Counter.count"
    assert int(span["startTimeUnixNano"]) == shown[attribute(span, "record")]["time_ns"]


def test_a_part_of_a_log_by_records_or_by_time(folder: Path) -> None:
    whole = otlp(folder, "whole.jsonl", "counter")
    by_record = otlp(folder, "records.jsonl", "counter", "--from", "2", "--to", "3")
    assert {attribute(span, "record") for span in by_record} == {2, 3}
    assert by_record == [span for span in whole if attribute(span, "record") in (2, 3)]
    shown = [json.loads(line) for line in immortal(folder, "log", "show", "counter", "--json").splitlines()]
    from_time, to_time = shown[2]["time"], shown[3]["time"]
    assert otlp(folder, "times.jsonl", "counter", "--from", from_time, "--to", to_time) == by_record
    assert otlp(folder, "late.jsonl", "counter", "reader", "--from", "2999-01-01") == []


class Collector:
    """An endpoint that keeps what it is sent, and answers with ``status``."""

    def __init__(self, status: int) -> None:
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector.changed:
                    collector.requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
                    collector.changed.notify_all()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"{}" if status == 200 else b"no room\x1b[2J")

            def log_message(self, *arguments: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [span for _, _, request in self.requests for span in spans_of(request)]

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.spans), DEADLINE_S)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_an_endpoint_gets_the_same_as_a_file(folder: Path) -> None:
    expected = otlp(folder, "file.jsonl", "counter")
    with Collector(200) as collector:
        said = immortal(folder, "trace", "export", "counter", "--otlp", collector.url)
    assert f"{len(expected)} spans sent" in said
    paths, types, _ = zip(*collector.requests, strict=True)
    assert set(paths) == {"/v1/traces"}
    assert set(types) == {"application/json"}
    assert sorted(collector.spans, key=lambda span: span["spanId"]) == expected


def test_a_collector_is_sent_what_comes(folder: Path) -> None:
    expected = otlp(folder, "all.jsonl", "counter", "reader")
    options = ("--from", "2000-01-01", "--resume", "resume")
    with Collector(200) as collector:
        command = command_line("trace", "follow", "counter", "reader", "--otlp", collector.url, *options)
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as following:
            collector.wait_for(lambda spans: len(spans) == len(expected))
            following.send_signal(signal.SIGTERM)
            assert following.stderr is not None
            said = following.stderr.read()
        assert following.returncode == 0
        assert f"{len(expected)} spans sent" in said
        assert sorted(collector.spans, key=lambda span: span["spanId"]) == expected
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as following:
            assert following.stderr is not None
            assert "following counter, reader" in following.stderr.readline()
            following.send_signal(signal.SIGTERM)
            assert "0 spans sent" in following.stderr.read()


def test_a_collector_is_sent_causes_too(folder: Path) -> None:
    expected = otlp(folder, "all_causes.jsonl", "counter", "reader", "--causes")
    options = ("--from", "2000-01-01", "--causes", "--resume", "resume_causes")
    with Collector(200) as collector:
        command = command_line("trace", "follow", "counter", "reader", "--otlp", collector.url, *options)
        with subprocess.Popen(command, cwd=folder) as following:
            collector.wait_for(lambda spans: len(spans) == len(expected))
            following.send_signal(signal.SIGTERM)
        assert following.returncode == 0
        assert sorted(collector.spans, key=lambda span: span["spanId"]) == expected
    assert {name: known[1] for name, known in json.loads((folder / "resume_causes").read_text()).items()} == {
        "counter": 7, "reader": 9,
    }  # fmt: skip


def test_an_endpoint_that_takes_nothing_is_an_error_in_words(folder: Path) -> None:
    with Collector(503) as collector:
        said = immortal(folder, "trace", "export", "counter", "--otlp", f"{collector.url}/v1/traces", status=1)
    assert "refuses the spans: status 503" in said
    assert "no room" in said
    assert "\x1b" not in said
    said = immortal(folder, "trace", "export", "counter", "--otlp", collector.url, status=1)  # nobody is there
    assert "takes no spans" in said


def test_wrong_calls_are_said(folder: Path) -> None:
    (folder / "mine").write_text("precious")
    assert "is there already" in immortal(folder, "trace", "export", "counter", "--perfetto", "mine", status=1)
    assert "is there already" in immortal(folder, "trace", "export", "counter", "--otlp", "mine", status=1)
    assert (folder / "mine").read_text() == "precious"
    assert "one of --perfetto" in immortal(folder, "trace", "export", "counter", status=2)
    options = ("--perfetto", "x.json")
    said = immortal(folder, "trace", "export", "counter", "reader", "--from", "3", *options, status=2)
    assert "record numbers belong to one log" in said
    assert "a record's number, or a time" in immortal(
        folder, "trace", "export", "counter", "--from", "then", *options, status=2
    )
    assert "nobody" in immortal(folder, "trace", "export", "nobody", *options, status=1)
    assert not (folder / "x.json").exists()
    assert (folder / HOME).is_dir()


def test_a_file_that_can_not_be_written_whole_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run refused its name, with the disk empty again."""

    def write(messages: object, spans: object, file: IO[bytes]) -> int:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporters, "write", write)
    with contextlib.chdir(folder):
        arguments = ["--home", HOME, "trace", "export", "counter", "--perfetto", "whole.json"]
        assert "No space left" in CliRunner().invoke(main, arguments).stderr
    assert not (folder / "whole.json").exists()


def test_damaged_records_are_left_out_and_told(tmp_path: Path) -> None:
    make_fleet(tmp_path, WORDS)
    flip_byte(tmp_path / "logs" / "counter" / "log", 2)
    said = immortal(tmp_path, "trace", "export", "counter", "--otlp", "rest.jsonl", status=1)
    assert "left out: counter: record 2" in said
    spans = [span for line in (tmp_path / "rest.jsonl").read_text().splitlines() for span in spans_of(json.loads(line))]
    assert 2 not in {attribute(span, "record") for span in spans}
    assert {1, 3} <= {attribute(span, "record") for span in spans}
