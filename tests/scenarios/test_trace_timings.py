"""Spans of queues and commits, of a service that notes times: what was slow is seen to be, and nothing is without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator import fault_points
from tests.helpers.browser import WebServer
from tests.helpers.cli import DEADLINE_S, HOME, Run, immortal
from tests.scenarios.test_trace_cli import attribute, otlp, perfetto

MS = 1_000_000
DISK_S = 0.4
HANDLER_S = 0.03

SHOP = f"""
import time

from immortal import Immortal, rpc


class Shop(Immortal):
    bought: int

    def __init__(self) -> None:
        self.bought = 0

    @rpc
    def buy(self, count: int) -> int:
        for _ in range(count):
            self.pack.fork()
        return count

    @rpc
    def pack(self) -> None:
        time.sleep({HANDLER_S})
        self.bought += 1
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One customer bought 3 things while the disk was slow; it was killed, has recovered, and stopped."""
    folder = tmp_path_factory.mktemp("shop")
    plan = folder / "plan"
    (folder / "shop.py").write_text(SHOP)
    options = ("--peer", "tcp://127.0.0.1:*", "--app", "shop:Shop", "--keep-checkpoints", "all")
    immortal(folder, "register", "shop", *options, "--timings-limit-mb", "8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault_points.VARIABLE, str(plan))
        run = Run(folder, "shop")
    try:
        run.line("ready")
        immortal(folder, "call", "shop", "buy", "0")  # what a first start commits is done by then
        (folder / "new").write_text(f"1 delay={DISK_S} before commit")
        os.replace(folder / "new", plan)
        immortal(folder, "call", "shop", "buy", "3")
        assert not plan.exists()
        immortal(folder, "stop", "shop")
    finally:
        run.kill()
    again = Run(folder, "shop")
    try:
        again.line("ready")
        immortal(folder, "call", "shop", "buy", "0")
        immortal(folder, "stop", "shop")
    finally:
        again.kill()
    return folder


def length_ns(span: dict[str, Any]) -> int:
    return int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])


def test_a_slow_disk_and_a_busy_handler_are_seen(shop: Path) -> None:
    found = otlp(shop, "spans.jsonl", "shop")
    assert otlp(shop, "again.jsonl", "shop") == found
    spans = {span["spanId"]: span for span in found}
    assert len(spans) == len(found)
    assert all(length_ns(span) >= 0 for span in found)
    commits = [span for span in found if span["name"] == "commit"]
    assert max(length_ns(span) for span in commits) >= DISK_S * 1e9
    queues = {(attribute(one, "record"), attribute(one, "message")): one for one in found if one["name"] == "queue"}
    for commit in commits:
        queue = spans[commit["parentSpanId"]]
        assert queue == queues[attribute(commit, "record"), attribute(commit, "message")]
        assert commit["traceId"] == queue["traceId"] == spans[queue["parentSpanId"]]["traceId"]
        assert int(queue["startTimeUnixNano"]) <= int(commit["startTimeUnixNano"])
        assert int(commit["endTimeUnixNano"]) <= int(queue["endTimeUnixNano"])
    _, buy, _ = sorted(
        (span for span in found if span["name"] == "Shop.buy"), key=lambda span: int(span["startTimeUnixNano"])
    )
    assert length_ns(queues[attribute(buy, "record"), attribute(buy, "message")]) >= DISK_S * 1e9
    packs = sorted(
        (span for span in found if span["name"] == "Shop.pack"), key=lambda span: int(span["startTimeUnixNano"])
    )
    assert len(packs) == 3
    assert all(length_ns(pack) >= HANDLER_S * 1e9 for pack in packs)
    for before, after in pairwise(packs):
        assert int(before["endTimeUnixNano"]) <= int(after["startTimeUnixNano"])
    waits = [length_ns(queues[attribute(pack, "record"), attribute(pack, "message")]) for pack in packs]
    assert waits[2] - waits[0] >= HANDLER_S * 1e9


def test_each_message_has_a_queue_and_a_commit(shop: Path) -> None:
    found = otlp(shop, "all.jsonl", "shop")
    called = {(attribute(one, "record"), attribute(one, "message")) for one in found if one["name"].startswith("call ")}
    for name in ("queue", "commit"):
        some = [(attribute(span, "record"), attribute(span, "message")) for span in found if span["name"] == name]
        assert len(some) == len(called)
        assert set(some) == called


def test_perfetto_shows_them(shop: Path) -> None:
    events = perfetto(shop, "shown.json", "shop")["traceEvents"]
    begun = {(e["cat"], e["id"]): e for e in events if e["ph"] == "b"}
    ended = {(e["cat"], e["id"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    commits = [(e["args"]["immortal.record"], begun[key]["ts"], e) for key, e in begun.items() if key[0] == "commit"]
    assert len({record for record, *_ in commits}) == len(commits)  # one for all messages of a record
    assert any(ended[key]["ts"] - begun[key]["ts"] >= DISK_S * 1e6 for key in begun if key[0] == "queue")
    packs = [e for e in events if e["ph"] == "X" and e["name"] == "Shop.pack"]
    assert all(e["dur"] >= HANDLER_S * 1e6 for e in packs)


def test_without_notes_there_are_none_and_the_ids_are_the_same(shop: Path) -> None:
    with_notes = otlp(shop, "with.jsonl", "shop")
    notes = shop / HOME / "shop" / "timings"
    notes.rename(shop / "aside")
    try:
        without = otlp(shop, "without.jsonl", "shop")
    finally:
        (shop / "aside").rename(notes)
    rest = [span for span in with_notes if span["name"] not in ("queue", "commit")]
    assert len(rest) < len(with_notes)
    assert [(one["spanId"], one.get("parentSpanId"), one["traceId"]) for one in rest] == [
        (one["spanId"], one.get("parentSpanId"), one["traceId"]) for one in without
    ]


def test_damaged_notes_are_passed_over_with_a_word(shop: Path) -> None:
    notes = shop / HOME / "shop" / "timings"
    assert notes.stat().st_mode & 0o077 == 0
    kept = {path: path.read_bytes() for path in notes.iterdir()}
    assert {path.name.partition("-")[0] for path in kept} == {"coordinator", "app"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)
    try:
        for path, data in kept.items():
            path.write_bytes(data[:20] + b"\xff" * 8 + data[28:-5])
        said = immortal(shop, "trace", "export", "shop", "--otlp", "damaged.jsonl")
        assert "has damaged rows: they are passed over" in said
        for path in kept:
            path.write_bytes(b"something else, which is longer than a header")
        said = immortal(shop, "trace", "export", "shop", "--otlp", "none.jsonl")
        assert "holds no times of an instance" in said
        assert json.loads((shop / "none.jsonl").read_text().splitlines()[0])
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def test_they_go_with_the_instance(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    immortal(
        tmp_path, "register", "shop", "--peer", "tcp://127.0.0.1:*", "--app", "shop:Shop", "--timings-limit-mb", "1"
    )
    run = Run(tmp_path, "shop")
    try:
        run.line("ready")
        immortal(tmp_path, "stop", "shop")
    finally:
        run.kill()
    assert list((tmp_path / HOME / "shop" / "timings").iterdir())
    immortal(tmp_path, "unregister", "shop")
    assert not (tmp_path / HOME / "shop" / "timings").exists()


def test_the_page_of_a_message_says_it(shop: Path) -> None:
    found = otlp(shop, "paged.jsonl", "shop")
    pack = next(span for span in found if span["name"] == "Shop.pack")
    server = WebServer(shop)
    try:
        status, text, _ = server.ask(f"/i/shop/m/{attribute(pack, 'record')}/{attribute(pack, 'message')}")
        _, first, _ = server.ask("/i/shop/m/0/0")
    finally:
        server.stop()
    assert status == 200
    lengths = dict(re.findall(r"<dt>(Queue|Disk|Handler)</dt><dd>([\d.]+ \S+)</dd>", text))
    assert lengths.keys() == {"Queue", "Disk", "Handler"}
    assert float(lengths["Handler"].removesuffix(" ms")) >= HANDLER_S * 1e3
    assert "<dt>Disk</dt>" in first


POST = """
from immortal import Immortal, peer, rpc
from immortal.client import connect
from immortal.embedded import start


