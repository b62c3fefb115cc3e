"""A log of somebody else runs no code here: states that pickle wrote are refused until a person says otherwise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from immortal import Immortal
from immortal.appsdk.state.schema import Envelope, encode_envelope
from immortal.cli import main
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.interfaces import LogStore
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.own_logs import PickleRefusedError, refuse_pickle
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.notices import Notices
from immortal.coordinator.service.process import STATUS_NO_RECOVERY
from immortal.coordinator.service.runtime import run_coordinator
from immortal.log import open_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.state_envelope import serializer_of
from immortal.testing import assert_replays
from tests.helpers.recorded import Instances, load_module, write_module
from tests.security import log_forger as forger

SOURCE = """
from immortal import Immortal, impulse


class Box(Immortal, serializer="pickle"):
    things: object

    def __init__(self) -> None:
        self.things = []

    @impulse
    def add(self, thing: str) -> None:
        self.things.append(thing)


class Plain(Immortal):
    things: list[str]

    def __init__(self) -> None:
        self.things = []

    @impulse
    def add(self, thing: str) -> None:
        self.things.append(thing)
"""


class Evil:
    """What becomes of it where it is unpickled: a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


class Home:
    """A box that has run, registered; its newest checkpoint is such that whoever unpickles it makes ``trace``."""

    def __init__(self, folder: Path, app: str = "Box") -> None:
        self.folder = folder
        self.trace = folder / "somebody-was-here"
        module_name = write_module(folder, SOURCE)
        self.app: type[Immortal] = getattr(load_module(folder, module_name), app)
        instances = Instances(folder)
        box = instances.start("box", self.app)
        box.impulse("add", "a")
        box.checkpoint()
        box.impulse("add", "b")
        box.checkpoint()
        instances.close()
        registry = Registry(folder)
        self.settings: InstanceSettings = registry.register("box", "tcp://127.0.0.1:*")
        registry.remember_app("box", f"{module_name}:{app}")
        if app == "Box":
            self._plant()

    def _plant(self) -> None:
        log = Path(self.settings.log)
        with open_reader(log) as reader:
            header = reader.summary().checkpoints[-1]
            blob = b"".join(reader.checkpoint_chunks(header.checkpoint_id))
        state = pickle.dumps({"things": Evil(str(self.trace))})
        envelope = Envelope(class_name="Box", serializer="pickle", seed=bytes(16), sequence_id=header.sequence_id)
        assert b"IMMAPP" in blob
        forged = encode_envelope(envelope) + state
        key = CHUNK_KEY.pack(header.checkpoint_id, 0)
        forger.put(log, "chunks", key, log_format.seal_chunk(key, forged))
        header = replace(header, size_bytes=len(forged), check=crc64(forged), unacknowledged={})
        key = SEQUENCE_KEY.pack(header.checkpoint_id)
        forger.put(log, "checkpoints", key, log_format.encode_header(header, 1, b""))

    def make_own(self) -> None:
        """As if it had been made here."""
        with open_reader(self.settings.log) as reader:
            own_logs.OwnLogs(self.settings.folder).add(reader.identity, authenticated=False)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["--home", str(self.folder), *arguments])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The log is somebody else's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Home(tmp_path)
    own_logs.OwnLogs(made.settings.folder).create()
    return made


COMMANDS = [["replay", "box", "--state"], ["verify", "box"], ["what-if", "box", "--app", "APP"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
def test_a_stranger_cannot_run_code_by_a_log(home: Home, command: list[str]) -> None:
    app = Registry(home.folder).load("box").app or ""
    result = home.run(*[app if word == "APP" else word for word in command])
    assert result.exit_code == 1
    assert "of the log of 'box' was written by pickle, and this home did not make that log" in result.stderr
    assert "--trust-pickle" in result.stderr
    assert not home.trace.exists()


def test_who_trusts_it_runs_it(home: Home) -> None:
    """Else the tests above would show nothing."""
    home.run("replay", "box", "--trust-pickle")
    assert home.trace.exists()


def test_what_was_made_here_is_read(home: Home) -> None:
    home.make_own()
    home.run("replay", "box")
    assert home.trace.exists()


def test_an_instance_from_before_there_was_a_note_goes_on(home: Home) -> None:
    own_logs.OwnLogs(home.settings.folder).path.unlink()
    home.run("replay", "box")
    assert home.trace.exists()


def test_a_stranger_cannot_run_code_by_a_start(home: Home) -> None:
    assert run_coordinator(home.settings, Registry(home.folder), Notices("box")) == STATUS_NO_RECOVERY
    with open_reader(home.settings.log) as reader:
        assert not own_logs.OwnLogs(home.settings.folder).has(reader.identity)


def test_a_start_that_trusts_it_makes_it_the_homes_own(home: Home) -> None:
    store = own_logs.open_log(home.settings)
    with pytest.raises(PickleRefusedError):
        own_logs.adopt_log(home.settings, store, trust_pickle=False)
    own_logs.adopt_log(home.settings, store, trust_pickle=True)
    own_logs.adopt_log(home.settings, store, trust_pickle=False)
    store.close()


def test_other_states_of_strangers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    home = Home(tmp_path, "Plain")
    own_logs.OwnLogs(home.settings.folder).create()
    result = home.run("replay", "box", "--state")
    assert result.exit_code == 0, result.output
    store = own_logs.open_log(home.settings)
    own_logs.adopt_log(home.settings, store, trust_pickle=False)
    assert own_logs.OwnLogs(home.settings.folder).has(store.identity)
    store.close()


def test_a_recorded_log_runs_no_code_in_tests(home: Home, tmp_path: Path) -> None:
    assert home.run("log", "export", "box", str(tmp_path / "box.log")).exit_code == 0
    for log in (tmp_path / "box.log", home.settings.log):
        with pytest.raises(AssertionError, match=r"was written by pickle.*trust_pickle=True"):
            assert_replays(log, home.app)
    assert not home.trace.exists()
    with pytest.raises(AssertionError):
        assert_replays(tmp_path / "box.log", home.app, trust_pickle=True)
    assert home.trace.exists()


def test_a_header_in_many_chunks_hides_nothing(home: Home) -> None:
    class Source:
        trusts_pickle = False

        def __init__(self, size_bytes: int) -> None:
            with open_reader(home.settings.log) as reader:
                self.identity = reader.identity
                last = reader.summary().checkpoints[-1].checkpoint_id
                blob = b"".join(reader.checkpoint_chunks(last))
            self.chunks = [blob[at : at + size_bytes] for at in range(0, len(blob), size_bytes)]

        def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
            return iter(self.chunks)

    for size_bytes in (1, 3, 11, 12, 13, 50):
        with pytest.raises(PickleRefusedError):
            refuse_pickle(Source(size_bytes), [1])  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40)))
def test_whatever_a_state_begins_with_nothing_else_escapes(chunks: list[bytes]) -> None:
    assert serializer_of(chunks) is None
    assert serializer_of([b"IMMAPP\x01\0", *chunks]) in (None, "")


def test_the_store_is_asked_for_no_more_than_the_front(home: Home) -> None:
    store: LogStore = open_log(home.settings.log, "box")
    chunks = own_logs.stored_chunks(store, store.summary().checkpoints[-1].checkpoint_id)
    assert serializer_of(chunks) == "pickle"
    store.close()  # type: ignore[attr-defined]
