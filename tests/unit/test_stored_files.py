"""Stored files: contents go round, damage is found before the end is given out, handlers are refused, logs are read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import immortal
from immortal import EffectFailed, Immortal, StoredFile, rpc, store_chunks, store_file
from immortal.appsdk.effects import stored_files
from immortal.appsdk.effects.stored_files import STORE_VARIABLE, file_store
from immortal.cli import main
from immortal.cli.files import _names_in
from immortal.coordinator.config.values import FileStore
from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.format import CHUNK_KEY, CRC_SIZE_BYTES, META_TRIMMED
from immortal.coordinator.log.identity import meta_row
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.reader import LogReader
from immortal.errors import StoredFileError, UsageError
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError
from immortal.testing import Environment
from tests.helpers.homes import write_home
from tests.helpers.memory_logs import damage_record


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store = tmp_path / "store"
    monkeypatch.setenv(STORE_VARIABLE, str(store))
    monkeypatch.setattr(stored_files, "CHUNK_SIZE_BYTES", 7)
    return store


@pytest.fixture(params=["folder", "url"])
def any_store(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "url":
        pytest.importorskip("obstore")
        monkeypatch.setenv(STORE_VARIABLE, f"file://{folder}")
    return folder


def content_of(stored: StoredFile) -> bytes:
    with stored.open() as content:
        return content.read()


def read_bytewise(stored: StoredFile, given_out: bytearray) -> None:
    with stored.open() as content:
        while byte := content.read(1):
            given_out += byte


@pytest.mark.parametrize("size_bytes", [0, 1, 6, 7, 8, 14, 50])
def test_a_content_goes_round(any_store: Path, tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "source").write_bytes(data)
    stored = store_file(tmp_path / "source")
    assert stored == StoredFile(f"sha256-{hashlib.sha256(data).hexdigest()}", size_bytes)
    assert store_chunks(data[at : at + 3] for at in range(0, size_bytes, 3)) == stored
    assert content_of(stored) == data
    stored.save(str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == data
    assert os.listdir(any_store) == [stored.name]


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(1, 30)))
def test_reads_of_any_size_give_the_content(chunks: list[bytes], sizes: list[int]) -> None:
    stored = store_chunks(chunks)
    expected = io.BytesIO(b"".join(chunks))
    with stored.open() as content:
        for size in sizes:
            assert content.read(size) == expected.read(size)
        assert content.read() == expected.read()


def test_damage_of_each_byte_is_found_before_the_end_is_given_out(any_store: Path, tmp_path: Path) -> None:
    data = bytes(range(17))
    stored = store_chunks([data])
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    damaged += [data[:at] for at in range(len(data))] + [data + b"x", data + bytes(20)]
    for one in damaged:
        (any_store / stored.name).write_bytes(one)
        given_out = bytearray()
        with pytest.raises(StoredFileError, match=rf"{stored.name} in .* is damaged"):
            read_bytewise(stored, given_out)
        assert len(given_out) < len(data)
        with pytest.raises(StoredFileError, match="is damaged"):
            stored.save(tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_a_missing_file_is_told_with_its_store(any_store: Path) -> None:
    stored = store_chunks([b"data"])
    (any_store / stored.name).unlink()
    with pytest.raises(StoredFileError, match=rf"{stored.name} is not in the store .*{any_store}: .*'file_store'"):
        stored.open()


def test_what_can_not_be_stored_is_told(tmp_path: Path, folder: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    wrong = {".": "is no file", "pipe": "is no file", "missing": "No such file", "a\0b": "null byte"}
    for name, problem in wrong.items():
        with pytest.raises(StoredFileError, match=f"can't be stored: .*{problem}"):
            store_file(tmp_path / name)
    with pytest.raises(TypeError, match=r"a bytes came, chunks were expected: store_chunks\(\[<bytes>\]\)"):
        store_chunks(b"a whole content")  # type: ignore[arg-type]
    assert not folder.exists() or not os.listdir(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_a_file_without_permission_is_told(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    with pytest.raises(StoredFileError, match="Permission denied"):
        store_file(tmp_path / "secret")


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20))

    def growing() -> Iterator[bytes]:
        for chunk in stored_files._chunks_of(source):
            with open(source, "ab") as file:
                file.write(b"x" * (file.tell() < 100))
            yield chunk

    with pytest.raises(StoredFileError, match="changed while it was stored"):
        store_chunks(growing())
    assert os.listdir(folder) == []


def test_a_full_disk_is_told_with_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(stored_files, "open_beside", lambda path: (full, path.with_name("new")))
    with pytest.raises(OSError, match=f"No space left on device: '{folder}'"):
        store_chunks([b"data"])


def test_a_url_of_no_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv(STORE_VARIABLE, "s4://bucket/path")
    with pytest.raises(immortal.errors.ImmortalError, match=r"'s4://bucket/path' names no store: .* s3://"):
        store_chunks([b"data"])


@pytest.mark.parametrize(
    ("place", "is_one"),
    [("/srv/files", True), ("s3://bucket/x", True), ("s4://bucket/x", False), ("files", False), ("s3://", False)],
)
def test_the_setting_takes_folders_and_urls(place: str, is_one: bool) -> None:
    try:
        msgspec.convert(place, FileStore)
    except msgspec.ValidationError:
        assert not is_one
    else:
        assert is_one


def test_a_handle_from_outside_names_no_other_file() -> None:
    for name in ("sha256-" + "A" * 64, "sha256-" + "a" * 64 + "\n", "../" + "a" * 68):
        with pytest.raises(decoding.DecodeError):
            decoding.decode(msgspec.msgpack.encode({"name": name, "size_bytes": 1}), type=StoredFile)


def test_a_file_that_is_stored_again_is_not_removed(folder: Path) -> None:
    stored, store = store_chunks([b"data"]), file_store()
    os.utime(folder / stored.name, (1000, 1000))
    assert [one.stored_s for one in store.listed()] == [1000]
    store_chunks([b"data"])
    store.remove_before(stored.name, 2000)
    assert content_of(stored) == b"data"
    os.utime(folder / stored.name, (1000, 1000))
    store.remove_before(stored.name, 2000)
    assert store.listed() == []


def test_files_of_others_in_the_same_place_are_not_seen(any_store: Path) -> None:
    stored = store_chunks([b"data"])
    for name in ("holiday.jpg", f"{stored.name}.bak", "sha256-short"):
        (any_store / name).write_bytes(b"mine")
    assert [one.name for one in file_store().listed()] == [stored.name]


@pytest.mark.parametrize("is_stored_again", [False, True])
def test_a_removal_that_a_crash_interrupted_loses_nothing(folder: Path, is_stored_again: bool) -> None:
    stored = store_chunks([b"data"])
    os.replace(folder / stored.name, folder / f".removed.{stored.name}")
    if is_stored_again:
        store_chunks([b"data"])
    assert [one.name for one in file_store().listed()] == [stored.name]
    assert content_of(stored) == b"data"
    assert os.listdir(folder) == [stored.name]


# --- services ---------------------------------------------------------------------------------------------------------


def length(stored: StoredFile) -> int:
    return len(content_of(stored))


class Vault(Immortal):
    kept: dict[str, StoredFile]

    def __init__(self) -> None:
        self.kept = {}

    @rpc
    async def keep(self, path: Path) -> StoredFile:
        stored = await immortal.effect(store_file, path)
        await immortal.step(self.note, str(path), stored)
        return stored

    @rpc
    def note(self, path: str, stored: StoredFile) -> None:
        self.kept[path] = stored

    @rpc
    async def size(self, stored: StoredFile) -> int:
        return await immortal.effect(length, stored)

    @rpc
    def look(self, stored: StoredFile) -> None:
        stored.open()


def test_effects_store_and_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with Environment() as env:
        vault = env.start(Vault, "vault", effects={store_file: store_file, length: length})
        stored = vault.call(Vault.keep, tmp_path / "a")
        assert vault.call(Vault.size, stored) == 5
        assert vault.state.kept == {str(tmp_path / "a"): stored}
        write_home(env, tmp_path / "home", {"vault": f"{__name__}:Vault"})
    with own_logs.open_reader(Registry(tmp_path / "home").load("vault")) as reader:
        assert _names_in([reader]) == {stored.name}


def test_handlers_are_refused() -> None:
    vault = Environment().start(Vault, "vault")
    with pytest.raises(UsageError, match=r"open\(\).*immortal.effect"):
        vault.call(Vault.look, store_chunks([b"data"]))


def test_an_effect_that_can_not_store_fails_at_once(tmp_path: Path) -> None:
    vault = Environment().start(Vault, "vault", effects={store_file: store_file})
    with pytest.raises(EffectFailed, match=r"StoredFileError: .*is no file"):
        vault.call(Vault.keep, tmp_path)


def test_an_effect_of_a_file_that_is_missing_is_not_tried_again() -> None:
    assert not immortal.Retry().is_for(StoredFileError("missing"))
    assert immortal.Retry().is_for(OSError(28, "No space left on device"))


# --- removal ----------------------------------------------------------------------------------------------------------


class _ReaderOfOneThatRuns(LogReader):
    then: Callable[[], object] = staticmethod(lambda: None)

    def release(self) -> None:
        """Let something happen once behind the first look at the log."""
        super().release()
        then, self.then = self.then, lambda: None
        then()


def test_a_name_is_found_across_the_pieces_of_a_checkpoint() -> None:
    name = b"sha256-" + b"0a" * 32
    for cut in range(len(name) + 1):
        store = MemoryLogStore()
        for index, piece in enumerate((b"..." + name[:cut], name[cut:] + b"...")):
            store.backend.durable.put("chunks", CHUNK_KEY.pack(1, index), bytes(CRC_SIZE_BYTES) + piece)
        assert _names_in([LogReader(store.backend)]) == {name.decode()}


def test_a_handle_that_moves_to_a_log_that_was_read_is_found() -> None:
    stored = store_chunks([b"data"])
    with Environment() as env:
        vault = env.start(Vault, "vault")
        reader = _ReaderOfOneThatRuns(env._world.nodes["vault"].store.backend)
        reader.then = lambda: vault.call(Vault.note, "a", stored)
        assert _names_in([reader, LogReader(MemoryLogStore().backend)]) == {stored.name}


def test_where_a_log_is_trimmed_while_it_is_read_nothing_is_known() -> None:
    store = MemoryLogStore()
    reader = _ReaderOfOneThatRuns(store.backend)
    table, key, value = meta_row(META_TRIMMED, 10)
    reader.then = lambda: store.backend.durable.put(table, key, bytes(value))
    with pytest.raises(FailedError, match="was trimmed while it was read"):
        _names_in([reader])


def test_where_a_record_is_damaged_nothing_is_known() -> None:
    with Environment() as env:
        vault = env.start(Vault, "vault")
        vault.call(Vault.note, "a", store_chunks([b"data"]))
        store = env._world.nodes["vault"].store.copy()
    damage_record(store, store.last_sequence_id, 40)
    with pytest.raises(DamagedLogError):
        _names_in([LogReader(store.backend)])


def test_a_row_that_is_not_decrypted_is_damage() -> None:
    store = MemoryLogStore()
    store.backend.durable.put("chunks", CHUNK_KEY.pack(1, 0), b"")
    with pytest.raises(FailedError, match="'chunks'"):
        _names_in([LogReader(store.backend)])


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["--home", str(folder / "home"), "files", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_puts_and_gets(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    status, handle = run(tmp_path, "put", str(tmp_path / "source"))
    assert (status, decoding.decode_json(handle, type=StoredFile)) == (0, store_chunks([b"data"]))
    assert run(tmp_path, "get", handle, str(tmp_path / "target")) == (0, "")
    assert (tmp_path / "target").read_bytes() == b"data"
    status, said = run(tmp_path, "put", str(tmp_path))
    assert (status, "is no file" in said) == (1, True)
    status, said = run(tmp_path, "get", "sha256-1", "target")
    assert (status, '{"name": "sha256-...", "size_bytes": ...} was expected' in said) == (2, True)
    status, said = run(tmp_path, "get", handle, str(tmp_path / "missing" / "target"))
    assert (status, "No such file" in said) == (1, True)


def test_without_a_log_nothing_is_removed(tmp_path: Path, folder: Path) -> None:
    stored = store_chunks([b"data"])
    os.utime(folder / stored.name, (1000, 1000))
    registry = Registry(tmp_path / "home")
    registry.register("vault", "tcp://127.0.0.1:*", file_store=str(folder))
    status, said = run(tmp_path, "gc")
    assert (status, "'vault' has not been started yet: there is no log in" in said) == (1, True)
    assert content_of(stored) == b"data"


def test_what_no_log_names_is_removed_where_the_setting_says(tmp_path: Path, folder: Path) -> None:
    kept, unused = store_chunks([b"kept"]), store_chunks([b"unused"])
    with Environment() as env:
        env.start(Vault, "vault").call(Vault.note, "a", kept)
        write_home(env, tmp_path / "home", {"vault": f"{__name__}:Vault"})
    settings = tmp_path / "home" / "vault.toml"
    settings.write_text(f'file_store = "{folder}"\n{settings.read_text()}')
    assert run(tmp_path, "gc") == (0, f"{folder}: 2 files; removed: 0, 0 B\n")
    for one in (kept, unused):
        os.utime(folder / one.name, (1000, 1000))
    assert run(tmp_path, "gc", "--dry-run") == (0, f"{folder}: 2 files; would be removed: 1, 6 B\n")
    assert run(tmp_path, "gc") == (0, f"{folder}: 2 files; removed: 1, 6 B\n")
    assert os.listdir(folder) == [kept.name]
