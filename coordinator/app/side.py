"""What a coordinator's loop has of its app, whether that is another process or runs in this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core import events as ev
from immortal.coordinator.driver.ports import AppPort


class AppSide(AppPort, Protocol):
    """One app at a time. Times are on the monotonic clock."""

    moved_ns: int
    """When a byte last went to the app or came from it."""

    @property
    def where(self) -> Mapping[str, str | None]:
        """Where the app is, or where it connects: what a line of the log names."""

    @property
    def is_handling(self) -> bool:
        """A handler runs in the coordinator's own thread. From signal handlers, too."""

    @property
    def sent_bytes(self) -> int:
        """How many bytes the next :meth:`take_sent` will tell of."""

    def listen(self) -> None:
        """Let the app come. For who holds the lock of the log. Raises ImmortalError."""

    def become_instance(self, settings: InstanceSettings) -> None:
        """The follower that this app belongs to has become the instance of ``settings``: let apps come there, too."""

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready."""

    def is_due(self, now_ns: int) -> bool:
        """Whether :meth:`process` has something to do although nothing is ready."""

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Take in what is ``ready`` (masks by descriptor) or due.

        The core must have handled all earlier events: what it has for an app that is gone must not reach the next.
        """

    def drain(self, timeout_s: float) -> None:
        """Let what is left reach the app. Blocks, up to ``timeout_s``."""

    def close(self) -> None: ...
