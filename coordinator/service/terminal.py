"""The app's input under `immortal run`: none, what its supervisor has, or the terminal at which somebody debugs it.

At a terminal the app stays in the supervisor's process group, so that it may read there, in front and behind as the
shell's jobs go: Ctrl-Z stops both, `fg` brings both back, and an app that asks from behind stops the job until `fg`.
The coordinator has a group of its own and goes on meanwhile. Ctrl-C goes to that whole group; the app has it blocked,
whatever a debugger makes of it, so that the supervisor alone stops them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any, TypedDict

from immortal.coordinator.service.parent_death import die_with_parent


class Placing(TypedDict):
    """Arguments of Popen."""

    stdin: int | None
    process_group: int
    preexec_fn: Callable[[], None]


class Background:
    """No input: what asks for some meets its end at once. In a group of its own, which Ctrl-C does not reach."""

    def placing(self) -> Placing:
        # preexec_fn is unsafe in a process with threads (a lock held by another thread stays locked in the child): the
        # supervisor has none, and nothing but system calls is made there.
        return Placing(stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent(os.getpid()))

    def left(self) -> None:
        """Whoever had it is gone."""


class Piped(Background):
    """What the supervisor is given on stdin, by another program."""

    def placing(self) -> Placing:
        return Placing(stdin=None, process_group=0, preexec_fn=die_with_parent(os.getpid()))


class Terminal(Background):
    """The supervisor's own, on stdin."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._mode: list[Any] = termios.tcgetattr(self._descriptor)

    def placing(self) -> Placing:
        with_parent = die_with_parent(os.getpid())

        def arrange() -> None:
            with_parent()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

        return Placing(stdin=None, process_group=-1, preexec_fn=arrange)

    def left(self) -> None:
        """One that was ended at its prompt leaves the terminal as its line editor had it, without echo."""
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # also from behind
        try:
            with contextlib.suppress(termios.error):  # it may be gone
                if termios.tcgetattr(self._descriptor) != self._mode:
                    termios.tcsetattr(self._descriptor, termios.TCSANOW, self._mode)
        finally:
            signal.signal(signal.SIGTTOU, before)


def app_input(interactive: bool | None) -> Background:
    """``interactive``: whether the app gets this process's stdin; None: where that is a terminal."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if interactive is False or (interactive is None and not is_terminal):
        return Background()
    return Terminal() if is_terminal else Piped()
