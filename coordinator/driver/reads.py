"""What a log answers to a machine that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DamagedLogError, LogError, LogUnavailableError
from immortal.coordinator.core.interfaces import CheckpointHeader, LogStore
from immortal.coordinator.driver.ports import StoreRead
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import MessageKey


def answer(store: LogStore, asked: StoreRead) -> ev.Event:
    """What ``store`` has for ``asked``, which its writer asks; LogFailed where it can't be read."""
    try:
        match asked:
            case ef.LoadLog(with_clients):
                return ev.LogLoaded(store.summary(), store.clients() if with_clients else None)
            case ef.CheckCheckpoint(header):
                return ev.CheckpointChecked(header.checkpoint_id, problem_of(store, header))
            case ef.ReadCheckpointChunk(checkpoint_id, index):
                return ev.CheckpointChunkRead(store.read_checkpoint_chunk(checkpoint_id, index))
            case ef.ReadRecords(first_sequence_id, size_bytes_max, session):
                return ev.RecordsRead(store.read(first_sequence_id, size_bytes_max), None, session)
            case ef.ReadSpilled(destination, first, last, size_bytes_max):
                batches = store.read_spilled(destination, first, last, size_bytes_max)
                return ev.SpilledRead(destination, first, batches)
            case ef.ReadLetters(keys):
                return _letters(store, keys)
    except LogError as error:
        return failed(error, asked)


def failed(error: LogError, asked: ev.Asked | None) -> ev.LogFailed:
    """What a log answers that could not do what it was asked for."""
    return ev.LogFailed(error, isinstance(error, LogUnavailableError), asked)


class Chunks(Protocol):
    """A log whose checkpoints can be read."""

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes: ...


def problem_of(store: Chunks, header: CheckpointHeader, is_given_up: Callable[[], bool] = lambda: False) -> str | None:
    """What is wrong with ``header``'s checkpoint; None if every byte of its blob is what was written.

    Its outputs are read as well: by now they can be, and who restores it may not have this log open any more.
    ``is_given_up``: looked at before each chunk; nobody wants to know any more. Raises LogUnavailableError.
    """
    size_bytes = check = index = 0
    while size_bytes < header.size_bytes:
        if is_given_up():
            return "nobody waited until it was read"
        try:
            chunk = store.read_checkpoint_chunk(header.checkpoint_id, index)
        except LogUnavailableError:
            raise  # that says nothing of the checkpoint
        except LogError as error:
            return str(error)
        if not chunk:
            return f"it has {size_bytes} bytes, {header.size_bytes} were written"
        size_bytes += len(chunk)
        check = crc64(chunk, check)
        index += 1
    if size_bytes != header.size_bytes or check != header.check:
        return f"its check is {check:016x} over {size_bytes} bytes, {header.check:016x} was written"
    try:
        len(header.unacknowledged)
    except LogUnavailableError:
        raise
    except LogError as error:
        return str(error)
    return None


def _letters(store: LogStore, keys: Sequence[MessageKey]) -> ev.LettersRead:
    letters, problems = [], []
    for key in keys:
        try:
            letter = store.letter(key)
        except DamagedLogError as error:
            problems.append(str(error))
        else:
            if letter is not None:
                letters.append(letter)
    return ev.LettersRead(letters, problems)
