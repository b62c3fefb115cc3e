"""Who has the files of an encrypted log and not its key reads nothing of it, and can't exchange its rows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("cryptography")

from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.cli import main
from immortal.coordinator.archive.archive import Archive, restore
from immortal.coordinator.archive.archiver import Archiver
from immortal.coordinator.core.errors import DamagedLogError, LogError
from immortal.coordinator.core.interfaces import AuditEntry, SpilledBatch, Transaction
from immortal.coordinator.instances import own_logs
from immortal.coordinator.log import encryption
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import open as opening
from immortal.coordinator.log.authentication import LogKey, LogKeyError
from immortal.coordinator.log.backend import ENCRYPTION_KEY_VARIABLE, Append, Options, Place, Severity
from immortal.coordinator.log.backends.memory import MemoryBackend
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.format import ENCRYPTED_VERSION, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import BackupError, back_up, verify_log
from immortal.coordinator.notices import Notices
from immortal.coordinator.objects.store import Objects, store_of
from immortal.coordinator.service.process import STATUS_NO_RECOVERY
from immortal.coordinator.service.runtime import run_coordinator
from immortal.log import RowLogStore, open_log, open_reader
from tests.faults.sample_log import NAME, put_record, read_contents, write_log
from tests.helpers.cli import DEADLINE_S
from tests.helpers.far_backend import FarBackend
from tests.security import log_forger as forger
from tests.security.test_log_key_cli import Home

KEY, NEWER, OTHER = (LogKey(bytes([n]) * 32) for n in (1, 2, 3))
MAC_KEYS = (LogKey(bytes(range(32))),)
MARKERS = (b"<record ", b"<chunk ", b"<output of ", b"<impulse ", b"<spilled>", b"<said>")


def write_keys(path: Path, *keys: LogKey) -> None:
    path.write_text("".join(f"{key.secret.hex()}\n" for key in keys))
    path.chmod(0o600)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    write_keys(tmp_path / "key", KEY)
    return tmp_path / "key"


def encrypted(log: Path, key_file: Path) -> Place:
    place = place_of(log)
    place.encryption_key = str(key_file)
    return place


@pytest.fixture(params=[(), MAC_KEYS], ids=["encrypted", "authenticated, too"])
def mac_keys(request: pytest.FixtureRequest) -> tuple[LogKey, ...]:
    keys: tuple[LogKey, ...] = request.param
    return keys


@pytest.fixture
def log(tmp_path: Path, key_file: Path, mac_keys: tuple[LogKey, ...]) -> Place:
    place = encrypted(tmp_path / "log", key_file)
    write_log(place, keys=mac_keys)
    return place


def opened(log: Place, mac_keys: tuple[LogKey, ...]) -> contextlib.closing[RowLogStore]:
    return contextlib.closing(open_log(log, NAME, map_size_bytes=1 << 24, keys=mac_keys))


def in_plain(folder: Path) -> list[str]:
    """Return the files below ``folder`` that hold a marker."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [f"{path}: {marker!r}" for path in files for marker in MARKERS if marker in path.read_bytes()]


def findings(log: Place, mac_keys: tuple[LogKey, ...] = ()) -> list[str]:
    found = verify_log(log, NAME, keys=mac_keys).findings()
    return [finding.message for finding in found if finding.severity is not Severity.NOTE]


def test_all_of_a_log_is_read_again_and_nothing_of_it_is_on_the_disk(
    log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...]
) -> None:
    with opened(log, mac_keys) as store:
        put_record(store, 120)  # into the journal
        store.commit(Transaction(spilled=[SpilledBatch(500, 1, b"<spilled>" * 3, "carol")]))
        store.commit(Transaction(audit=[AuditEntry(1, "me", "<said>")]))
        put_record(store, 121, 40_000)
        put_record(store, 122)
        assert not in_plain(Path(log.location))
        shutil.copytree(log.location, tmp_path / "killed")  # with its journal
        assert len(store.read(0, 1 << 30)) == 123
    assert findings(log, mac_keys) == []
    killed = encrypted(tmp_path / "killed", tmp_path / "key")
    assert not in_plain(tmp_path / "killed")
    with opened(killed, mac_keys) as store:
        assert store.summary().last_sequence_id == 122
    if not mac_keys:
        write_log(tmp_path / "plain")
        assert in_plain(tmp_path / "plain")  # else the search would find nothing anywhere
        ours, plain = read_contents(log), read_contents(tmp_path / "plain")
        assert (ours.records[:120], ours.checkpoints) == (plain.records, plain.checkpoints)


