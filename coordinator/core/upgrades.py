"""Upgrades of the app: those of the log's past, which each replay repeats, and the one that an operator has asked for.

Both are asked for behind a record of the replay, and begin with a checkpoint of the app. Of the past that is all. The
new version is the log's once another checkpoint, which confirms it, is durable; until then the old one is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core import notices
from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.dead_letters import Operator
from immortal.coordinator.core.effects import CloseApp, UpgradeEnded
from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.errors import AppProtocolError, DivergenceError
from immortal.coordinator.core.interfaces import VersionStart
from immortal.coordinator.core.session import UPGRADES, AppSession, Phase, Step
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.versions import Versions
from immortal.protocol.extensions import encode_version
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.readers import Message


@dataclass(slots=True, eq=False, repr=False)
class Upgrades:
    versions: Versions
    session: AppSession
    outbox: AppOutbox
    operator: Operator
    epoch: Epoch
    turn: Turn
    _repeated: VersionStart | None = None  # the version of the log's past that the app is being upgraded to

    # --- asking ------------------------------------------------------------------------------------------------------

    def repeat_next(self) -> None:
        """The replay has come to where the next version of the log's past begins."""
        self._repeated = self.versions.take_next()
        self._ask(self._repeated.version)

    def ask_for_new(self) -> None:
        """The replay is complete: the app is to become what the operator has asked for."""
        self.session.checkpoint_sequence_id = self.session.fed_sequence_id
        self._ask(self.versions.upgrade_to)

    def _ask(self, version: int | None) -> None:
        self.session.advance(Step.UPGRADE_ASKED)
        messages = encode_message(MessageType.UPGRADE_TAKE_CHECKPOINT)
        if version is not None and MessageType.VERSION in self.session.extensions:
            messages = encode_version(version) + messages
        self.outbox.control(MessageType.UPGRADE_TAKE_CHECKPOINT, messages)

    # --- the app's answer --------------------------------------------------------------------------------------------

    def is_new(self) -> bool:
        """The checkpoint that comes begins the new version, not one of the past. Raises AppProtocolError where the app
        names another version than was asked for."""
        if self._repeated is not None:
            return False
        session, wanted = self.session, self.versions.upgrade_to
        if MessageType.APP_DESCRIPTION in session.extensions and session.description.version != wanted:
            problem = f"the app is of version {session.description.version}, the upgrade is to version {wanted}"
            self._give_up(problem)
            raise AppProtocolError(problem)
        return True

    def upgraded(self) -> None:
        """The app has sent the checkpoint that an upgrade begins with."""
        session = self.session
        session.upgraded = True
        session.upgraded_sequence_id = session.fed_sequence_id
        if self._repeated is not None:
            self._repeated = None
            session.advance(Step.UPGRADE_REPLAYED)
            return
        session.advance(Step.CHECKPOINT_RECEIVED)
        self.outbox.control(MessageType.TAKE_CHECKPOINT)

    def failed(self, message: Message) -> None:
        """The app's UpgradeFailed. Raises DivergenceError where it is one of the log's past."""
        session = self.session
        reason = message.data.decode("utf-8", "replace")
        if session.phase not in UPGRADES:
            raise AppProtocolError("the app says that an upgrade failed, none was asked for")
        if self._repeated is not None:
            raise DivergenceError(
                f"the app can't repeat the upgrade to version {self._repeated.version} that the log has behind record "
                f"{self._repeated.sequence_id}: {reason}"
            )
        session.refused = True
        self._give_up(reason)
        self.turn.effects.append(CloseApp())

    def _give_up(self, reason: str) -> None:
        version, self.versions.upgrade_to = self.versions.upgrade_to, None
        if version is not None:
            self.turn.report(notices.UpgradeFailed(version, reason, self.versions.current))
            self.turn.effects.append(UpgradeEnded(version, reason))

    def app_lost(self) -> None:
        if self.session.phase in UPGRADES and self.versions.upgrade_to is not None:
            self.turn.report(notices.UpgradeInterrupted(self.versions.upgrade_to))

    # --- durable -----------------------------------------------------------------------------------------------------

    def began(self, start: VersionStart) -> None:
        """A version is durable: of the first start, or behind an upgrade."""
        before = self.versions.current
        self.versions.began(start)
        if start.sequence_id < 0:
            return
        session = self.session
        if session.phase is Phase.COMPLETING_UPGRADE:
            session.advance(Step.UPGRADE_DURABLE)
            self.turn.report(notices.Recovered(self.epoch.number, session.fed_sequence_id))
        self.turn.report(notices.Upgraded(before, start.version, start.sequence_id))
        self.turn.effects.append(UpgradeEnded(start.version))
        self.operator.upgraded()
