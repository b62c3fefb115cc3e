"""The rules of an archive: which objects a moment needs, which moments may go, what manifests and packs say."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("obstore")

import zstandard
from msgspec.structs import replace

from immortal.coordinator.archive.format import (
    ArchivedCheckpoint,
    Moment,
    NeededObjects,
    Part,
    Retention,
    Segment,
    check_follows,
    decode_moment,
    digest,
    encode_moment,
    encrypted_parts,
    index_of,
    needed_objects,
    object_name,
    pack,
    unpack,
)
from immortal.coordinator.objects import DamagedObjectError, ObjectError
from immortal.coordinator.objects.store import store_of

DAY_NS = 86_400 * 10**9
MIB = 1 << 20


def part(name: str, size_bytes: int = MIB) -> Part:
    return Part(name, size_bytes, digest(name.encode()))


def moment(
    number: int, first: int, last: int, before: int, *, whole: bool = False, begins: bool = False, kept: int = 0
) -> Moment:
    """With one segment of the records behind ``before`` up to ``last``, and the checkpoint ``kept``."""
    segments = [Segment(before + 1, last, part(f"segments/{before + 1}-{last}"))] if last > before else []
    checkpoints = [ArchivedCheckpoint(kept, first - 1, number, "", [part(f"checkpoints/{kept}")])]
    return Moment(
        *(number, "bob", 7, 1, 5, "", 1, number * DAY_NS, number * DAY_NS, first, last, "", begins, segments),
        *(part(f"states/{number}", 1000), whole, "", checkpoints, False, ""),
    )


def moments_of(steps: list[tuple[int, int, bool]]) -> list[Moment]:
    """Of (records that came, records that were trimmed, whether the state is whole)."""
    moments: list[Moment] = []
    first, last = 0, -1
    for number, (came, trimmed, whole) in enumerate(steps, start=1):
        before, last = last, last + came
        first = min(first + trimmed, last + 1)
        is_first = number == 1
        moments.append(
            moment(number, first if not is_first else 0, last, before, whole=whole or is_first, begins=is_first)
        )
        first = 0 if is_first else first
    return moments


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), min_size=1, max_size=25)


def stored_s_of(moments: list[Moment]) -> list[float]:
    return [one.time_ns / 1e9 for one in moments]


@given(STEPS, st.one_of(st.none(), st.floats(0, 30)), st.one_of(st.none(), st.integers(0, 60)))
def test_what_is_kept_needs_nothing_that_goes(
    steps: list[tuple[int, int, bool]], keep_days: float | None, keep_mb: int | None
) -> None:
    moments = moments_of(steps)
    retention = Retention(keep_days, keep_mb)
    first = retention.first_kept(moments, stored_s_of(moments))
    assert 0 <= first < len(moments)
    oldest = needed_objects(moments, first).oldest_index
    left, names = moments[oldest:], encrypted_parts(moments[oldest:]).keys()
    for index in range(first, len(moments)):
        needs = needed_objects(left, index - oldest)
        assert {one.name for one in needs.parts} <= names
        assert needs == replace_index(needed_objects(moments, index), oldest)
    if keep_days is not None and keep_mb is None and first > 0:
        since_ns = moments[-1].time_ns - int(keep_days * DAY_NS)
        assert moments[first].time_ns <= since_ns, "a time since then has a moment before it"
    if keep_mb is not None and first < len(moments) - 1:
        assert sum(sizes(left).values()) <= keep_mb * MIB


@pytest.mark.parametrize("in_the_store", [False, True])
@given(st.integers(3, 20), st.floats(1, 30), st.integers(40, 10_000), st.data())
def test_a_clock_that_jumps_makes_no_moment_old(
    in_the_store: bool, number: int, keep_days: float, jump_days: int, data: st.DataObject
) -> None:
    moments = moments_of([(3, 1, False)] * number)
    stored_s = stored_s_of(moments)
    retention = Retention(keep_days)
    right = retention.first_kept(moments, stored_s)
    at = data.draw(st.integers(1, number - 1))
    if in_the_store:
        stored_s[at:] = [one + jump_days * DAY_NS / 1e9 for one in stored_s[at:]]
    else:
        moments[at:] = [replace(one, time_ns=one.time_ns + jump_days * DAY_NS, taken_ns=0) for one in moments[at:]]
    assert retention.first_kept(moments, stored_s) <= right


def replace_index(needs: NeededObjects, oldest: int) -> NeededObjects:
    return replace(needs, oldest_index=needs.oldest_index - oldest)


def sizes(moments: list[Moment]) -> dict[str, int]:
    return {one.name: one.size_bytes for each in moments for one in (*each.new_parts, *each.checkpoint_parts)}


@given(STEPS)
def test_a_moment_needs_its_records_and_no_others(steps: list[tuple[int, int, bool]]) -> None:
    moments = moments_of(steps)
    for index, one in enumerate(moments):
        needs = needed_objects(moments, index)
        have = [
            number
            for segment in needs.segments
            for number in range(segment.first_sequence_id, segment.last_sequence_id + 1)
        ]
        wanted = list(range(one.first_sequence_id, one.last_sequence_id + 1))
        assert have[len(have) - len(wanted) :] == wanted
        assert all(segment.last_sequence_id >= one.first_sequence_id for segment in needs.segments)
        assert [state.name for state in needs.states][-1] == f"states/{one.number}"


def test_a_gap_is_said() -> None:
    moments = moments_of([(3, 0, True), (3, 0, False), (3, 0, False)])
    with pytest.raises(DamagedObjectError, match="no records 0 to 2, which moment 3 needs"):
        needed_objects(moments[1:], 1)
    trimmed = moment(3, 7, 9, 6)
    with pytest.raises(DamagedObjectError, match="no whole state at or before moment 3"):
        needed_objects([trimmed], 0)
    with pytest.raises(DamagedObjectError, match="no manifest of the moments 2 to 2"):
        check_follows([moments[0], moments[2]], ["", ""])
    with pytest.raises(DamagedObjectError, match="moment 2 does not follow the one of moment 1"):
        check_follows(moments[:2], ["another"])


def test_a_new_beginning_stands_on_nothing_before() -> None:
    moments = [*moments_of([(9, 0, True), (3, 0, False)]), moment(3, 0, 4, -1, whole=True, begins=True)]
    assert needed_objects(moments, 2).oldest_index == 2
    assert [segment.last_sequence_id for segment in needed_objects(moments, 2).segments] == [4]


def test_the_moment_of_a_time() -> None:
    moments = moments_of([(3, 0, True), (3, 0, False), (3, 0, False)])
    assert index_of(moments, until_ns=2 * DAY_NS, until_record=None) == 1
    assert index_of(moments, until_ns=3 * DAY_NS - 1, until_record=None) == 1
    assert index_of(moments, until_ns=None, until_record=7) == 1
    with pytest.raises(ObjectError, match="ends with record 2"):
        index_of(moments, until_ns=DAY_NS - 1, until_record=None)


def test_a_manifest_says_what_it_said() -> None:
    one = moment(42, 3, 9, 5, kept=4)
    assert decode_moment(encode_moment(one), "m") == one


@given(st.data())
def test_a_manifest_with_any_flipped_bit_is_damaged(data: st.DataObject) -> None:
    raw = bytearray(encode_moment(moment(42, 3, 9, 5, kept=4)))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(DamagedObjectError):
        found = decode_moment(bytes(raw), "m")
        assert found == moment(42, 3, 9, 5, kept=4), "the version in the head is for people"


def test_a_manifest_of_a_newer_version() -> None:
    newer = replace(moment(1, 0, 2, -1), version=2)
    with pytest.raises(ObjectError, match="the object m has version 2, this program reads version 1"):
        decode_moment(encode_moment(newer), "m")


ROWS = st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=40), st.one_of(st.none(), st.binary(max_size=200))))


@given(ROWS)
def test_rows_come_back(rows: list[tuple[str, bytes, bytes | None]]) -> None:
    assert unpack(pack(rows), "p") == rows


@given(ROWS, st.data())
def test_a_cut_pack_is_damaged(rows: list[tuple[str, bytes, bytes | None]], data: st.DataObject) -> None:
    packed = pack(rows)
    with pytest.raises(DamagedObjectError, match="the object p "):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))], "p")


def test_a_pack_that_grows_without_end_is_refused() -> None:
    magic, zstd_magic = pack([])[:8], pack([])[8:12]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(DamagedObjectError, match="the object x does not say its size"):
        unpack(magic + unsized, "x")
    one_segment_8_byte_size = b"\xe0"
    huge = zstd_magic + one_segment_8_byte_size + (1 << 40).to_bytes(8, "little") + unsized[6:]
    with pytest.raises(DamagedObjectError, match=f"the object x says that {1 << 40} bytes are in it"):
        unpack(magic + huge, "x")


def test_a_name_has_the_epoch_and_comes_once() -> None:
    names = {object_name("segments/", "0-9", 7) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("segments/0-9-e7-") for name in names)


@pytest.mark.parametrize(
    "url", ["", "archive", "/archive", "http://host/x", "s3://", "s3:bucket", "file://x", "memory:///x"]
)
def test_a_url_that_names_no_store(url: str) -> None:
    with pytest.raises(ObjectError, match=r"names no (store|folder)"):
        store_of(url)
