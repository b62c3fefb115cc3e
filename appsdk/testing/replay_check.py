"""Replay of a log, live or recorded, through a class in this process, compared as `immortal verify` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

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
from immortal.coordinator.log.open import open_reader
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import message_at, record_of
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import printable_message
from immortal.replay.app_process import DIFFERENCES_MAX
from immortal.replay.host import LocalRun
from immortal.replay.plan import RecordedLog, ReplayPlan, plan_route
from immortal.replay.result import ReplayResult, Sink
from immortal.replay.verify import CheckingSink, StateDivergence, VerifySection, verify_sections
from immortal.replay.verify_report import Report

BLAMED_MESSAGES_MAX = 3  # of a record: more are not shown


class ReplayDiffers(AppError, AssertionError):  # noqa: N818 (what happened)
    """Raised if a replay differs from the recorded run. The text is that of `immortal verify`."""


class LocalReplay(LocalRun):
    """One replay of ``plan``, from the checkpoint to its end. ``watch``: called with the app after each record."""

    def __init__(
        self,
        source: RecordSource,
        plan: ReplayPlan,
        definition: Definition,
        sink: Sink,
        watch: Callable[[int, LocalApp], None] = lambda sequence_id, app: None,
    ) -> None:
        super().__init__(source, plan_route(plan, source, source.summary()), definition, sink, outsiders=OUTSIDERS)
        self._watch = watch

    def run(self) -> ReplayResult:
        """Run the replay, once. Raises the app's errors; those of handlers are the result's ``failure``."""
        started_s = time.perf_counter()
        session, header = self.session, self.route.checkpoint
        try:
            self.restore()
            values = self.source.values(header.sequence_id + 1, self.route.last_sequence_id)
            while self.ended is None:
                require(session.wants_records, f"a replay stands still in the phase {session.phase.value!r}")
                self.give(next(values))
                self._watch(session.fed_sequence_id, self.app)
        finally:
            self.app.close()
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
            failure=self.ended.failure,
            notes=self.route.notes,
        )
        for verdict in self.verdicts:
            result.add(verdict)
        result.find_new_failures(self.source)
        return result


def verify_section(
    source: RecordSource,
    start: CheckpointHeader,
    end: CheckpointHeader | None,
    definition: Definition,
    receivers: Mapping[str, RecordSource],
) -> VerifySection:
    """Verify a section like :func:`immortal.replay.verify.verify_section`, with a class in this process.

    Raises AppError for a state that can't be restored, and similar errors.
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
    """Replay all that ``source`` keeps and yield lines that say where the replay differs; none if it does not.

    ``known_failure``: (record, message) at which a handler failed: another failure there is no difference.
    """
    name = source.identity.instance_name
    for start, end in verify_sections(source, source.summary(), everything=True).pairs:
        try:
            section = verify_section(source, start, end, definition, receivers or {})
        except ImmortalError as error:
            yield f"{name}: a replay from checkpoint {start.checkpoint_id} on fails: {error}"
            continue
        result = section.result
        if known_failure is not None:  # what follows it was never handled
            result.news = [news for news in result.news if news.key[:2] < known_failure]
        if result.failure is not None and (result.failure.sequence_id, result.failure.message_index) == known_failure:
            result.failure = None
        if not section.is_same:
            yield from Report(name, section, source).lines()
            if section.state is not None and (blamed := _first_unsteady(source, section, definition)):
                yield f"    the first message behind which two replays have two states: {blamed}"


def _first_unsteady(source: RecordSource, section: VerifySection, definition: Definition) -> str:
    """Describe the first record after which two replays have different states; "" if there is none."""
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


# Recorded logs as tests: a class must repeat what it did.


PathLike = str | os.PathLike[str]


def assert_replays(
    log: PathLike, cls: type[Immortal], *, receivers: Iterable[PathLike] = (), trust_pickle: bool = False
) -> None:
    """Replay a recorded log through ``cls`` in this process and compare its calls and states with the recorded ones.

    ``log``: a file of ``immortal log export NAME FILE`` or of :meth:`Instance.export_log`, or a copy of an instance's
    log folder. All calls are compared, and the state at each checkpoint. ``receivers``: logs of instances that it
    calls, which show what was sent. ``trust_pickle``: read states written by pickle, which runs code in them: only for
    a log that you trust like the class.

    Raises ReplayDiffers, an AssertionError, with the first difference: the record, the handler, the calls then and now,
    the attributes; DefinitionError for a class that is no app; OSError, LogError, ReplayError for a log that can't be
    read.
    """
    definition = definition_of(cls)
    with ExitStack() as stack:
        source, *others = [_opened(path, stack) for path in (log, *receivers)]
        source.trusts_pickle = trust_pickle
        by_name = {other.identity.instance_name: other for other in others}
        problems = list(problems_of(source, definition, by_name))
    if problems:
        said = "\n".join(map(printable_message, problems))  # the log can come from anywhere
        raise ReplayDiffers(f"{definition.name} does not do again what {log} has\n{said}")


def _opened(log: PathLike, stack: ExitStack) -> RecordSource:
    path = Path(log)
    return stack.enter_context(open_reader(path)) if path.is_dir() else RecordedLog.read(path)
