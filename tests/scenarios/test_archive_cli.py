"""`immortal archive` and `immortal restore` with real processes: a lost machine's instance goes on elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from tests.helpers.cli import HOME, Run, command_line, immortal
from tests.helpers.processes import CoordinatorProcess, House, SocketApp


def shown(folder: Path, name: str, url: str) -> dict[str, Any]:
    found = json.loads(immortal(folder, "archive", name, "--to", url, "--show", "--json"))
    assert found["name"] == name
    return dict(found)


def until_archived(folder: Path, name: str, url: str, last_sequence_id: int) -> None:
    for _ in range(200):  # each is a process of its own, which takes a while
        if (
            "there is no archive" not in immortal_any(folder, "archive", name, "--to", url, "--show")
            and shown(folder, name, url)["newest"]["last_sequence_id"] >= last_sequence_id
        ):
            return
    pytest.fail(f"record {last_sequence_id} was never archived")


def immortal_any(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        command_line(*arguments), cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return result.stdout + result.stderr


def forward(app: SocketApp, *numbers: int) -> None:
    before = len(app.state["forwarded"])
    for number in numbers:
        app.impulse(number)
    app.until(lambda: len(app.state["forwarded"]) == before + len(numbers))


def last_of(process: CoordinatorProcess) -> int:
    return int(process.status()["sequence_id"])


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / HOME)
    yield house
    house.close()


def test_a_machine_is_lost_and_its_instance_goes_on_elsewhere(tmp_path: Path, house: House) -> None:
    url = f"file://{tmp_path}/archive"
    house.register("alice", "bob")
    bob, bobs_app = house.both("bob", peer="alice")
    alice, alices_app = house.both("alice", peer="bob")
    archiving = Run(tmp_path, "bob", "--to", url, "--every-s", "0.2", command="archive")
    archiving.line("bob: archiving to")
    forward(alices_app, 1, 2, 3)
    bobs_app.until(lambda: bobs_app.state["told"] == [1, 2, 3])
    alice.until(lambda status: status["outputs"]["bob"]["acknowledged"] == 3)
    with_three = last_of(bob)
    until_archived(tmp_path, "bob", url, with_three)
    archiving.kill()
    forward(alices_app, 4, 5)
    bobs_app.until(lambda: bobs_app.state["told"] == [1, 2, 3, 4, 5])
    alice.until(lambda status: status["outputs"]["bob"]["acknowledged"] == 5)
    at_risk = shown(tmp_path, "bob", url)["at_risk"]
    assert at_risk["records"] > 0
    assert at_risk["seconds"] > 0
    said = immortal(tmp_path, "restore", url, "bob", status=1)
    assert "bob" in said
    assert "restored" not in said, "it runs: nothing is done"
    bob.kill()
    bobs_app.until_closed()
    said = immortal(tmp_path, "restore", url, "bob", status=1)
    assert "bob has a log already" in said
    shutil.rmtree(house.settings("bob").log)
    said = immortal(tmp_path, "restore", url)
    assert f"bob: records 0 to {with_three}, " in said
    assert "proved, by its check bytes: every record, checkpoint and table is as it was archived" in said
    assert "not proved: that this is the newest moment" in said
    assert "who wrote it: the log has no key" in said
    assert f"what bob acknowledged after record {with_three} is lost;" in said
    assert "bob: sound" in immortal(tmp_path, "log", "verify", "bob")
    bob, bobs_app = house.both("bob", peer="alice")
    bobs_app.until(lambda: bobs_app.state["told"] == [1, 2, 3])
    forward(alices_app, 6)
    bob.line(
        "stream refused: 'bob' has 3 messages of 'alice', it once had 5: its log was wiped or replaced by an older"
    )
    said = immortal(tmp_path, "peers", "reclaim", "bob", status=1)
    assert "alice: 2 of its calls went to the copy, and are lost to bob" in said
    immortal(tmp_path, "peers", "reclaim", "bob", "--accept-loss")
    bobs_app.until(lambda: bobs_app.state["told"] == [1, 2, 3, 6])
    # And it is archived where it was: nobody else has written there since.
    said = immortal(tmp_path, "archive", "bob", "--to", url, "--once")
    assert f"bob: archived: records 0 to {last_of(bob)}, " in said
    for process, app in ((bob, bobs_app), (alice, alices_app)):
        process.kill()
        app.until_closed()


def test_a_store_that_is_away_is_waited_for(tmp_path: Path, house: House) -> None:
    url = f"file://{tmp_path}/archive"
    house.register("alice", "bob")
    bob, bobs_app = house.both("bob", peer="alice")
    archiving = Run(tmp_path, "bob", "--to", url, "--every-s", "0.2", command="archive")
    until_archived(tmp_path, "bob", url, last_of(bob))
    folder = tmp_path / "archive"
    folder.rename(tmp_path / "away")
    folder.write_text("in its place")
    forward(bobs_app, 1)
    assert "s at risk; it is tried again" in archiving.line("does not do it")
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert "0 s at risk" in archiving.line("archived up to record", 2)
    forward(bobs_app, 2)
    last = last_of(bob)
    assert archiving.stop() == 0
    assert f"to {last}, " in archiving.line("bob: ended: "), "what came until then is archived"
    assert "Traceback" not in archiving.text
    bob.kill()
    bobs_app.until_closed()


def test_wrong_use_is_said_in_a_line(tmp_path: Path, house: House) -> None:
    url = f"file://{tmp_path}/archive"
    house.register("alice", "bob")
    assert "'bob' has not been started yet" in immortal(tmp_path, "archive", "bob", "--to", url, status=1)
    bob, bobs_app = house.both("bob", peer="alice")
    assert "there is no archive in" in immortal(tmp_path, "archive", "--to", url, "--show", status=1)
    assert "there is no archive in" in immortal(tmp_path, "restore", url, status=1)
    assert "names no store" in immortal(tmp_path, "archive", "bob", "--to", "archive", status=1)
    assert "names no folder" in immortal(tmp_path, "archive", "bob", "--to", "file://archive", status=1)
    assert "give the NAME of an instance" in immortal(tmp_path, "archive", "--to", url, status=2)
    (tmp_path / "key").write_text("hunter2\n")
    said = immortal(tmp_path, "archive", "bob", "--to", url, "--once", "--key-file", "key", status=1)
    assert "key is no key file" in said
    assert "hunter2" not in said
    made = json.loads(immortal(tmp_path, "archive", "bob", "--to", url, "--once", "--json"))
    assert made["new"] is True
    bob.kill()
    bobs_app.until_closed()
    shutil.rmtree(house.settings("bob").log)
    said = immortal(tmp_path, "restore", url, "bob", "--until", "2001-01-01", status=1)
    assert "the oldest moment of 'bob' in the archive ends with record" in said
    assert "at risk: unknown, since its log is on another machine" in immortal(
        tmp_path, "archive", "--to", url, "--show"
    )
    immortal(tmp_path, "unregister", "bob")
    assert "bob" in immortal(tmp_path, "restore", url, status=1)


def test_one_broken_archive_hides_no_other(tmp_path: Path, house: House) -> None:
    url = f"file://{tmp_path}/archive"
    house.register("alice", "bob")
    bob, bobs_app = house.both("bob", peer="alice")
    immortal(tmp_path, "archive", "bob", "--to", url, "--once")
    damaged = tmp_path / "archive" / "alice" / "moments"
    damaged.mkdir(parents=True)
    (damaged / "000000000001").write_bytes(b"IMMORTAL ARCHIVE 1 0\n{}")
    (tmp_path / "archive" / "-no-name" / "moments").mkdir(parents=True)
    said = immortal(tmp_path, "archive", "--to", url, "--show", status=1)
    assert "bob: records 0 to" in said
    assert "moments/000000000001 is damaged" in said
    assert "1 of 2 archives could not be read whole" in said
    assert "-no-name" not in said
    bob.kill()
    bobs_app.until_closed()
