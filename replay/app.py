"""How the app of a replay is started: which command, with which terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from immortal.coordinator.config import InstanceSettings
from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT
from immortal.replay.errors import ReplayError

NOTES_VARIABLE = "IMMORTAL_CODE_NOTES"
"""Where the app notes which modules it has loaded: :mod:`immortal.appsdk.running.user_code`."""

BY_HAND = "-"
"""As an app's name: it is started by whoever replays, and told the address."""


class AppCommand(Struct, frozen=True):
    """How to start the app: ``argv`` with ``{address}`` where the address is to stand; empty: it is started by hand.

    ``environment`` is set in addition to the caller's. ``foreground``: it has the caller's terminal; otherwise its
    output is captured, and shown when it fails; with ``shows_output`` it is shown as it comes.
    """

    name: str
    argv: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    foreground: bool = False
    shows_output: bool = False
    rpc_limit_mib: int = ARGUMENTS_SIZE_MIB_DEFAULT  # of its arguments: a larger call is dropped, as it was in service
    settings: InstanceSettings | None = None  # started by hand, it comes in, and proves who it is, as these have it
    code: Path | None = None  # a folder or a wheel whose modules come before those of the current folder

    @classmethod
    def of(
        cls,
        app: str,
        *,
        strict: bool = False,
        checks_queries: bool = False,
        lines: bool = False,
        break_at: tuple[int, int | None] | None = None,
        settings: InstanceSettings | None = None,
        code: Path | None = None,
    ) -> AppCommand:
        """An SDK app, "module:Class", in trace mode; BY_HAND: none is started, and it comes in as ``settings`` say.

        ``checks_queries``: the state is compared around each query. ``lines``: those of its handlers' self.log are
        written as they once were, and shown.
        ``code``: a folder or a wheel whose modules come before those of the current folder.
        ``break_at``: (record, message): pdb stops before the handler of that message, in the caller's terminal.
        """
        if app == BY_HAND:
            if code is not None:
                raise ReplayError(f"{code} is for an app that is started from here: leave it out, or name the class")
            limit_mib = ARGUMENTS_SIZE_MIB_DEFAULT if settings is None else settings.rpc_limit_mb
            return cls(BY_HAND, rpc_limit_mib=limit_mib, settings=settings)
        argv = [sys.executable, "-P", "-m", "immortal.appsdk", app, "--address", "{address}", "--trace"]
        if strict:
            argv.append("--strict")
        if break_at is not None:
            sequence_id, message = break_at
            argv += ["--break", f"{sequence_id}" if message is None else f"{sequence_id}:{message}"]
        # The SDK wants a fixed hash seed, and would start itself over to get one.
        environment = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        # What the caller's environment says is meant for an app in service.
        environment |= {"IMMORTAL_STRICT": "", "IMMORTAL_BREAK": ""}
        environment["IMMORTAL_CHECK_QUERIES"] = "1" if checks_queries else ""
        environment["IMMORTAL_LOG_REPLAYED"] = "1" if lines else ""
        environment |= code_environment(code)
        return cls(app, argv, environment, foreground=break_at is not None, shows_output=lines, code=code)

    @property
    def by_hand(self) -> bool:
        return not self.argv


def code_environment(code: Path | None, notes: Path | str = os.devnull) -> dict[str, str]:
    """For a process that loads the user's code as :mod:`appsdk.running.user_code` says, that of ``code`` first.

    Raises ReplayError where there is no folder and no wheel.
    """
    if code is not None and not (code.is_dir() or (code.is_file() and code.suffix in (".whl", ".zip"))):
        raise ReplayError(f"{code} is neither a folder nor a wheel: one with the module of the class was expected")
    return {"IMMORTAL_CODE": "" if code is None else str(code.absolute()), NOTES_VARIABLE: str(notes)}
