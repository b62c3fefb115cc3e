"""Marks that the simulation must reach: one for each kind of fault at each place, and for rare ways in the core.

A run counts the marks that it reaches. A mark that no seed of a nightly run reaches makes that run fail: the simulation
no longer tests that place.
"""

from __future__ import annotations

from collections import Counter

from immortal.coordinator.core import notices
from immortal.coordinator.core.life_cycle.session import GETS_RECORDS, Phase
from immortal.protocol.verdicts import VerdictKind
from tests.simulation.plan import CRASHES, FAULT_KINDS

_PHASES = [phase for phase in Phase if phase is not Phase.STOPPED]

NOTICES: dict[type[notices.Notice], str] = {
    notices.AppGone: "app lost",
    notices.CheckpointDamaged: "fell back to an older checkpoint",
    notices.CheckpointFailed: "snapshot given up",
    notices.UpgradeInterrupted: "upgrade interrupted",
    notices.Upgraded: "upgrade durable",
    notices.UpgradeFailed: "upgrade failed",
    notices.StreamStopped: "stream stopped",
    notices.StreamWaits: "stream stopped",
    notices.NotCalledAgain: "verdict: KILLED",
    notices.AppCutOff: "app lost inside a message",
    notices.CheckpointAdopted: "checkpoint of a follower adopted",
    notices.StandbyTakesNone: "checkpoint asked of the app after all",
    notices.OfferRefused: "checkpoint of a follower not wanted any more",
}
"""Marks by the core's notices."""

EXPECTED = frozenset(
    [
        *(f"{kind} while {phase.value}" for kind in CRASHES for phase in _PHASES if kind != "crash app"),
        *(f"crash app while {phase.value}" for phase in _PHASES if phase is not Phase.WAITING),
        *(f"fault: {kind}" for kind in FAULT_KINDS),
        *NOTICES.values(),
        "older copy found out",
        "crash right before Commit",
        "crash right before SendToPeer",
        "crash right before ReplyToPeer",
        "crash right before SendToApp",
        "crash right before WriteCheckpointChunk",
        "commits joined",
        "commit written at once",
        "read answered late",
        "answer kept back",
        "batch waited for its turn",
        "writes lost in a crash",
        "stopped: disk full",
        "stopped: sync fails",
        "stopped: damaged record",
        "stopped: no usable checkpoint",
        "start refused: damaged table",
        "restored from a copy",
        "stopped cleanly",
        "promoted",
        "careful run lived through",
        "snapshot taken",
        "app paused",
        "open stream moved",
        "Resend",
        "frame of a past life refused",
        "Welcome beyond what was known",
        "frame answered twice",
        "impulse put back by a replay",
        "upgrade of the past repeated",
        "upgrade asked for again",
        "time told to the app's clock",
        "record later than the machine's clock",
        "clock set far away",
        "jump of the clock taken",
        "async handler waited through a crash",
        *(f"verdict: {kind.name}" for kind in (VerdictKind.REFUSED, VerdictKind.UNDONE, VerdictKind.KEPT)),
        *(f"app died while {phase.value}" for phase in (*GETS_RECORDS - {Phase.FOLLOWING}, Phase.UPGRADING)),
        "crash with a verdict on its way",
        "dead letter",
        "caller told of a failure",
        "recovered for want of a copy",
        "caller answered",
        "spilled messages read",
        "second copy beside the first",
        "everything crashed at once",
        "log silent",
        "read not answered",
        "append settled",
        "record followed",
        "taken over",
        "handed over",
        "taken over from one that lives",
        "fenced",
        "checkpoint offered to the next writer",
    ]
)


class Marks(Counter[str]):
    """Counts of how often each mark was reached."""

    def never_reached(self) -> list[str]:
        return sorted(EXPECTED - set(self))
