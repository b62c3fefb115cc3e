"""What a log answers to a machine: what is there, and what is wrong with it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import CheckpointHeader, Letter, OutputBatch, Transaction
from immortal.coordinator.driver.ports import answer, checkpoint_problem
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import MessageKey, Verdict, VerdictKind
from tests.helpers.memory_logs import damage_chunk

CHUNKS = [b"first", b"second"]
BLOB = b"".join(CHUNKS)
HEADER = CheckpointHeader(1, -1, len(BLOB), crc64(BLOB), 5)


@pytest.fixture
def store() -> MemoryLogStore:
    made = MemoryLogStore(1)
    for index, chunk in enumerate(CHUNKS):
        made.write_checkpoint_chunk(1, index, chunk)
    made.commit(Transaction(checkpoint=HEADER))
    return made


def test_a_checkpoint_is_sound_whose_every_byte_is_what_was_written(store: MemoryLogStore) -> None:
    assert checkpoint_problem(store, HEADER) is None
    assert answer(store, ef.CheckCheckpoint(HEADER)) == ev.CheckpointChecked(1, None)


@pytest.mark.parametrize("index", [0, 1])
def test_a_chunk_that_cannot_be_read_is_a_problem(store: MemoryLogStore, index: int) -> None:
    damage_chunk(store, 1, index)
    problem = f"chunk {index} of checkpoint 1 is damaged: its CRC does not match"
    assert answer(store, ef.CheckCheckpoint(HEADER)) == ev.CheckpointChecked(1, problem)
    found = answer(store, ef.ReadCheckpointChunk(1, index))
    assert isinstance(found, ev.LogFailed)
    assert str(found.error) == problem


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (replace(HEADER, size_bytes=len(BLOB) + 1), "it has 11 bytes, 12 were written"),
        (replace(HEADER, size_bytes=len(BLOB) - 1), f"its check is {crc64(BLOB):016x} over 11 bytes"),
        (replace(HEADER, check=HEADER.check ^ 1), f"{HEADER.check ^ 1:016x} was written"),
    ],
)
def test_a_blob_that_is_not_what_its_header_says_is_a_problem(
    store: MemoryLogStore, header: CheckpointHeader, problem: str
) -> None:
    assert problem in str(checkpoint_problem(store, header))


def test_the_outputs_of_a_checkpoint_are_read_with_it(store: MemoryLogStore) -> None:
    """Who restores it may not have that log open any more."""
    for index, chunk in enumerate(CHUNKS):
        store.write_checkpoint_chunk(2, index, chunk)
    outputs = {"b": [OutputBatch(1, 1, b"output")]}
    store.commit(Transaction(checkpoint=replace(HEADER, checkpoint_id=2, unacknowledged=outputs)))
    checked, other = (store.summary().checkpoints[-1] for _ in range(2))
    assert checkpoint_problem(store, checked) is None
    after = store.crash()
    assert dict(checked.unacknowledged) == outputs
    assert checkpoint_problem(after, other) == "this log is closed: its process crashed"


def test_what_nobody_waits_for_is_given_up_before_the_next_chunk(store: MemoryLogStore) -> None:
    asked: list[int] = []

    def is_cancelled() -> bool:
        asked.append(1)
        return len(asked) > 1

    assert checkpoint_problem(store, HEADER, is_cancelled) == "nobody waited until it was read"
    assert len(asked) == 2


def test_letters_that_can_be_read_are_given_and_what_is_wrong_with_the_others_is_said() -> None:
    letter = Letter(Verdict(2, 0, VerdictKind.UNDONE), 5)
    keys = [(sequence_id, 0, 0, 0) for sequence_id in (1, 2, 3)]

    class Letters(MemoryLogStore):
        def letter(self, key: MessageKey) -> Letter | None:
            if key == keys[0]:
                raise DamagedLogError("it is damaged", 1)
            return letter if key == keys[1] else None

    assert answer(Letters(1), ef.ReadLetters(keys)) == ev.LettersRead([letter], ["it is damaged"])