def test_nobody_tries_guesses_with_a_stolen_log_key(tmp_path: Path, key_file: Path) -> None:
    log = encrypted(tmp_path / "log", key_file)
    write_log(log, keys=MAC_KEYS)
    with open_reader(log, NAME) as reader, reader.view() as view:
        rows = [(table, bytes(key)) for table in log_format.TABLES_OF_SEALS for key, _ in view.scan(table)]
        assert len(rows) > 120
        for table, key in [*rows, ("meta", log_format.META_SEAL)]:
            assert bytes(view.get(table, key) or b"") not in bytes(view.stored.get(table, key) or b"")


def test_a_log_without_encryption_is_as_it_always_was(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    with forger.written(tmp_path / "log") as (transaction, tables):
        keys = {bytes(key) for key, _ in transaction.cursor(tables["meta"])}
    assert not [key for key in keys if key.startswith(log_format.META_DATA_KEY)]


def test_a_log_without_its_key_is_not_read_and_says_so(
    log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = place_of(log.location)
    for attempt in (lambda: open_log(bare, NAME, keys=mac_keys), lambda: open_reader(bare, NAME)):
        with pytest.raises(LogKeyError, match=f"encrypted with the key {KEY.id}, and no key is given"):
            attempt()
    with pytest.raises(LogKeyError, match="no key is given"):
        findings(bare)
    write_keys(tmp_path / "other", OTHER)
    with pytest.raises(LogKeyError, match=f"and .*other has {OTHER.id}: add that key again"):
        open_reader(encrypted(Path(log.location), tmp_path / "other"), NAME)
    monkeypatch.setenv(ENCRYPTION_KEY_VARIABLE, log.encryption_key)
    with open_reader(log.location, NAME) as reader:  # as `immortal log diff` and the pipeline do
        assert reader.read(0, 1)


def test_a_plain_log_is_not_written_where_an_encrypted_one_is_meant(tmp_path: Path, key_file: Path) -> None:
    write_log(tmp_path / "log")
    place = encrypted(tmp_path / "log", key_file)
    with pytest.raises(LogKeyError, match="is not encrypted, but its settings have an 'encryption_key'"):
        open_log(place, NAME)
    with open_reader(place, NAME) as reader:
        assert reader.read(0, 1)


def test_an_older_program_refuses_an_encrypted_log(log: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    older = (log_format.FORMAT_VERSION, log_format.AUTHENTICATED_VERSION)
    monkeypatch.setattr(log_format, "FORMAT_VERSIONS_READ", older)
    monkeypatch.setattr(log_format, "ENCRYPTED_VERSION", log_format.AUTHENTICATED_VERSION)
    with pytest.raises(LogError, match="has format version 7, this program reads version 6: use the newer version"):
        open_reader(log, NAME)


def test_rows_that_were_exchanged_torn_or_put_in_plain_are_damaged(tmp_path: Path, key_file: Path) -> None:
    log = encrypted(tmp_path / "log", key_file)
    write_log(log)
    write_log(tmp_path / "plain")
    with forger.written(tmp_path / "plain") as (transaction, tables):
        plain = bytes(transaction.get(SEQUENCE_KEY.pack(7), db=tables["records"]))
    with forger.written(tmp_path / "log") as (transaction, tables):
        records = tables["records"]
        three, five = (bytes(transaction.get(SEQUENCE_KEY.pack(n), db=records)) for n in (3, 5))
        transaction.put(SEQUENCE_KEY.pack(3), five, db=records)
        transaction.put(SEQUENCE_KEY.pack(5), three[:20], db=records)
        transaction.put(SEQUENCE_KEY.pack(7), plain, db=records)
        transaction.put(SEQUENCE_KEY.pack(9), b"\xff" * 400, db=records)  # of a data key that is not there
        transaction.put(SEQUENCE_KEY.pack(1), three, db=tables["checkpoints"])
    with open_reader(log, NAME) as reader:
        damaged = [one.sequence_id for one in reader.records() if one.problem is not None]
    assert damaged == [3, 5, 7, 9]
    assert any("checkpoint 1 is damaged" in message for message in findings(log))


def test_a_data_key_of_another_log_is_refused(tmp_path: Path, key_file: Path) -> None:
    log = encrypted(tmp_path / "log", key_file)
    write_log(log)
    name = log_format.META_DATA_KEY + b"00000001"
    with forger.written(tmp_path / "log") as (transaction, tables):
        row = log_format.unseal(b"meta", name, bytes(transaction.get(name, db=tables["meta"])), encryption._WRAPPED_KEY)
        torn = encryption.WrappedKey(row.key_id, row.nonce, bytes(48))
        transaction.put(name, log_format.seal(b"meta", name, torn), db=tables["meta"])
    with pytest.raises(DamagedLogError, match=f"data key 1 of the log is not what {KEY.id} has wrapped"):
        open_reader(log, NAME)


@pytest.mark.parametrize("number", [b"zz", b"123456789"])
def test_a_data_key_without_a_number_is_damage(tmp_path: Path, key_file: Path, number: bytes) -> None:
    log = encrypted(tmp_path / "log", key_file)
    write_log(log)
    with forger.written(tmp_path / "log") as (transaction, tables):
        first = bytes(transaction.get(log_format.META_DATA_KEY + b"00000001", db=tables["meta"]))
        transaction.put(log_format.META_DATA_KEY + number, first, db=tables["meta"])
    assert "a data key without a number" in findings(log)[0]


def test_each_start_has_a_data_key_of_its_own_so_that_no_nonce_repeats(
    log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...]
) -> None:
    shutil.copytree(log.location, tmp_path / "restored")
    nonces = []
    for place in (log, encrypted(tmp_path / "restored", tmp_path / "key")):
        with opened(place, mac_keys) as store:
            put_record(store, 120)
            with store.backend.view() as view:
                assert [*encryption.wrapped_keys(view)] == [1, 2]
        with open_reader(place, NAME) as reader, reader.view() as view:
            values = [bytes(v) for table in encryption._ENCRYPTED_TABLES for _, v in view.stored.scan(table)]
            nonces.append(bytes(view.stored.get("records", SEQUENCE_KEY.pack(120)) or b""))
        assert len({value[:12] for value in values}) == len(values) > 120
    assert nonces[0][:12] == nonces[1][:12]  # as counted, and yet under another key
    assert nonces[0] != nonces[1]


def test_a_new_operators_key_wraps_all_data_keys_while_the_log_is_written(
    key_file: Path, mac_keys: tuple[LogKey, ...]
) -> None:
    log = place_of("memory:renewed")
    log.remove()
    log.encryption_key = str(key_file)
    write_log(log, keys=mac_keys)
    with opened(log, mac_keys) as store, open_reader(log, NAME) as before:
        put_record(store, 120)
        write_keys(key_file, NEWER, KEY)
        store.backend.renew_key()  # type: ignore[attr-defined]
        store.backend.renew_key()  # type: ignore[attr-defined]
        assert store.backend.must_append
        store.trim(keep_checkpoints=None)
        assert not store.backend.must_append
        write_keys(key_file, NEWER)
        put_record(store, 121)
        assert len(before.read(120, 1 << 20)) == 2  # by a reader that was there already
    with open_reader(log, NAME, keys=mac_keys) as reader, reader.view() as view:
        assert {one.key_id for one in encryption.wrapped_keys(view).values()} == {NEWER.id}
        assert [*encryption.wrapped_keys(view)] == [1, 2, 4], "no number is used for two keys, written or not"
        assert len(list(reader.values(0))) == 122


class SeenLock:
    """Lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waits = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


def test_a_renewal_during_the_first_append_wraps_its_data_key_too(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = place_of("memory:raced")
    log.remove()
    log.encryption_key = str(key_file)
    write_log(log)
    with opened(log, ()) as store:
        write_keys(key_file, NEWER, KEY)
        backend: Any = store.backend
        backend._lock = lock = SeenLock()
        renewal = threading.Thread(target=backend.renew_key)

        def append_beside(self: MemoryBackend, append: Append) -> None:
            monkeypatch.undo()
            renewal.start()
            assert lock.waits.wait(DEADLINE_S)
            self.append(append)

        monkeypatch.setattr(MemoryBackend, "append", append_beside)
        put_record(store, 120)
        renewal.join(DEADLINE_S)
        assert store.backend.must_append
        put_record(store, 121)
    with open_reader(log, NAME) as reader, reader.view() as view:
        assert {one.key_id for one in encryption.wrapped_keys(view).values()} == {NEWER.id}


def test_a_log_is_written_on_with_the_key_in_use_at_its_next_start(
    log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...]
) -> None:
    write_keys(tmp_path / "key", NEWER, KEY)
    with opened(log, mac_keys) as store:
        put_record(store, 120)
    write_keys(tmp_path / "key", NEWER)
    assert findings(log, mac_keys) == []


def test_backups_cuts_and_archives_are_encrypted(log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...]) -> None:
    back_up(log, NAME, tmp_path / "backup", mac_keys)
    with opened(log, mac_keys) as store:
        put_record(store, 120)
    assert back_up(log, NAME, tmp_path / "backup", mac_keys).records_copied == 1
    archive = Archive(Objects(store_of(f"file://{tmp_path}/archive", create=True), "there").below(NAME))
    with open_reader(log, NAME, keys=mac_keys) as reader:
        assert Archiver(archive, reader).store_moment() is not None
    moments = archive.moments()
    restored = encrypted(tmp_path / "restored", tmp_path / "key")
    assert restore(archive, NAME, moments, 0, restored, mac_keys).last_sequence_id == 120
    with LogCutter(log, NAME, mac_keys) as cutter:
        kept = cutter.cut(cutter.plan(100, force=True))
    with open_reader(encrypted(kept, tmp_path / "key"), NAME) as reader:
        assert reader.ends() == (100, 120)
        assert len(list(reader.values(100))) == 21
        assert reader.identity.format_version == ENCRYPTED_VERSION
    assert findings(log, mac_keys) == []
    assert not in_plain(tmp_path)


def test_a_log_in_plain_is_encrypted_by_a_copy(tmp_path: Path, key_file: Path, mac_keys: tuple[LogKey, ...]) -> None:
    write_log(tmp_path / "plain", keys=mac_keys)
    target = encrypted(tmp_path / "copy", key_file)
    made = back_up(tmp_path / "plain", NAME, target, mac_keys)
    assert (made.last_sequence_id, made.checkpoints) == (119, 2)
    assert not in_plain(tmp_path / "copy")
    assert findings(target, mac_keys) == []
    with open_reader(tmp_path / "plain", NAME) as plain, open_reader(target, NAME, keys=mac_keys) as copy:
        assert list(copy.values(0)) == list(plain.values(0))
        assert (copy.macs is not None) == bool(mac_keys)
        for header in plain.summary().checkpoints:
            ours, theirs = (b"".join(one.checkpoint_chunks(header.checkpoint_id)) for one in (plain, copy))
            assert ours == theirs
    with opened(target, mac_keys) as store:
        put_record(store, 120)
    assert findings(target, mac_keys) == []
    with pytest.raises(BackupError, match="already: an encrypted copy needs an empty place"):
        back_up(tmp_path / "plain", NAME, encrypted(tmp_path / "copy", key_file), mac_keys)


def test_an_archive_in_plain_is_not_restored_where_an_encrypted_log_is_meant(tmp_path: Path, key_file: Path) -> None:
    write_log(tmp_path / "plain")
    archive = Archive(Objects(store_of(f"file://{tmp_path}/archive", create=True), "there").below(NAME))
    with open_reader(tmp_path / "plain", NAME) as reader:
        assert Archiver(archive, reader).store_moment() is not None
    with pytest.raises(LogKeyError, match="is not encrypted, but its settings have an 'encryption_key': remove that"):
        restore(archive, NAME, archive.moments(), 0, encrypted(tmp_path / "restored", key_file), ())
    assert not (tmp_path / "restored").exists()


def test_a_backup_in_plain_does_not_go_on_encrypted(tmp_path: Path, key_file: Path) -> None:
    write_log(tmp_path / "plain")
    back_up(tmp_path / "plain", NAME, tmp_path / "backup")
    target = encrypted(tmp_path / "copy", key_file)
    back_up(tmp_path / "plain", NAME, target)
    with pytest.raises(BackupError, match="has a backup of another log"):
        back_up(target, NAME, tmp_path / "backup")


def test_appends_are_begun_once_the_data_key_is_there(key_file: Path) -> None:
    place = place_of("memory:far")
    place.remove()
    place.encryption_key = str(key_file)
    write_log(place, 2)
    far = FarBackend(cast(MemoryBackend, place.open(NAME, Options())))
    backend = encryption.encrypted_backend(far, place.encryption_key, writes=True)
    appends = [Append(n - 1, far.fence, records=[(n, b"<record %d>" % n)]) for n in (2, 3)]
    assert not backend.begin_append(appends[0])
    backend.append(appends[0])
    assert backend.begin_append(appends[1])
    far.answer(1)
    assert backend.finish_oldest(wait=True)
    with backend.view() as view:
        assert [bytes(value) for _, value in view.scan("records", SEQUENCE_KEY.pack(2))] == [
            b"<record 2>",
            b"<record 3>",
        ]
        assert not any(b"<record" in bytes(value) for _, value in view.stored.scan("records"))
        assert next(bytes(value) for _, value in view.scan_back("records")) == b"<record 3>"


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, key_file: Path) -> Home:
    made = Home(tmp_path / "home")
    made.register("--encryption-key", str(key_file), "--log-key", "none")
    return made


def test_commands_read_an_encrypted_log_and_take_a_new_key(home: Home, tmp_path: Path, key_file: Path) -> None:
    write_log(own_logs.place_of(home.settings))
    assert "119" in home.run("log", "show", NAME, "--from", "119").stdout
    assert "sound" in home.run("log", "verify", NAME).stdout
    assert home.run("log", "encryption", NAME).stdout == (
        f"the log of {NAME} is encrypted: 1 data key, wrapped by {KEY.id}\n"
    )
    write_keys(key_file, NEWER, KEY)
    said = json.loads(home.run("log", "encryption", NAME, "--renew", "--json").stdout)
    assert said == {"name": NAME, "keys": [NEWER.id], "data_keys": 2}
    key_file.unlink()
    for command in (("log", "show"), ("log", "verify"), ("log", "encryption"), ("recover",), ("log", "backup")):
        target = [str(tmp_path / "backup")] if "backup" in command else []
        assert home.run(*command, NAME, *target, status=1).output == (
            f"error: there is no key in {key_file}: the key that encrypts the log was expected there\n"
        ), command
    assert run_coordinator(home.settings, home.registry, Notices(NAME)) == STATUS_NO_RECOVERY


def test_an_encrypted_log_gets_a_log_key_at_its_next_start(tmp_path: Path, key_file: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("--encryption-key", str(key_file), "--log-key")
    write_log(own_logs.place_of(home.settings))
    home.start()
    assert home.key()["first_sequence_id"] == 120
    assert "authenticated with key" in home.run("log", "verify", NAME).stdout
    home.edit('log_key = "file"\n', 'log_key = "none"\n')
    home.run("log", "key", NAME, "--off", "--yes")
    home.start()
    with open_reader(own_logs.place_of(home.settings), NAME) as reader:
        assert (reader.marker, reader.identity.format_version) == (None, ENCRYPTED_VERSION)


def test_a_log_in_plain_goes_on_encrypted(home: Home, tmp_path: Path) -> None:
    write_log(home.settings.log)
    assert run_coordinator(home.settings, home.registry, Notices(NAME)) == STATUS_NO_RECOVERY
    assert "is not encrypted" in home.run("log", "encryption", NAME, status=1).output
    home.run("log", "copy", NAME, "--to", str(tmp_path / "new"), "--switch")
    assert "is encrypted" in home.run("log", "encryption", NAME).stdout
    assert not in_plain(tmp_path / "new")
    home.start()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("key", "the absolute path of a file"),
        ("env:", "the absolute path of a file"),
        ("HOME/key", "the key lies in the home whose log it encrypts"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, value: str, message: str) -> None:
    given = value.replace("HOME", str(tmp_path))
    said = CliRunner().invoke(
        main, ["--home", str(tmp_path), "register", NAME, "--peer", "tcp://127.0.0.1:*", "--encryption-key", given]
    )
    assert said.exit_code == (1 if value.startswith("HOME") else 2)
    assert message in said.output.replace("\n", " ")


# --- the operator's key -----------------------------------------------------------------------------------------------


def test_a_key_comes_from_the_environment_or_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", f"{NEWER.secret.hex()}\n{KEY.secret.hex()}\n")
    assert encryption.read_keys("env:THE_KEY") == (NEWER, KEY)
    assert encryption.read_keys(f"command:echo {KEY.secret.hex()}") == (KEY,)


def test_a_command_is_run_once_for_each_time_that_a_log_is_opened(
    log: Place, tmp_path: Path, mac_keys: tuple[LogKey, ...]
) -> None:
    runs = tmp_path / "runs"
    log.encryption_key = f"command:sh -c 'echo >> {runs}; cat {tmp_path}/key'"
    for _ in range(3):
        with opened(log, mac_keys):
            pass
    assert runs.read_text() == "\n" * 3
    with open_reader(log, NAME):
        assert runs.read_text() == "\n" * 4


def test_who_has_no_key_for_a_new_log_is_told_so(key_file: Path) -> None:
    place = place_of("memory:unwritten")
    place.remove()
    place.encryption_key = str(key_file)
    opening.create_log(place, NAME).close()  # it ends before its first append
    place.encryption_key = ""
    with pytest.raises(LogKeyError, match="log of 'alice' is encrypted, and no key is given"):
        open_log(place, NAME)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("env:NO_SUCH_KEY", "the environment has no NO_SUCH_KEY"),
        ("env:WRONG_KEY", "the environment variable WRONG_KEY does not hold keys"),
        ("/no/such/key", "there is no key in /no/such/key"),
        ("command:/no/such/program", "cannot be read from '/no/such/program'"),
        (f"command:{sys.executable} -c 'import sys; sys.exit(\"locked\")'", "ended with 1: locked"),
        ("command:printf '\\247'", "the output of .* does not hold keys"),
    ],
)
def test_a_key_that_is_not_there_is_an_error(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_KEY", "secret")
    with pytest.raises(LogKeyError, match=message) as raised:
        encryption.read_keys(source)
    assert not [told for told in ("secret", "0xa7") if told in str(raised.value)]


def test_a_key_that_others_can_read_is_refused(key_file: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(LogKeyError, match="has mode 0644, expected 0600"):
        encryption.read_keys(str(key_file))


def test_without_the_package_the_error_says_what_to_install(log: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "immortal.coordinator.log.encryption")
    monkeypatch.delattr("immortal.coordinator.log.encryption", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(LogKeyError, match=r"needs the extra encryption .*pip install .*\[encryption\]"):
        open_reader(log, NAME)


# --- any rows ---------------------------------------------------------------------------------------------------------

ROWS = st.tuples(st.sampled_from(encryption._ENCRYPTED_TABLES), st.binary(max_size=40), st.binary(max_size=200))


@settings(deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=8), flipped=st.integers(0), other=ROWS)
def test_what_is_encrypted_comes_back_and_only_in_its_place(
    rows: list[tuple[str, bytes, bytes]], flipped: int, other: tuple[str, bytes, bytes]
) -> None:
    os.environ["PROPERTY_KEY"] = KEY.secret.hex()
    place = place_of("memory:property")
    place.remove()
    place.encryption_key = "env:PROPERTY_KEY"
    with contextlib.closing(opening.create_log(place, NAME)) as store, store.backend.view() as view:
        keys = encryption.DataKeys(LogIdentity(7, NAME, 1, 2), place.encryption_key)
        encryptor = keys.new_encryptor(view.stored)
        keys._ciphers[1] = encryptor._cipher
        for table, key, value in rows:
            stored = bytes(encryptor.encrypt(table, key, value))
            assert keys.decrypt(view.stored, table, key, stored) == value
            if (table, key) != other[:2] and value:
                assert keys.decrypt(view.stored, other[0], other[1], stored) == b""
            at = flipped % (8 * len(stored))
            changed = bytearray(stored)
            changed[at // 8] ^= 1 << at % 8
            assert keys.decrypt(view.stored, table, key, bytes(changed)) == b""
            assert keys.decrypt(view.stored, table, key, stored[: flipped % len(stored)]) == b""
