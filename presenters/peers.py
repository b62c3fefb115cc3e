"""Peers of an instance: what is known of each, and what a reset would lose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.operator import control


def consequences(name: str, peer: str, known: Peer) -> Iterator[str]:
    """List in figures what a reset of ``peer`` may lose or execute twice."""
    acknowledged, made, received = known["acknowledged"], known["made"], known["received"]
    yield f"this makes {name} forget which log {peer} has (committer {known['committer_id']}):"
    if acknowledged is not None:
        yield (
            f"  {name} to {peer}: the first {acknowledged} calls, which {peer} acknowledged, are not sent again: what"
            f" its log has not is lost to it"
        )
        waiting = "" if made is None else f" ({made - acknowledged} of {made})"
        yield (
            f"    what is not acknowledged{waiting} is sent to the log that {peer} has then; any of it that is there"
            f" already is executed twice"
        )
    if received is not None:
        yield (
            f"  {peer} to {name}: {received} calls are here; a new log of {peer} begins with its call 1, and what"
            f" it makes again is executed twice"
        )
    yield f"  if {peer} turns out to have the log that it had, whole, nothing is lost or doubled"


def live_peers(settings: InstanceSettings) -> dict[str, Peer] | None:
    """Ask the running coordinator for its peers; None if none runs."""
    if control.running(settings.folder) is None:
        return None
    try:
        found: dict[str, Peer] = control.query(settings.folder, "peers")["peers"]
    except control.NotRunningError:
        return None  # the coordinator has just stopped
    return found


Peer = dict[str, Any]
