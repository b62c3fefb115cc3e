"""States of logs that this home did not make: to read one that pickle wrote is to run what somebody else put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from immortal.coordinator.core.errors import DamagedCheckpointError, LogError
from immortal.protocol.state_envelope import PICKLE, serializer_of

if TYPE_CHECKING:
    from immortal.coordinator.log.source import RecordSource


class PickleRefusedError(LogError):
    """A state that pickle wrote is of a log that this home did not make."""


def refuse_pickle(source: RecordSource, checkpoint_ids: Iterable[int]) -> None:
    """Raises PickleRefusedError where ``source`` is not trusted, and pickle wrote one of these checkpoints."""
    if not source.trusts_pickle:
        refuse_pickle_in(source.checkpoint_chunks, checkpoint_ids, source.identity.instance_name)


def refuse_pickle_in(
    chunks_of: Callable[[int], Iterator[bytes]], checkpoint_ids: Iterable[int], instance_name: str
) -> None:
    """As :func:`refuse_pickle`, for a log that nobody trusts."""
    for checkpoint_id in checkpoint_ids:
        try:
            serializer = serializer_of(chunks_of(checkpoint_id))
        except DamagedCheckpointError:
            continue  # nobody restores it either
        if serializer == PICKLE:
            raise PickleRefusedError(
                f"checkpoint {checkpoint_id} of the log of {instance_name!r} was written by pickle, and this home did"
                " not make that log: to read it would run whatever somebody put into it. Where you trust all who could"
                " write it as you trust the app's own code, say --trust-pickle (in tests trust_pickle=True);"
                " docs/guide/security.md, 'Logs of others', says what that means"
            )
