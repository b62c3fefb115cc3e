"""An archive of a log: what comes back is the log as it was, byte for byte, at each of its moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from obstore.store import MemoryStore

from immortal.coordinator.archive.archive import Archive, Cipher, restore
from immortal.coordinator.archive.archiver import Archiver
from immortal.coordinator.archive.follower import Follower, Options, prune
from immortal.coordinator.archive.format import (
    MOMENTS,
    ArchiveError,
    ConflictError,
    Moment,
    Retention,
    index_of,
    moment_name,
)
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.log.authentication import LogKey, LogKeyError
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.format import ALL_TABLES
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import back_up
from immortal.coordinator.objects import DamagedObjectError, StoreError
from immortal.coordinator.objects.store import Objects, Stored, store_of
from immortal.log import RowLogStore, create_log, open_log, open_reader
from tests.faults.sample_log import COMMITTER_ID, NAME, put_checkpoint, put_record, write_log
from tests.helpers.postgres import Postgres

SEGMENT_SIZE_BYTES = 20_000
DAY_NS = 86_400 * 10**9
Rows = dict[str, dict[bytes, bytes]]


class ByDay(Objects):
    """A store in which, from when on that is wanted, manifest N is of day N, and all else of day 0."""

    is_by_day = False

    def listed(self, folder: str = "") -> list[Stored]:
        if not self.is_by_day:
            return super().listed(folder)
        return [stored._replace(modified_s=day_s(stored.name)) for stored in super().listed(folder)]


def day_s(name: str) -> float:
    return int(name.removeprefix(MOMENTS)) * DAY_NS / 1e9 if name.startswith(MOMENTS) else 0.0


def in_memory(cipher: Cipher | None = None) -> Archive:
    return Archive(Objects(MemoryStore(), "memory:///").below(NAME), cipher)


def opened(log: Path, keys: Sequence[LogKey] = ()) -> RowLogStore:
    return open_log(log, NAME, map_size_bytes=1 << 26, keys=keys)


def shipped(archive: Archive, log: Path, keys: Sequence[LogKey] = (), *, anew: bool = False) -> Moment | None:
    with open_reader(log, NAME, keys=keys) as reader:
        return Archiver(archive, reader, new_history=anew, segment_size_bytes=SEGMENT_SIZE_BYTES).store_moment()


def all_rows(log: Path) -> Rows:
    with open_reader(log, NAME) as reader, reader.view() as view:
        return {
            table: {
                bytes(key): bytes(value)
                for key, value in view.scan(table)
                if (table, bytes(key)) != ("meta", b"journal")
            }
            for table in ALL_TABLES
        }


def brought_back(archive: Archive, target: Path, number: int | None = None, keys: Sequence[LogKey] = ()) -> Rows:
    moments = archive.moments()
    index = len(moments) - 1 if number is None else [moment.number for moment in moments].index(number)
    restore(archive, moments[index].instance, moments, index, place_of(target), keys)
    return all_rows(target)


def test_what_comes_back_is_the_log(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    archive = in_memory()
    moment = shipped(archive, tmp_path / "log")
    assert moment is not None
    assert (moment.number, moment.last_sequence_id, len(moment.checkpoints), moment.begins) == (1, 119, 2, True)
    assert len(moment.segments) > 3
    assert brought_back(archive, tmp_path / "back") == all_rows(tmp_path / "log")
    store = opened(tmp_path / "back")
    put_record(store, 120)
    store.close()


def grow(log: Path, step: int) -> None:
    """By some records and a checkpoint, on day ``step``; what is older than two checkpoints goes."""
    store = opened(log)
    last = store.summary().last_sequence_id
    for number in range(last + 1, last + 20):
        put_record(store, number, 900, step * DAY_NS)
    put_checkpoint(store, 10 + step, last + 7)
    while store.trim(keep_checkpoints=2):
        pass
    store.commit(Transaction(peers={f"peer-{step}": 6}, acknowledged={"carol": last}))
    store.close()


def test_each_moment_comes_back_as_it_was(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    archive, were = in_memory(), []
    for step in range(6):
        grow(tmp_path / "log", step)
        were.append(all_rows(tmp_path / "log"))
        assert shipped(archive, tmp_path / "log") is not None
    for number, was in enumerate(were, start=1):
        assert brought_back(archive, tmp_path / f"back-{number}", number) == was


def test_one_archiver_sends_what_has_changed(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    archive = in_memory()
    with open_reader(tmp_path / "log", NAME) as reader:
        archiver = Archiver(archive, reader, segment_size_bytes=SEGMENT_SIZE_BYTES)
        whole = archiver.store_moment()
        assert archiver.store_moment() is None
    assert shipped(archive, tmp_path / "log") is None, "nothing is new to another one, either"
    assert whole is not None
    assert whole.state is not None


def test_an_older_moment_by_record_and_by_time(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    archive = in_memory()
    shipped(archive, tmp_path / "log")
    store = opened(tmp_path / "log")
    put_record(store, 40)
    store.close()
    shipped(archive, tmp_path / "log")
    moments = archive.moments()
    assert [moment.last_sequence_id for moment in moments] == [39, 40]
    assert index_of(moments, until_ns=None, until_record=39) == 0
    assert index_of(moments, until_ns=None, until_record=None) == 1
    assert index_of(moments, until_ns=moments[1].time_ns - 1, until_record=None) == 0
    with pytest.raises(ArchiveError, match="oldest moment of 'alice' in the archive ends with record 39"):
        index_of(moments, until_ns=None, until_record=38)


class DyingObjects(Objects):
    """An archiver that is killed before one of its objects: it has no state but what the store has."""

    puts_left = 0

    def put_new(self, name: str, data: bytes) -> bool:
        if self.puts_left == 0:
            raise StoreError("killed")
        self.puts_left -= 1
        return super().put_new(name, data)


def test_an_archiver_killed_between_any_two_objects_leaves_what_was_there(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 60)
    store = MemoryStore()
    was: Rows | None = None
    kills = 0
    for puts in range(200):
        objects = DyingObjects(store, "memory:///", f"{NAME}/")
        objects.puts_left = puts % 17
        try:
            made = shipped(Archive(objects), tmp_path / "log")
        except StoreError:
            kills += 1
            made = None
        archive = Archive(Objects(store, "memory:///", f"{NAME}/"))
        if made is not None:
            was = all_rows(tmp_path / "log")
            log = opened(tmp_path / "log")
            put_record(log, log.summary().last_sequence_id + 1, 25_000)
            put_checkpoint(log, log.summary().checkpoints[-1].checkpoint_id + 1, log.summary().last_sequence_id)
            log.close()
        if puts % 13 == 0 and was is not None:
            assert brought_back(archive, tmp_path / f"back-{puts}") == was
        if made is not None and made.number == 8:
            break
    else:
        pytest.fail("it never came so far")
    assert kills > 10


def test_a_damaged_or_missing_object_is_named(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 60)
    url = f"file://{tmp_path}/archive"
    archive = Archive(Objects(store_of(url), url).below(NAME))
    shipped(archive, tmp_path / "log")
    moments = archive.moments()
    folder = tmp_path / "archive" / NAME
    names = [part.name for part in (*moments[0].new_parts, *moments[0].checkpoint_parts)]
    assert len(names) > 4
    for number, name in enumerate(names):
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-3] + bytes((whole[-3] ^ 1,)) + whole[-2:])
        with pytest.raises(DamagedObjectError, match=f"{name} is damaged"):
            brought_back(archive, tmp_path / f"damaged-{number}")
        path.unlink()
        with pytest.raises(DamagedObjectError, match=f"{name} is missing"):
            brought_back(archive, tmp_path / f"damaged-{number}")
        path.write_bytes(whole)
        assert not place_of(tmp_path / f"damaged-{number}").exists()
    manifest = folder / moment_name(1)
    manifest.write_bytes(manifest.read_bytes().replace(b'"number":1', b'"number":2'))
    with pytest.raises(DamagedObjectError, match="moments/000000000001 is damaged"):
        archive.moments()


def test_it_does_not_overwrite_a_log(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    archive = in_memory()
    shipped(archive, tmp_path / "log")
    was = all_rows(tmp_path / "log")
    with pytest.raises(ArchiveError, match=r"there is a log in .*/log already"):
        brought_back(archive, tmp_path / "log")
    assert all_rows(tmp_path / "log") == was


def test_a_damaged_record_is_not_archived(tmp_path: Path) -> None:
    from immortal.coordinator.core.errors import DamagedLogError

    write_log(tmp_path / "log", 20)
    path = tmp_path / "log" / "data.mdb"
    data = bytearray(path.read_bytes())
    at = data.index(b"<record 13>" * 3)
    data[at + 4] ^= 1
    path.write_bytes(data)
    archive = in_memory()
    with pytest.raises(DamagedLogError, match="record 13 is damaged"):
        shipped(archive, tmp_path / "log")
    assert archive.last() is None


def test_two_archivers_of_one_log_write_one_history(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    archive = in_memory()
    with open_reader(tmp_path / "log", NAME) as reader:
        late = Archiver(archive, reader)
        assert Archiver(archive, reader).store_moment() is not None
        with pytest.raises(ConflictError, match="another archiver has written moment 1"):
            late.store_moment()
    assert brought_back(archive, tmp_path / "back") == all_rows(tmp_path / "log")


def test_a_stale_copy_cannot_go_on_with_the_archive(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    back_up(tmp_path / "log", NAME, tmp_path / "stale")
    archive = in_memory()
    for log, number in ((tmp_path / "stale", 900), (tmp_path / "log", 300)):
        store = opened(log)
        put_record(store, 20, number)
        store.close()
    shipped(archive, tmp_path / "log")
    with pytest.raises(ArchiveError, match="has another record 20 than the archive"):
        shipped(archive, tmp_path / "stale")
    store = opened(tmp_path / "log")
    store.commit(Transaction(epoch=3))
    store.close()
    shipped(archive, tmp_path / "log")
    with pytest.raises(ArchiveError, match="it is in epoch 2, the archive has epoch 3: a stale copy"):
        shipped(archive, tmp_path / "stale")
    made = shipped(archive, tmp_path / "stale", anew=True)
    assert made is not None
    assert made.begins
    assert brought_back(archive, tmp_path / "back") == all_rows(tmp_path / "stale")
    assert brought_back(archive, tmp_path / "before", made.number - 1) == all_rows(tmp_path / "log")


def test_a_log_that_was_cut_is_archived_anew_when_told(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    archive = in_memory()
    shipped(archive, tmp_path / "log")
    with LogCutter(tmp_path / "log", NAME) as cutter:
        cutter.cut(cutter.plan(30, force=True))
    with pytest.raises(ArchiveError, match="it ends with record 29, the archive with record 39"):
        shipped(archive, tmp_path / "log")


def test_another_log_of_that_name_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    archive = in_memory()
    shipped(archive, tmp_path / "log")
    create_log(tmp_path / "other", NAME, committer_id=COMMITTER_ID + 1, map_size_bytes=1 << 24).close()
    with pytest.raises(ArchiveError, match="is the archive of another log: of 'alice', committer 77"):
        shipped(archive, tmp_path / "other", anew=True)


def test_what_was_trimmed_before_it_was_archived_is_said(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    archive = in_memory()
    shipped(archive, tmp_path / "log")
    store = opened(tmp_path / "log")
    for number in range(40, 80):
        put_record(store, number)
    put_checkpoint(store, 5, 60)
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    said: list[str] = []
    with open_reader(tmp_path / "log", NAME) as reader:
        moment = Archiver(archive, reader, report=said.append).store_moment()
    assert moment is not None
    assert moment.begins
    assert said == [
        "begins anew: the log has trimmed records 40 to 60 before they were archived: no moment among them can be"
        " brought back"
    ]
    assert brought_back(archive, tmp_path / "back") == all_rows(tmp_path / "log")
    assert len(brought_back(archive, tmp_path / "before", 1)["records"]) == 40


def test_a_log_with_a_key_comes_back_with_its_macs(tmp_path: Path) -> None:
    keys = [LogKey.new()]
    write_log(tmp_path / "log", 60, keys)
    archive = in_memory()
    shipped(archive, tmp_path / "log", keys)
    store = opened(tmp_path / "log", keys)
    for number in range(60, 70):
        put_record(store, number)
    put_checkpoint(store, 5, 65)
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    shipped(archive, tmp_path / "log", keys)
    assert brought_back(archive, tmp_path / "back", keys=keys) == all_rows(tmp_path / "log")
    store = opened(tmp_path / "back", keys)
    put_record(store, 70)
    store.close()
    with pytest.raises(LogKeyError, match="and there is none"):
        brought_back(archive, tmp_path / "without")
    newer = [LogKey.new(), *keys]
    opened(tmp_path / "log", newer).close()
    moment = shipped(archive, tmp_path / "log", newer)
    assert moment is not None
    assert moment.begins, "all MACs are others"
    assert brought_back(archive, tmp_path / "newer", keys=newer) == all_rows(tmp_path / "log")


def test_encrypted_for_a_key_of_which_the_archiver_has_the_public_half(tmp_path: Path) -> None:
    from pyrage import x25519

    identity = x25519.Identity.generate()
    public, secret = tmp_path / "public", tmp_path / "secret"
    public.write_text(f"# of the operator\n{identity.to_public()}\n")
    secret.write_text(f"{identity}\n")
    secret.chmod(0o600)
    write_log(tmp_path / "log", 30)
    url = f"file://{tmp_path}/archive"
    objects = Objects(store_of(url), url).below(NAME)
    shipped(Archive(objects, Cipher.from_file(public)), tmp_path / "log")
    files = [path for path in (tmp_path / "archive").rglob("*") if path.is_file() and path.parent.name != "moments"]
    assert files
    assert all(path.read_bytes().startswith(b"age-encryption.org/v1") for path in files)
    for archive, problem in (
        (Archive(objects), "is encrypted: give its secret key"),
        (Archive(objects, Cipher.from_file(public)), "public keys alone"),
    ):
        with pytest.raises(ArchiveError, match=problem):
            brought_back(archive, tmp_path / "without")
    other = tmp_path / "other"
    other.write_text(f"{x25519.Identity.generate()}\n")
    other.chmod(0o600)
    with pytest.raises(DamagedObjectError, match="cannot be decrypted with the keys"):
        brought_back(Archive(objects, Cipher.from_file(other)), tmp_path / "without")
    with pytest.raises(ArchiveError, match="is encrypted: give the key file"):
        shipped(Archive(objects), tmp_path / "log")
    back = brought_back(Archive(objects, Cipher.from_file(secret)), tmp_path / "back")
    assert back == all_rows(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("", 0o600, "is no key file"),
        ("hunter2\n", 0o600, "is no key file"),
        ("AGE-SECRET-KEY-1HUNTER2\n", 0o600, "is no key file"),
        (None, 0o644, "has a secret key and mode 0644, expected 0600"),
    ],
)
def test_a_key_file_that_is_none(tmp_path: Path, text: str | None, mode: int, problem: str) -> None:
    from pyrage import x25519

    path = tmp_path / "key"
    path.write_text(f"{x25519.Identity.generate()}\n" if text is None else text)
    path.chmod(mode)
    with pytest.raises(ArchiveError, match=problem) as error:
        Cipher.from_file(path)
    assert "HUNTER2" not in str(error.value).upper()


def test_pruned_moments_leave_the_others_whole(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 40)
    objects_by_day, were = ByDay(MemoryStore(), "memory:///"), {}
    archive = Archive(objects_by_day)
    for step in range(8):
        grow(tmp_path / "log", step)
        moment = shipped(archive, tmp_path / "log")
        assert moment is not None
        were[moment.number] = all_rows(tmp_path / "log")
    before = len(archive.objects.listed())
    assert prune(archive, Retention(keep_days=2)) == (0, 0), "by the store all of them are of today"
    objects_by_day.is_by_day = True
    moments, objects = prune(archive, Retention(keep_days=2))
    assert moments > 0
    assert len(archive.objects.listed()) == before - moments - objects
    assert objects >= moments
    for number in (6, 7, 8):
        assert brought_back(archive, tmp_path / f"back-{number}", number) == were[number]
    assert prune(archive, Retention(keep_days=2)) == (0, 0)
    assert prune(archive, Retention(keep_mb=0))[0] > 0
    assert brought_back(archive, tmp_path / "back", 8) == were[8]
    named = {part.name for one in archive.moments() for part in (*one.new_parts, *one.checkpoint_parts)}
    assert {stored.name for stored in archive.objects.listed()} == named | {
        moment_name(number) for number in archive.numbers()
    }


def test_a_damaged_old_manifest_does_not_stop_what_is_new(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    archive = Archive(Objects(store_of(url), url).below(NAME))
    for step in range(3):
        if step:
            grow(tmp_path / "log", step)
        else:
            write_log(tmp_path / "log", 40)
        assert shipped(archive, tmp_path / "log") is not None
    (tmp_path / "archive" / NAME / moment_name(2)).write_bytes(b"x")
    grow(tmp_path / "log", 4)
    said: list[str] = []

    def follower() -> Follower:
        options = Options(retention=Retention(keep_days=1))
        log = tmp_path / "log"
        return Follower(archive, lambda: open_reader(log, NAME), lambda: 0, options, lambda seconds: True, said.append)

    follower().run()
    assert archive.numbers() == [1, 2, 3, 4]
    assert "moments/000000000002 begins with b'x'" in " ".join(said)
    assert "nothing old is removed; what is new is archived" in " ".join(said)
    grow(tmp_path / "log", 5)
    with pytest.raises(ArchiveError, match="what is new is archived, but nothing old was removed: the object"):
        follower().archive_once()
    assert archive.numbers() == [1, 2, 3, 4, 5]


def test_a_log_in_a_database_too(tmp_path: Path, postgres: Postgres, request: pytest.FixtureRequest) -> None:
    url = f"{postgres.url(request.node.name)}#{NAME}"
    write_log(tmp_path / "log", 30)
    back_up(tmp_path / "log", NAME, url)
    archive = in_memory()
    with open_reader(url, NAME) as reader:
        assert Archiver(archive, reader).store_moment() is not None
    assert brought_back(archive, tmp_path / "back") == all_rows(tmp_path / "log")
    other = f"{postgres.url(request.node.name + '_back')}#{NAME}"
    restore(archive, archive.moments()[0].instance, archive.moments(), 0, place_of(other), ())
    with open_reader(other, NAME) as reader, open_reader(tmp_path / "log", NAME) as log:
        assert list(reader.values(0)) == list(log.values(0))
        assert reader.summary() == log.summary()


def test_what_an_archiver_left_goes_after_a_day(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    objects = ByDay(MemoryStore(), "memory:///")
    archive = Archive(objects)
    objects.put_new("segments/left", b"x")
    assert shipped(archive, tmp_path / "log") is not None
    assert prune(archive, Retention(keep_days=1)) == (0, 0), "it may be on its way"
    grow(tmp_path / "log", 5)
    assert shipped(archive, tmp_path / "log") is not None
    objects.is_by_day = True
    assert prune(archive, Retention(keep_days=30)) == (0, 1)


def test_an_archive_of_another_instance_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    archive = in_memory()
    assert shipped(archive, tmp_path / "log") is not None
    with pytest.raises(ArchiveError, match=f"is of the instance '{NAME}', not of 'till': nothing was written"):
        restore(archive, "till", archive.moments(), 0, place_of(tmp_path / "back"), ())
    assert not (tmp_path / "back").exists()
