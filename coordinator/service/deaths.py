"""What it means that a coordinator and its app have died, and how long to wait before they are started again.

- status 70 of the app: a handler failed. A replay would run it again, so nothing is started again.
- status 71 of the app: an upgrade failed. Both are started again, with the version before.
- status 75 of the app: it left to be recovered. It is started again at once, with restart or without.
- status 2 of either: it was called wrongly; the next start would be, too.
- status 3 of the coordinator: its log can't be replayed as it is, and could not be the next time.
- status 4 of the coordinator: another process writes its log by now. One that is to follow is started again, and does;
  any other is not.
- status 0 of the coordinator: somebody else asked it to stop. It is a clean end once the app has ended with 0 as well;
  with restart both come back, since it was not the supervisor that was asked.
- status 0 of the app: it was said goodbye to, if the coordinator ends by itself with 0 as well; else a death like any.
- anything else: a death. When both are found dead at once it is the coordinator that died, unless a signal killed the
  app and not the coordinator: an app that loses its coordinator leaves by itself.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

from msgspec import Struct

from immortal.coordinator.service.commands import Role

STATUS_HANDLER_FAILED = 70
STATUS_UPGRADE_FAILED = 71
STATUS_RECOVER_ME = 75
STATUS_TERMINATED = 128 + signal.SIGTERM  # of an app
STATUS_CALLED_WRONGLY = 2
STATUS_NO_RECOVERY = 3
STATUS_FENCED = 4
OWN_DEATHS = (STATUS_HANDLER_FAILED, STATUS_UPGRADE_FAILED, STATUS_CALLED_WRONGLY)
RESTART_PAUSE_S_MIN = 0.1
RESTART_PAUSE_S_MAX = 5.0
RESTART_PAUSE_RESET_S = 10.0  # who lived this long did not die of how it was started


class Exit(Struct, frozen=True):
    """How a process ended: ``returncode`` as subprocess gives it, negative for a signal."""

    role: Role
    pid: int
    returncode: int

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"status {self.returncode}"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class Verdict(enum.Enum):
    """What follows from the death of the two, in words."""

    DIED = "died"
    STOPPED = "stopped"
    HANDLER_FAILED = (
        "a handler failed, and a replay would only repeat it; nothing is lost: mend the handler, then start"
        " 'immortal run' again"
    )
    UPGRADE_FAILED = "the upgrade failed; the old version is whole"
    CALLED_WRONGLY = "it was called wrongly, a restart would not help; its own line says why"
    NO_RECOVERY = "its log can't be replayed as it is, a restart would not help; its own line says why"
    FENCED = "another process writes the log"


def judge(first: Exit, second: Exit, second_was_told: bool) -> Verdict:
    """What it means that ``first`` died by itself, and ``second`` then, by itself or because it was told to."""
    if first.role is Role.APP and first.returncode == STATUS_HANDLER_FAILED:
        return Verdict.HANDLER_FAILED
    if first.role is Role.APP and first.returncode == STATUS_UPGRADE_FAILED:
        return Verdict.UPGRADE_FAILED
    coordinator = first if first.role is Role.COORDINATOR else second
    if coordinator.returncode == STATUS_NO_RECOVERY:  # the app may be found dead first: it leaves when it hears of it
        return Verdict.NO_RECOVERY
    if coordinator.returncode == STATUS_FENCED:
        return Verdict.FENCED
    if first.returncode == STATUS_CALLED_WRONGLY:
        return Verdict.CALLED_WRONGLY
    if first.returncode == 0 and second.returncode == 0 and not second_was_told:
        return Verdict.STOPPED
    return Verdict.DIED


def who_died_first(exits: Sequence[Exit]) -> Exit:
    """Of those that were found dead at once, the one that the other died of."""
    by_role = {one.role: one for one in exits}
    app, coordinator = by_role.get(Role.APP), by_role.get(Role.COORDINATOR)
    if app is None or coordinator is None:
        return exits[0]
    own_death = app.returncode < 0 or app.returncode in OWN_DEATHS
    return app if own_death and coordinator.returncode >= 0 else coordinator


class RestartPause:
    """None after a long life; else 0.1 s, doubling up to 5 s while the two die young and before they have recovered.

    ``at_once``: the first deaths in a row that no pause follows.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._next_s = RESTART_PAUSE_S_MIN
        self._at_once = at_once

    def after(self, life_s: float, *, recovered: bool) -> float:
        """The pause after a life of ``life_s``; who had recovered did not die of how it was started."""
        if life_s >= RESTART_PAUSE_RESET_S:
            self._next_s = RESTART_PAUSE_S_MIN
            return 0.0
        if self._at_once:
            self._at_once -= 1
            return 0.0
        if recovered:
            self._next_s = RESTART_PAUSE_S_MIN
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)
        return pause_s
