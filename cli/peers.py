"""Commands on an instance's peers: show their streams; reset or reclaim when a log was replaced by another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import asdict

from immortal.cli.options import instance_name, name_argument, pass_registry
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary
from immortal.coordinator.core.peers import reclaim_transaction, reset_transaction
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists, open_log
from immortal.coordinator.operator import control
from immortal.presenters.operations import Peer, consequences, live_peers
from immortal.protocol.command_line import (
    Commands,
    FailedError,
    echo,
    echo_json,
    echo_lines,
    json_option,
    number_text,
    print_table,
    size_text,
)
from immortal.protocol.safe_output import printable


@click.group(cls=Commands)
def peers() -> None:
    """Show and repair the streams between an instance and its peers."""


@peers.command()
@name_argument
@json_option
@pass_registry
def show(registry: Registry, name: str, as_json: bool) -> None:
    """Show the peers of NAME: endpoints, stream positions, last errors.

    All positions are those in NAME's own log. If NAME is stopped, they are read from its log.
    """
    settings = registry.load(name)
    found = _peers_of(settings, registry)
    if as_json:
        echo_json({"name": name, "peers": found})
        return
    if not found:
        echo(f"{name} has no peers yet")
        return
    _print_table(found)
    for peer, one in found.items():
        if one["error"]:
            echo(f"{peer}: {one['error']}")


@peers.command()
@name_argument
@click.argument("peer", callback=instance_name)
@click.option("--yes", is_flag=True, help="Reset without asking for confirmation.")
@json_option
@pass_registry
def reset(registry: Registry, name: str, peer: str, yes: bool, as_json: bool) -> None:
    """Restart the streams with PEER after its log was wiped or replaced.

    If there is a full copy of PEER's log, restore that instead: then nothing is lost. NAME may be running or stopped.
    If PEER now has an older copy of its log, run 'immortal peers reset PEER NAME' too.
    """
    settings = registry.load(name)
    if peer == name:
        raise click.UsageError(f"{name!r} is not a peer of itself")
    known = _peers_of(settings, registry).get(peer)
    if known is None or known["committer_id"] is None:
        raise _nothing_known(name, peer)
    lines = list(consequences(name, peer, known))
    if not yes:
        echo_lines(lines, err=as_json)
        click.confirm(f"Reset the streams with {peer}?", abort=True, err=as_json)
    _reset(settings, peer)
    if as_json:
        echo_json({"name": name, "peer": peer, "reset": True, "before": known})
        return
    if yes:
        echo_lines(lines)
    echo(f"reset: {name} accepts the log that {peer} has at their next connection")


@peers.command()
@name_argument
@click.option("--accept-loss", is_flag=True, help="Continue even if calls are lost or doubled, or if that is unknown.")
@json_option
@pass_registry
def reclaim(registry: Registry, name: str, accept_loss: bool, as_json: bool) -> None:
    """Make the log of NAME the valid one again after a copy of it has run.

    Stop the copy first. NAME may be running or stopped; its peers need no command. Peers keep the calls that the copy
    sent, and calls that the copy received are lost to NAME. If there are any, or if a peer can't be asked because it is
    not registered in the same folder, the command does nothing without --accept-loss.
    """
    settings = registry.load(name)
    known = {peer: one for peer, one in _peers_of(settings, registry).items() if one["committer_id"] is not None}
    if not known:
        raise FailedError(f"{name!r} has had no contact with any peer yet: there is nothing to reclaim")
    losses = {peer: _Loss.between(one, _as_seen_by(registry, peer, name)) for peer, one in known.items()}
    told = [line for peer, loss in losses.items() for line in loss.lines(name, peer)]
    if told and not accept_loss:
        raise FailedError("\n  ".join([f"nothing was done: with --accept-loss {name!r} continues, and", *told]))
    if control.running(settings.folder) is not None:
        control.query(settings.folder, "reclaim")
    else:
        with closing(open_log(own_logs.place_of(settings), settings.name)) as store:
            store.commit(reclaim_transaction(store.summary()))
    if as_json:
        echo_json({"name": name, "reclaimed": True, "peers": {peer: asdict(loss) for peer, loss in losses.items()}})
        return
    echo_lines(told)
    echo(f"reclaimed: the log of {name} is valid, and its streams with {', '.join(sorted(known))} continue")


class _Loss(Struct, frozen=True):
    """Calls lost at one peer because a copy of the log has run, as both logs show; None: the peer can't be asked."""

    unknown_at_peer: int | None  # calls that the peer has beyond what it acknowledged to this log
    lost_of_peer: int | None  # calls that the peer sent to the copy, which acknowledged them

    @classmethod
    def between(cls, own: Peer, other: Peer | None) -> _Loss:
        if other is None:
            return cls(None, None)
        unknown = (other["received"] or 0) + own["offset"] - (own["acknowledged"] or 0)
        lost = (other["acknowledged"] or 0) - other["offset"] - (own["received"] or 0)
        return cls(max(unknown, 0), max(lost, 0))

    def lines(self, name: str, peer: str) -> Iterator[str]:
        if self.unknown_at_peer is None:
            yield (
                f"{peer}: the losses are not known, because {peer} is not registered in this folder or has no log; on"
                f" its machine, 'immortal peers show {peer}' shows how many calls it has received from {name}, and how"
                f" many of its own calls {name} has acknowledged"
            )
        if self.unknown_at_peer:
            yield (
                f"{peer}: has executed {self.unknown_at_peer} calls that the log of {name} does not have as received:"
                f" the copy made them, or {name} did without an acknowledgement, and sends them again"
            )
        if self.lost_of_peer:
            yield f"{peer}: {self.lost_of_peer} of its calls went to the copy, and are lost to {name}"


