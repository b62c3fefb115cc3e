"""Recorded logs as tests: what a class did once, it does again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.testing.replaying import ReplayDiffers, problems_of
from immortal.coordinator.log import open_reader
from immortal.coordinator.log.source import RecordSource
from immortal.protocol.shown import printable_message
from immortal.replay.recorded import RecordedLog

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
