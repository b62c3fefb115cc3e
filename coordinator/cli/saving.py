"""Whether the state of an instance can be saved: a live one says so itself, the log of a stopped one is replayed."""

from __future__ import annotations

import time

from msgspec import Struct

from immortal.coordinator.cli.progress import Advance, progress_bar
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.operator import control
from immortal.protocol.errors import ImmortalError

STILL_S_MAX = 60.0


class StateLook(Struct, frozen=True):
    """``problem``: why it can't be saved, in words; ``note``: why that was not found out. "": none. ``message``: since
    which one, (sequence ID, index)."""

    problem: str = ""
    note: str = ""
    message: tuple[int, int] | None = None


def _patient(advance: Advance) -> Advance:
    """As ``advance``, for a replay that may stand still for STILL_S_MAX: a handler may loop. Raises ReplayError."""
    from immortal.replay.errors import ReplayError

    seen, since_s = -1, time.monotonic()

    def patient(records: int, total: int | None) -> None:
        nonlocal seen, since_s
        if records != seen:
            seen, since_s = records, time.monotonic()
        elif time.monotonic() - since_s > STILL_S_MAX:
            raise ReplayError(f"its replay stands still behind {records} records, for {STILL_S_MAX:g} s")
        advance(records, total)

    return patient


def look_at_state(settings: InstanceSettings) -> StateLook:
    """Raises nothing: what stands in the way is a note, but where nobody knows which app it is."""
    from immortal.replay import AppCommand, ReplayPlan, run_replay
    from immortal.replay.apps import default_app
    from immortal.replay.errors import ReplayError, StateUnsavedError
    from immortal.replay.result import Sink

    try:
        if control.running(settings.folder) is not None:
            status = control.query(settings.folder, "status")
            unsaved = status.get("unsaved") or {}
            since = f" since record {unsaved['record']}" if unsaved.get("record") is not None else ""
            return StateLook(f"its state can't be saved{since}: {unsaved['since']}" if unsaved else "")
        with own_logs.open_reader(settings) as reader:
            summary = reader.summary()
            if not summary.extensions or not summary.checkpoints:
                return StateLook()  # it has none yet, or it is one of an app that knows only the base protocol
            try:
                app = default_app(settings.name, settings.app, summary, summary.versions[-1].version)
            except ReplayError:
                return StateLook()
            with progress_bar("whether its state can be saved") as advance:
                command, progress = AppCommand.of(app, settings=settings), _patient(advance)
                run_replay(reader, ReplayPlan(), command, Sink(), progress=progress)
    except StateUnsavedError as error:
        return StateLook(str(error), message=(error.unsaved.sequence_id, error.unsaved.message_index))
    except (ImmortalError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return StateLook(note=f"whether its state can be saved was not found out: {reason}")
    return StateLook()