class Box(Immortal):
    letters: int

    def __init__(self) -> None:
        self.letters = 0

    @rpc
    def put(self, letter: str) -> None:
        self.letters += 1

    @rpc
    def count(self) -> int:
        return self.letters


class Post(Immortal):
    box = peer(Box, "box")

    @rpc
    def send(self, count: int) -> int:
        for number in range(count):
            self.box.put.fork(str(number))
        return count


if __name__ == "__main__":
    with start(Box, "box", timings_limit_mb=4), start(Post, "post", timings_limit_mb=4):
        with connect("post") as post, connect("box") as box:
            assert post.send(3) == 3
            while box.count() < 3:
                pass
"""


def test_calls_between_services_that_are_one_process(tmp_path: Path) -> None:
    (tmp_path / "post.py").write_text(POST)
    environment = {**os.environ, "IMMORTAL_HOME": HOME, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "post.py"], cwd=tmp_path, env=environment, check=True, timeout=2 * DEADLINE_S)
    found = otlp(tmp_path, "post.jsonl", "post", "box")
    puts = [span for span in found if span["name"] == "Box.put"]
    assert len(puts) == 3
    for put in puts:
        below = [span for span in found if span.get("parentSpanId") == put["parentSpanId"]]
        (queue,) = [span for span in below if span["name"] == "queue"]
        (commit,) = [span for span in found if span.get("parentSpanId") == queue["spanId"]]
        assert commit["name"] == "commit"
        assert int(queue["endTimeUnixNano"]) == int(put["startTimeUnixNano"]) < int(put["endTimeUnixNano"])
        assert int(queue["startTimeUnixNano"]) <= int(commit["startTimeUnixNano"])
