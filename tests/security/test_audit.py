"""The audit log: what is in it, and that nobody changes it unseen or fills the disk with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator import audit as audit
from immortal.coordinator.audit import FIRST, OLD_FILES_MAX, TALLIES_MAX, TALLY_NS, AuditLog
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.messenger import KeyPair, Messenger, Role, Security
from immortal.protocol.peer_frames import FrameType, PeerFrame, encode_frame
from tests.helpers.processes import CoordinatorProcess, House


class Written:
    """An audit log and what it warned of."""

    def __init__(self, folder: Path, size_bytes_max: int = 1 << 20) -> None:
        self.warnings: list[str] = []
        self.folder = folder
        self.log = AuditLog(folder, self.warnings.append, clock_ns=lambda: 10**18, size_bytes_max=size_bytes_max)

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [line.entry for line in audit.lines(self.folder)]

    @property
    def problems(self) -> list[tuple[str, int, str]]:
        return [(line.file.name, line.number, line.problem) for line in audit.lines(self.folder) if line.problem]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = Written(tmp_path)
    for number in range(10):
        made.log.write("said", number=number)
    return made


def test_lines_are_chained_from_the_first_on(written: Written) -> None:
    assert written.problems == []
    assert written.entries[0]["previous"] == FIRST
    assert [entry["number"] for entry in written.entries] == list(range(10))
    text = audit.path(written.folder).read_bytes().split(b"\n")
    assert written.entries[5]["previous"] == audit.hash_of(text[4])
    assert audit.path(written.folder).stat().st_mode & 0o777 == 0o600


def change(written: Written, edit: Any) -> None:
    path = audit.path(written.folder)
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))


def test_a_line_cannot_be_changed_unseen(written: Written) -> None:
    change(written, lambda lines: lines.__setitem__(3, lines[3].replace(b'"number":3', b'"number":4')))
    assert written.problems == [("audit.log", 5, "does not fit the line before it")]


def test_a_line_cannot_be_taken_out_unseen(written: Written) -> None:
    change(written, lambda lines: lines.__delitem__(3))
    assert written.problems == [("audit.log", 4, "does not fit the line before it")]


def test_lines_cannot_be_put_in_another_order_unseen(written: Written) -> None:
    change(written, lambda lines: lines.__setitem__(slice(3, 5), [lines[4], lines[3]]))
    assert written.problems[0] == ("audit.log", 4, "does not fit the line before it")


def test_the_first_lines_cannot_be_cut_off_unseen(written: Written) -> None:
    change(written, lambda lines: lines.__delitem__(slice(0, 2)))
    assert written.problems == [("audit.log", 1, "is not the first that was written: those before are gone")]


def test_what_is_no_line_is_found(written: Written) -> None:
    change(written, lambda lines: lines.insert(2, b"nonsense\n"))
    assert written.problems[0] == ("audit.log", 3, "is no line of an audit log")


def test_the_chain_goes_on_over_a_restart(written: Written) -> None:
    again = Written(written.folder)
    again.log.write("said", number=10)
    assert (again.problems, len(again.entries)) == ([], 11)


def test_an_unfinished_line_of_a_crash_is_cut_off_and_said(written: Written) -> None:
    path = audit.path(written.folder)
    path.write_bytes(path.read_bytes() + b'{"time":"2026')
    assert written.problems == [], "it may just be written"
    again = Written(written.folder)
    again.log.write("said", number=10)
    assert again.problems == []
    assert [entry["what"] for entry in again.entries[-2:]] == ["cut", "said"]
    assert again.entries[-2]["bytes"] == 13


def test_the_size_is_bounded_and_the_chain_goes_on_through_all_files(tmp_path: Path) -> None:
    written = Written(tmp_path, size_bytes_max=1000)
    for number in range(200):
        written.log.write("said", number=number)
    files = audit.paths(tmp_path)
    assert [file.name for file in files] == [*(f"audit.log.{number}" for number in range(7, 0, -1)), "audit.log"]
    assert len(files) == OLD_FILES_MAX + 1
    assert all(file.stat().st_size < 1300 for file in files)
    assert written.problems == []
    numbers = [entry["number"] for entry in written.entries]
    assert numbers == list(range(numbers[0], 200))
    again = Written(tmp_path, size_bytes_max=1000)
    for file in (audit.path(tmp_path),):  # a crash between the two steps of a rotation
        file.replace(tmp_path / "audit.log.1")
    again.log.write("said", number=200)
    assert again.entries[-1]["previous"] == audit.hash_of((tmp_path / "audit.log.1").read_bytes().splitlines()[-1])
    files[3].unlink()
    assert [problem for _, _, problem in written.problems] == ["does not fit the line before it"] * len(
        written.problems
    )
    assert written.problems


def test_a_stranger_cannot_fill_the_disk(tmp_path: Path) -> None:
    """Whatever it does, there is a line at once, and then one in a while with how often it was."""
    written = Written(tmp_path)
    for now_ns in range(0, TALLY_NS, TALLY_NS // 1000):
        written.log.count("refused", "strangers", now_ns, 3, last=f"key {now_ns}")
        written.log.settle(now_ns)
    written.log.settle(TALLY_NS)
    assert [(entry["who"], entry["count"]) for entry in written.entries] == [("strangers", 3), ("strangers", 2997)]
    for number in range(5 * TALLIES_MAX):
        written.log.count("refused", f"name {number}", TALLY_NS)
    assert len(written.entries) <= TALLIES_MAX + 3
    written.log.close()
    assert sum(entry.get("count", 0) for entry in written.entries) == 3000 + 5 * TALLIES_MAX


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.log.write("operator", argument="x" * 1_000_000)
    assert audit.path(tmp_path).stat().st_size < 3000
    assert written.entries[0]["argument"].endswith("... (1000000 characters)")


def test_what_cannot_be_written_stops_nothing_and_is_counted(tmp_path: Path) -> None:
    written = Written(tmp_path)
    audit.path(tmp_path).mkdir()
    for _ in range(3):
        written.log.write("said")
    assert len(written.warnings) == 1
    assert "can't be written" in written.warnings[0]
    audit.path(tmp_path).rmdir()
    written.log.write("said")
    assert [entry["lost"] for entry in written.entries] == [3]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    audit.path(tmp_path).symlink_to(target)
    written = Written(tmp_path)
    written.log.write("said")
    assert (target.read_text(), len(written.warnings)) == ("mine", 1)


# --- a running coordinator --------------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def entries(house: House, name: str) -> list[dict[str, Any]]:
    return [line.entry for line in audit.lines(house.settings(name).folder)]


def until_noted(house: House, process: CoordinatorProcess, name: str, what: str) -> dict[str, Any]:
    """The entry, once it is there: counters are looked at once a second."""
    process.until(lambda status: any(entry["what"] == what for entry in entries(house, name)))
    return next(entry for entry in entries(house, name) if entry["what"] == what)


def run(house: House, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["--home", str(house.home), *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_who_was_let_in_who_was_refused_and_what_operators_did(house: House) -> None:
    house.register("alice", "bob")
    for name in ("alice", "bob"):
        keys.create(house.settings(name).folder)
    (web,) = keys.create(house.home / "web", Role.CLIENT)
    process, bob = house.both("bob")
    settings = house.settings("bob")
    servers = keys.read_public_keys(settings.folder)
    senders = []
    (alice,) = keys.read_pairs(house.settings("alice").folder)
    for pair, name in ((alice, "alice"), (alice, "carol"), (web, "web"), (KeyPair.new(), "x")):
        messenger = Messenger(security=Security(pair, {}, lambda endpoint: servers))
        messenger.start()
        senders.append(messenger)
        messenger.send_message(settings.peer, encode_frame(PeerFrame(FrameType.HELLO, name, "bob", 7, 1, 0)))
    try:
        assert until_noted(house, process, "bob", "let in")["who"].split()[0] in ("alice", "web")
        assert until_noted(house, process, "bob", "refused: its role does not send that")["who"] == "web"
        assert " from 127.0.0.1" in until_noted(house, process, "bob", "refused: no key, or nobody's")["last"]
        assert until_noted(house, process, "bob", "dropped: another's name")["count"] >= 1
    finally:
        for messenger in senders:
            messenger.close()
    control.query(settings.folder, "checkpoint")
    found = until_noted(house, process, "bob", "operator")
    assert (found["verb"], found["who"]) == ("checkpoint", f"uid {os.geteuid()}")
    keys.rotate(house.settings("alice").folder)

    def keys_of_alice() -> list[int]:
        changed = [entry for entry in entries(house, "bob") if entry["what"] == "may call from now on"]
        return [len(entry["callers"]["alice (instance)"]) for entry in changed]

    process.until(lambda status: keys_of_alice() == [1, 2])
    bob.gives_checkpoints = True
    process.terminate()
    bob.until_closed()
    assert process.ended()[0] == 0
    said = [entry["what"] for entry in entries(house, "bob")]
    assert (said[0], said[-1]) == ("started", "stopped")
    assert "status" not in {entry.get("verb") for entry in entries(house, "bob")}, "who only asks changes nothing"
    text = audit.path(settings.folder).read_text()
    assert not [pair for pair in (alice, web) if pair.secret in text]
    output = run(house, "audit", "bob", "--verify")
    assert output.startswith(f"sound: {len(said)} lines; the newest has the hash ")
    head = output.split()[-1]
    assert run(house, "audit", "bob", "--verify", "--head", head).startswith("sound")
    shown = run(house, "audit", "bob")
    assert "operator  who=uid" in shown
    assert [json.loads(line)["what"] for line in run(house, "audit", "bob", "--json").splitlines()] == said
    lines = text.splitlines(keepends=True)
    audit.path(settings.folder).write_text("".join(lines[:-1]))
    assert f"no line has the hash {head}" in run(house, "audit", "bob", "--verify", "--head", head, status=1)
    audit.path(settings.folder).write_text("".join([lines[0], *lines[2:]]))
    assert "audit.log, line 2: it does not fit the line before it" in run(house, "audit", "bob", "--verify", status=1)
    assert '"sound": false' in run(house, "audit", "bob", "--verify", "--json", status=1)