def _as_seen_by(registry: Registry, peer: str, name: str) -> Peer | None:
    """Return the streams with ``name`` as ``peer`` sees them; None if they are not known here."""
    if peer not in registry.names():
        return None
    return _peers_of(registry.load(peer), registry).get(name)


def _nothing_known(name: str, peer: str) -> FailedError:
    return FailedError(f"{name!r} has had no contact with {peer!r} yet: there is nothing to reset")


def _reset(settings: InstanceSettings, peer: str) -> None:
    if control.running(settings.folder) is not None:
        if not control.query(settings.folder, "reset-peer", argument={"peer": peer}).get("found"):
            raise _nothing_known(settings.name, peer)
        return
    with closing(own_logs.open_log(settings)) as store:
        transaction = reset_transaction(store.summary(), peer)
        if transaction is None:
            raise _nothing_known(settings.name, peer)
        store.commit(transaction)


def _peers_of(settings: InstanceSettings, registry: Registry) -> dict[str, Peer]:
    """Return the peers as the running coordinator knows them; if none runs, as the log does."""
    if (live := live_peers(settings)) is not None:
        return live
    if not log_exists(settings.log):
        return {}
    from immortal.coordinator.peers.discovery import Discovery, Routes  # here: this import takes 8 ms

    with own_logs.open_reader(settings) as reader:
        summary = reader.summary()
    routes = Routes(Discovery(settings, registry), lambda message: None)
    names = {*summary.sources, *summary.peers, *summary.acknowledged, *summary.spilled} - {IMPULSES, ONESELF}
    return {name: _peer_in_log(summary, name) | _peer_of_route(routes, name) for name in sorted(names)}


def _peer_in_log(summary: LogSummary, name: str) -> Peer:
    source, start = summary.sources.get(name), summary.stream_starts.get(name)
    return {
        "committer_id": summary.peers.get(name) or (source.committer_id if source else 0) or None,
        "state": None,
        "made": None,
        "sent": None,
        "acknowledged": summary.acknowledged.get(name),
        "waiting_bytes": None,
        "memory_bytes": None,
        "spilled_bytes": sum(extent.size_bytes for extent in summary.spilled.get(name, ())),
        "in_flight_bytes": None,
        "window_bytes": None,
        "granted_bytes": None,
        "held_up": False,
        "received": source.position if source else None,
        "offset": start.offset if start else 0,
        "reset_pending": bool((start and start.pending) or (source and source.epoch < 0)),
        "connected_s": None,
    }


def _peer_of_route(routes: Any, name: str) -> Peer:
    route = routes.describe(name)
    return {"endpoint": route["endpoint"], "origin": route["origin"], "error": route["problem"]}


# --- tables ----------------------------------------------------------------------------------------------------------


def _print_table(peers: dict[str, Peer]) -> None:
    numbers = ("made", "sent", "acknowledged", "received", "in memory", "on disk", "in flight", "granted")
    rows = (
        (
            peer,
            one["endpoint"] or "not found",
            one["origin"] or "-",
            "-" if one["connected_s"] is None else f"for {one['connected_s']:.0f} s",
            _state(one),
            *(number_text(one[key]) for key in ("made", "sent", "acknowledged", "received")),
            size_text(one["memory_bytes"]),
            size_text(one["spilled_bytes"]),
            _window(one),
            size_text(one["granted_bytes"]),
        )
        for peer, one in peers.items()
    )
    heads = ("peer", "endpoint", "by", "connected", "stream", *numbers)
    print_table(heads, (tuple(map(printable, row)) for row in rows), right=numbers)  # a cell could have several lines


def _state(peer: Peer) -> str:
    reset, held_up = ", reset" if peer["reset_pending"] else "", ", holds up the app" if peer["held_up"] else ""
    return f"{peer['state'] or '-'}{reset}{held_up}"


def _window(peer: Peer) -> str:
    if peer["window_bytes"] is None:
        return "-"
    return f"{size_text(peer['in_flight_bytes'])} of {size_text(peer['window_bytes'])}"
