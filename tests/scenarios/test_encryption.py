"""An encrypted service with real processes: killed, its key renewed under calls, read by all; its files say nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from immortal.client import CalleeFailed, connect
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.operator import control
from tests.helpers.cli import HOME, Run, immortal

NAME = "diary"
MARKER = "xyzzy-plugh"
APP = """
import immortal
from immortal import Immortal, query, rpc


def heard(text: str) -> str:
    return text.upper() + text


class Diary(Immortal):
    entries: list[str]

    def __init__(self) -> None:
        self.entries = []

    @rpc
    def add(self, entry: str) -> int:
        self.entries.append(entry)
        return len(self.entries)

    @rpc
    async def listen(self, text: str) -> str:
        immortal.label(text=text)
        said = await immortal.effect(heard, text)
        self.entries.append(await immortal.event(text, str))
        return said

    @rpc
    def begin(self, text: str) -> None:
        self.listen.fork(text)

    @rpc
    def refuse(self, entry: str) -> None:
        raise ValueError(entry)

    @query
    def count(self) -> int:
        return len(self.entries)
"""


def write_keys(path: Path, *keys: LogKey) -> None:
    path.write_text("".join(f"{key.secret.hex()}\n" for key in keys))
    path.chmod(0o600)


def telling(*folders: Path) -> list[Path]:
    """Return the files that hold the marker, in any of the encodings of text that a format could choose."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    words = [MARKER.encode(), MARKER.upper().encode(), MARKER.encode("utf-16-le")]
    return [path for path in files if any(word in path.read_bytes() for word in words)]


@pytest.mark.parametrize("log_key", ["file", "none"])
def test_a_stolen_folder_says_nothing(tmp_path: Path, log_key: str) -> None:
    (tmp_path / "diary.py").write_text(APP)
    home, key_file, old, new = tmp_path / HOME, tmp_path / "key", LogKey.new(), LogKey.new()
    write_keys(key_file, old)
    options = ["--peer", "tcp://127.0.0.1:*", "--app", "diary:Diary", "--timings-limit-mb", "1", "--log-key", log_key]
    immortal(tmp_path, "register", NAME, *options, "--encryption-key", str(key_file))
    run = Run(tmp_path, NAME, "--restart")
    run.line("ready")
    added, stops = 0, threading.Event()
    try:
        with connect(NAME, home=home) as client:
            client.begin(MARKER)
            with pytest.raises(CalleeFailed, match=MARKER):
                client.refuse(MARKER)

            def add() -> None:
                nonlocal added
                for number in itertools.count():
                    client.add(f"{MARKER}-{number}" * 40)
                    added += 1
                    if stops.is_set():
                        return

            adding = threading.Thread(target=add)
            adding.start()
            for _ in range(2):
                coordinator = control.running(home / NAME)
                assert coordinator is not None
                os.kill(coordinator.pid, signal.SIGKILL)
                run.line("ready", run.count("ready") + 1)
            write_keys(key_file, new, old)
            said = json.loads(immortal(tmp_path, "log", "encryption", NAME, "--renew", "--json"))
            assert said["keys"] == [new.id]
            write_keys(key_file, new)
            immortal(tmp_path, "checkpoint", NAME)
            stops.set()
            adding.join()
            assert client.query.count() == added
        immortal(tmp_path, "archive", NAME, "--to", f"file://{tmp_path}/archive", "--once")
        immortal(tmp_path, "log", "backup", NAME, str(tmp_path / "backup"))
        assert telling(home, tmp_path / "archive", tmp_path / "backup") == []
    finally:
        stops.set()
        run.stop()
    assert telling(home) == []
    assert f"{MARKER}-0" in immortal(tmp_path, "log", "show", NAME)
    assert "sound" in immortal(tmp_path, "log", "verify", NAME)
    immortal(tmp_path, "verify", NAME, "--all")
    query = f"select count(*) as n from messages where decode(arguments, 'ignore') like '%{MARKER}%'"
    assert json.loads(immortal(tmp_path, "sql", query, "--json"))["n"] > added
    assert telling(home) == [], "what a query has made"
    key_file.rename(tmp_path / "away")
    for command in (["log", "show"], ["log", "verify"], ["verify"]):
        assert f"there is no key in {key_file}" in immortal(tmp_path, *command, NAME, status=1)
    write_keys(key_file, old)
    assert f"is encrypted with the key {new.id}, and {key_file} has {old.id}" in immortal(
        tmp_path, "log", "show", NAME, status=1
    )
    assert Registry(home).load(NAME).executions_days is None
