"""Losses of power after any step of any write: all that was acknowledged is there, and the log is sound.

A real process writes a log through a library that notes the bytes that each write replaces, and the end of each sync.
So the file can be set back to any moment; then some unsynced writes are taken away, as a disk can do.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.verify import verify_log
from immortal.log import open_log
from tests.faults.disk import Disk, Write, read_journal, shimmed, undone, without_power
from tests.faults.sample_log import NAME, record
from tests.faults.writers import MODULE

REPOSITORY = Path(__file__).parents[2]
ALWAYS_KEPT = 30  # number of drawn moments that each seed checks


def write_under_watch(folder: Path, seed: int) -> Disk:
    disk = Disk(folder, folder / "watched", journal=True)
    (folder / "watched").mkdir()
    command = [sys.executable, "-m", MODULE, "all_kinds", str(folder / "watched"), str(seed)]
    subprocess.run(command, env=shimmed(disk), cwd=REPOSITORY, check=True, timeout=60)
    return disk


def promised(writes: list[Write], contents: bytes) -> dict[str, int]:
    """Return the newest acknowledged number of each kind after these writes."""
    newest: dict[str, int] = {}
    notes = [write for write in writes if write.path.endswith("/acknowledged")]
    texts = [write.old for write in notes[1:]] + [contents]  # each note is what the next one replaced
    for text in texts[: len(notes)]:
        what, _, number = text.decode().partition(" ")
        newest[what] = int(number)
    return newest


def check(folder: Path, newest: dict[str, int]) -> None:
    if "created" not in newest:
        return  # its creation was not acknowledged: the next start creates it anew, or takes it over
    verification = verify_log(folder, NAME)
    found = [finding.message for finding in verification.findings() if finding.severity is not Severity.NOTE]
    assert not found
    store = open_log(folder, NAME, map_size_bytes=1 << 24)
    summary = store.summary()
    assert store.problems == []
    assert summary.last_sequence_id >= newest.get("record", -1)
    assert summary.epoch >= newest.get("epoch", 0)
    checkpoints = [header.checkpoint_id for header in summary.checkpoints]
    assert max(checkpoints, default=0) >= newest.get("checkpoint", 0)
    for sequence_id in range(max(summary.first_sequence_id, 0), summary.last_sequence_id + 1):
        values = store.read(sequence_id, 1)
        assert values[0] in (record(sequence_id, size) for size in (300, 5000, 40000))
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_survives_a_loss_of_power_at_any_moment(tmp_path: Path, seed: int) -> None:
    disk = write_under_watch(tmp_path, seed)
    rng = random.Random(seed)
    log = tmp_path / "watched" / "log"
    files = {str(log / name): (log / name).read_bytes() for name in ("data.mdb", "journal", "high-water-mark")}
    last_note = (tmp_path / "watched" / "acknowledged").read_bytes()
    writes, moments = read_journal(disk.journal)
    assert len(moments) > 300
    interesting = [moment for moment in moments if any(write.path in files for write in moment.pending)]
    for moment in rng.sample(interesting, ALWAYS_KEPT):
        copy = tmp_path / "copy"
        copy.mkdir()
        for path, whole in files.items():
            later = [write for write in writes[moment.writes_done :] if write.path == path]
            pending = [write for write in moment.pending if write.path == path]
            (copy / Path(path).name).write_bytes(without_power(undone(bytearray(whole), later), pending, rng))
        texts = [write for write in writes if write.path.endswith("/acknowledged")]
        done = [write for write in writes[: moment.writes_done] if write.path.endswith("/acknowledged")]
        contents = texts[len(done)].old if len(done) < len(texts) else last_note
        check(copy, promised(done, contents))
        shutil.rmtree(copy)
