"""Replays a log, live or recorded, through a class in this process and compares calls and states, as `immortal verify`
does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from immortal.appsdk.calls.context import SEED_SIZE_BYTES
from immortal.appsdk.errors import AppError
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.state.tree import differences
from immortal.appsdk.testing.outside import OUTSIDERS
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.formatting import format_call
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.instances.own_logs import refuse_pickle
from immortal.coordinator.log import open_reader
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import message_at, record_of
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.record import decode_header
from immortal.protocol.safe_output import printable_message
from immortal.protocol.trailer import decode_trailer
from immortal.protocol.verdicts import Verdict
from immortal.replay.app_process import DIFFERENCES_MAX
from immortal.replay.plan import ReplayPlan, plan_route
from immortal.replay.positions import KeptImpulses, Outputs
from immortal.replay.result import ReplayResult, Sink
from immortal.replay.session import BlobPiece, Ended, Event, ReplaySession, VerdictGiven
from immortal.replay.sources import RecordedLog
from immortal.replay.verify import CheckingSink, StateDivergence, VerifySection, verify_sections
from immortal.replay.verify_report import Report

BLAMED_MESSAGES_MAX = 3  # of a record, that are shown


class ReplayDiffers(AppError, AssertionError):  # noqa: N818 (what happened)
    """A replay differs from the recorded run. The text is that of `immortal verify`."""


class LocalReplay:
    """One replay of ``plan``, from the checkpoint to its end. ``watch`` sees the app behind each record."""

    def __init__(
        self,
        source: RecordSource,
        plan: ReplayPlan,
        definition: Definition,
        sink: Sink,
        watch: Callable[[int, LocalApp], None] = lambda sequence_id, app: None,
    ) -> None:
        summary = source.summary()
        self.route = plan_route(plan, source, summary)
        refuse_pickle(source, [self.route.checkpoint.checkpoint_id])
        self.blob = b""
        self._source = source
        self._sink = sink
        self._watch = watch
        self._app = LocalApp(definition, bytes(SEED_SIZE_BYTES), 0, trace=True, outsiders=OUTSIDERS)
        self._session = ReplaySession(source.identity.instance_name, summary, self.route)
        self._verdicts: list[Verdict] = []
        self._ended: Ended | None = None

    def run(self) -> ReplayResult:
        """Replay, once. Raises what the app raises, except for its handlers: their errors are the result's
        ``failure``.
        """
        try:
            return self._run()
        finally:
            self._app.close()

    def _run(self) -> ReplayResult:
        started_s = time.perf_counter()
        session, header = self._session, self.route.checkpoint
        blob = self._source.checkpoint_chunks(header.checkpoint_id)
        values = self._source.values(header.sequence_id + 1, self.route.last_sequence_id)
        self._take(session.begin())
        self._listen()
        while self._ended is None:
            if session.wants_blob:
                if (chunk := next(blob, None)) is None:
                    session.blob_is_complete()
                else:
                    session.give_blob(chunk)
            elif session.wants_records:
                self._give(next(values))
            if data := b"".join(session.data_to_send()):
                self._app.receive(data)
                self._listen()
                if session.records:
                    self._watch(session.fed_sequence_id, self._app)
            else:
                wanted = session.wants_blob or session.wants_records
                require(wanted, f"a replay stands still in the phase {session.phase.value!r}")
        result = ReplayResult(
            header,
            header.sequence_id + 1,
            session.fed_sequence_id,
            session.records,
            session.messages,
            time.perf_counter() - started_s,
            blob_size_bytes=len(self.blob),
            blob_check=crc64(self.blob),
            description=session.description,
            label=session.label,
            flushed=session.app_flushes,
            failure=self._ended.failure,
            notes=self.route.notes,
        )
        for verdict in self._verdicts:
            result.add(verdict)
        result.find_new_failures(self._source)
        return result

    def _give(self, value: bytes) -> None:
        header = decode_header(value)
        trailer = decode_trailer(value[header.size_bytes :], header.check)
        self._sink.record(header.sequence_id, value, trailer)
        self._session.give_record(value, trailer)

    def _listen(self) -> None:
        """Pass the app's output to the session, and the session's results to the sink."""
        app = self._app
        data = bytes(app.output)
        app.output.clear()
        self._take(self._session.receive(data))
        if app.error is not None and self._ended is None:
            raise app.error

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Outputs):
                self._sink.outputs(event.destination, event.first_position, event.count, event.payload, event.origins)
            elif isinstance(event, KeptImpulses):
                self._sink.impulses(event.destination, event.first_position, event.count, event.payload)
            elif isinstance(event, BlobPiece):
                self.blob += event.data
            elif isinstance(event, VerdictGiven):
                self._verdicts.append(event.verdict)
            elif isinstance(event, Ended):
                self._ended = event


def verify_section(
    source: RecordSource,
    start: CheckpointHeader,
    end: CheckpointHeader | None,
    definition: Definition,
    receivers: Mapping[str, RecordSource],
) -> VerifySection:
    """Verify a section as :func:`immortal.replay.verify.verify_section` does, with the class ``definition`` in this
    process.

    Raises AppError for a state that can't be restored, and its like.
    """
    checking = CheckingSink(source, start, receivers)
    replay = LocalReplay(source, _plan(start, end), definition, checking)
    section = VerifySection(start, end, replay.run(), checking.counts)
    if section.result.failure is None:
        checking.finish(None if end is None else end.outputs, all_made=section.result.flushed)
        if end is not None:
            section.state = _compare_states(definition, source, end, replay.blob)
            section.state_is_same = section.state is None
    section.outputs = checking.findings()
    section.unproved = checking.unproved()
    return section


def _plan(start: CheckpointHeader, end: CheckpointHeader | None) -> ReplayPlan:
    if end is None:
        return ReplayPlan(checkpoint_id=start.checkpoint_id)
    return ReplayPlan(checkpoint_id=start.checkpoint_id, last_sequence_id=end.sequence_id, last_version=end.version)


def _compare_states(
    definition: Definition, source: RecordSource, end: CheckpointHeader, blob: bytes
) -> StateDivergence | None:
    refuse_pickle(source, [end.checkpoint_id])
    old = b"".join(source.checkpoint_chunks(end.checkpoint_id))
    if old == blob:
        return None
    then, now = (inspect_state(definition, one).state for one in (old, blob))
    found = [difference.to_json() for difference in islice(differences(then, now), DIFFERENCES_MAX + 1)]
    return StateDivergence(found) if found else None


def problems_of(
    source: RecordSource,
    definition: Definition,
    receivers: Mapping[str, RecordSource] | None = None,
    known_failure: tuple[int, int] | None = None,
) -> Iterator[str]:
    """Replay all that ``source`` keeps and yield lines that say where the replay differs; none where it does not.

    ``known_failure``: (record, message) at which a handler has failed: that it fails there again is as it was.
    """
    name = source.identity.instance_name
    for start, end in verify_sections(source, source.summary(), everything=True).pairs:
        try:
            section = verify_section(source, start, end, definition, receivers or {})
        except ImmortalError as error:
            yield f"{name}: a replay from checkpoint {start.checkpoint_id} on fails: {error}"
            continue
        result = section.result
        if known_failure is not None:  # what lies behind it was never handled
            result.news = [news for news in result.news if news.key[:2] < known_failure]
        if result.failure is not None and (result.failure.sequence_id, result.failure.message_index) == known_failure:
            result.failure = None
        if not section.is_same:
            yield from Report(name, section, source).lines()
            if section.state is not None and (blamed := _first_unsteady(source, section, definition)):
                yield f"    the first message behind which two replays have two states: {blamed}"


def _first_unsteady(source: RecordSource, section: VerifySection, definition: Definition) -> str:
    """Say which message leads to another state at each replay; "" where two replays end in the same one."""
    checks: list[list[tuple[int, int]]] = [[], []]
    for found in checks:

        def watch(sequence_id: int, app: LocalApp, found: list[tuple[int, int]] = found) -> None:
            found.append((sequence_id, app.state_check()))

        LocalReplay(source, _plan(section.start, section.end), definition, Sink(), watch).run()
    description = section.result.description
    for (sequence_id, one), (_, other) in zip(*checks, strict=True):
        if one == other:
            continue
        calls = []
        for value in source.values(sequence_id, sequence_id):
            content = record_of(value).content
            for index in range(BLAMED_MESSAGES_MAX):
                if (message := message_at(content, index)) is not None:
                    calls.append(format_call(message, "", description.methods if description else {}))
        return f"record {sequence_id}: {', '.join(calls)}"
    return ""


# Recorded logs as tests: what a class did once, it does again.


PathLike = str | os.PathLike[str]


def assert_replays(
    log: PathLike, cls: type[Immortal], *, receivers: Iterable[PathLike] = (), trust_pickle: bool = False
) -> None:
    """Replay a recorded log through ``cls`` in this process and compare what it makes with what was made then.

    ``log``: a file of ``immortal log export NAME FILE`` or of :meth:`Instance.export_log`, or a copy of an instance's
    log folder. Compared are all calls, and the state at each checkpoint. ``receivers``: the logs of instances that it
    calls, which show what was sent then. ``trust_pickle``: states that pickle wrote are read, which runs what is in
    them: for a log that is as much your own as the class is.

    Raises ReplayDiffers, an AssertionError, with the first difference: the record, the handler, the calls then and now,
    the attributes; DefinitionError for a class that is none; OSError, LogError, ReplayError for a log that can't be.
    """
    definition = definition_of(cls)
    with ExitStack() as stack:
        source, *others = [_opened(path, stack) for path in (log, *receivers)]
        source.trusts_pickle = trust_pickle
        by_name = {other.identity.instance_name: other for other in others}
        problems = list(problems_of(source, definition, by_name))
    if problems:
        said = "\n".join(map(printable_message, problems))  # the log may come from anywhere
        raise ReplayDiffers(f"{definition.name} does not do again what {log} has\n{said}")


def _opened(log: PathLike, stack: ExitStack) -> RecordSource:
    path = Path(log)
    return stack.enter_context(open_reader(path)) if path.is_dir() else RecordedLog.read(path)
