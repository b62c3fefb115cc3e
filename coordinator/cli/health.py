"""health: whether an instance lives, and whether it is ready, as an exit status for probes."""

from __future__ import annotations

import time
from pathlib import Path

import click

from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.cli.handlers import waits_in_words
from immortal.coordinator.cli.status import multicasts, unsaved_in_words
from immortal.coordinator.core.session import WORKS, Phase
from immortal.coordinator.instances.follower_places import FOLDER_NAME
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.command_line import FailedError, echo

SILENT_NS = 1_000_000_000  # who is waited for longer than that is named
_READY = frozenset(phase.value for phase in WORKS | {Phase.FOLLOWING})


@click.command()
@name_argument
@click.option("--live", "only_live", is_flag=True, help="The coordinator answers, whatever its app does.")
@click.option("--ready", is_flag=True, help="As without an option: it also works, or follows and keeps up.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=control.QUERY_TIMEOUT_S,
    show_default=True,
    help="How long to wait for the answer.",
)
@pass_registry
def health(registry: Registry, name: str, only_live: bool, ready: bool, timeout_s: float) -> None:
    """Say whether NAME is well: status 0, or 1 with the reason, for probes.

    Ready is an instance whose app works, and one that follows another process and keeps up. The coordinator alone is
    looked at, in this home: its peers may be down. One whose state can't be saved is ready, and it is said. Without an
    option its app is asked too, whom it waits for with ordered multicasts; that does not change the status.
    """
    if only_live and ready:
        raise click.UsageError("--live or --ready, not both")
    settings = registry.load(name)
    folder = _answering(settings.folder)
    status = control.query(folder, "status", timeout_s)
    phase, unsaved = str(status["phase"]), unsaved_in_words(status)
    if not only_live and phase not in _READY:
        raise FailedError(f"{name} is not ready: {phase}")
    echo(f"{name} is {'live' if only_live else 'ready'}: {phase}{f', and has {unsaved}' if unsaved else ''}")
    if not only_live and not ready:
        for one in multicasts(settings).get("multicasts", ()):
            if time.time_ns() - one["since_ns"] > SILENT_NS:
                echo(f"{name}: {waits_in_words(one)}")


def _answering(folder: Path) -> Path:
    """Where the instance is asked; where none runs, its first follower here."""
    followers = sorted(folder.glob(f"{FOLDER_NAME}/*")) if control.running(folder) is None else ()
    return next((one for one in followers if control.running(one) is not None), folder)
