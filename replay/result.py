"""What a replay gives: to a sink as it goes on, and as a whole at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log.source import RecordSource
from immortal.protocol.extensions import AppDescription, HandlerFailure, Origin
from immortal.protocol.trailer import Trailer
from immortal.protocol.verdicts import Verdict
from immortal.replay.code import Code

TRACES_CHARACTERS_MAX = 4 << 20  # of all verdicts together


class Sink:
    """Who looks on. Called by the thread that replays, which waits: a slow sink slows the replay, and no memory grows.

    What either method raises ends the replay.
    """

    def code(self, code: Code | None) -> None:
        """The app has come in, and runs this code; None: started by hand."""

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        """A record goes to the app. ``value``: record and trailer as the log holds them."""

    def outputs(
        self, destination: str, first_position: int, count: int, payload: bytes, origins: Sequence[Origin] | None
    ) -> None:
        """The app has made ``count`` messages (incoming RPC form, packed) of the stream to ``destination``.

        ``destination`` "" is the instance itself. ``origins`` says which logged messages made them, ``count`` in all;
        None where the app does not tell. The positions go on from the checkpoint's; kept impulses take theirs.
        """

    def impulses(self, destination: str, first_position: int, count: int, payload: bytes) -> None:
        """Impulses that were sent there at these positions; no replay makes them. ``payload`` b"": not kept."""

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        """The app tells what it draws: see :class:`immortal.replay.session.NumbersDrawn`."""

    def verdict(self, verdict: Verdict) -> None:
        """A message has failed alone. Also what was made before it may still come."""


class ReplayResult(Struct):
    """``records`` and ``messages`` are those that the app was given.

    ``blob_size_bytes``, ``blob_check`` (CRC-64/XZ): the state at the end, also in the file ``blob_path`` if one was
    asked for; None with a ``failure``: a message that could not be handled; then nothing behind it was replayed.
    ``verdicts``: on messages that have failed alone, without the messages themselves, and with the first traces only.
    ``news``: those of them that the log does not have.
    ``flushed``: the app holds nothing back, all that it made has come; one of the base protocol may hold messages back.
    ``exit_status``: of the app's process, negative for a signal; None if it was started by hand. ``code``: that it ran,
    with what it has imported on the way; None likewise.
    """

    checkpoint: CheckpointHeader
    first_sequence_id: int
    last_sequence_id: int
    records: int = 0
    messages: int = 0
    duration_s: float = 0.0
    blob_path: Path | None = None
    blob_size_bytes: int | None = None
    blob_check: int | None = None
    description: AppDescription | None = None
    label: str = ""
    flushed: bool = False
    failure: HandlerFailure | None = None
    exit_status: int | None = None
    stderr_head: str = ""
    stderr_tail: str = ""
    notes: Sequence[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    news: list[Verdict] = field(default_factory=list)
    code: Code | None = None
    _traces_size: int = 0

    def add(self, verdict: Verdict) -> None:
        """The app has given it."""
        self._traces_size += len(verdict.trace)
        trace = verdict.trace if self._traces_size <= TRACES_CHARACTERS_MAX else ""
        self.verdicts.append(msgspec.structs.replace(verdict, message=b"", trace=trace))

    def find_news(self, source: RecordSource) -> None:
        """The replay has ended: the log of a running instance may have got the same verdicts meanwhile."""
        known = {verdict.key for verdict in source.summary().verdicts} if self.verdicts else ()
        self.news = [verdict for verdict in self.verdicts if verdict.key not in known]

    @property
    def warnings(self) -> list[str]:
        """What the SDK found in the app's code as it started: one line each."""
        return [line for line in self.stderr_head.split("\n") if line.startswith("app ") and ": warning: " in line]
