"""Recorded logs as tests: what a class did once, it does again."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from appsdk.immortal import Immortal
from appsdk.proxy import definition_of
from appsdk.testing.replaying import ReplayDiffers, problems_of
from coordinator.log import open_reader
from coordinator.replay.recorded import RecordedLog
from coordinator.replay.source import RecordSource


def assert_replays(log: str | os.PathLike[str], cls: type[Immortal]) -> None:
    """Replay a recorded log through ``cls`` in this process and compare what it makes with what was made then.

    ``log``: a file of ``immortal log export NAME FILE`` or of :meth:`Instance.export_log`, or a copy of an instance's
    log folder. Compared are all calls, and the state at each checkpoint.

    Raises ReplayDiffers, an AssertionError, with the first difference: the record, the handler, the calls then and now,
    the attributes; DefinitionError for a class that is none; OSError and LogError for a log that can't be read.
    """
    definition = definition_of(cls)
    path = Path(log)
    with ExitStack() as stack:
        source: RecordSource
        if path.is_dir():
            source = stack.enter_context(open_reader(path))
        else:
            source = RecordedLog.read(path)
        problems = list(problems_of(source, definition))
    if problems:
        raise ReplayDiffers(f"{definition.name} does not do again what {path} has\n" + "\n".join(problems))
