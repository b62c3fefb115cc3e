"""Asking a running coordinator: where it says how it is reached, and one question and answer through the messenger.

A coordinator writes <folder>/coordinator.json when it is ready to answer, and removes it when it stops cleanly. After
a crash the file stays: it counts only while the process that wrote it lives. <folder>/control_token, made anew at each
start, is what a question must bring: only the instance's owner can read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.config import write_atomically
from protocol.errors import ImmortalError

QUERY_TIMEOUT_S = 5.0
ALIVE_CHECK_S = 0.25  # how often a waiting query looks whether the coordinator still lives
READY_VARIABLE = "IMMORTAL_READY_FD"  # a descriptor from the supervisor: a line is written to it at "ready"
_FILE_NAME = "coordinator.json"
_TOKEN_FILE_NAME = "control_token"
_TOKEN_SIZE_BYTES = 32


class ControlError(ImmortalError):
    """A coordinator cannot be asked."""


class NotRunningError(ControlError):
    """There is no coordinator to ask."""


class RefusedError(ControlError):
    """A coordinator does not do what it is asked for; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the coordinator of {name!r} gives no answer: {reason}")
        self.reason = reason


class ControlFile(msgspec.Struct, frozen=True):
    """What a running coordinator says about itself."""

    pid: int
    control: str  # the endpoint that answers
    started_ns: int
    process_start_ticks: int = 0  # the kernel's start time of that process: tells it from a later one with its ID


def path(folder: Path) -> Path:
    return folder / _FILE_NAME


# --- the coordinator's side ------------------------------------------------------------------------------------------


def announce(folder: Path, control: str) -> None:
    """Write this process down as the coordinator that answers at ``control``. Raises ControlError."""
    pid = os.getpid()
    written = ControlFile(pid, control, time.time_ns(), _process_start_ticks(pid) or 0)
    _write(path(folder), msgspec.json.encode(written))


def make_token(folder: Path) -> bytes:
    """What questions to this process must bring from now on; it is in a file for whoever may ask.

    Raises ControlError.
    """
    token = secrets.token_hex(_TOKEN_SIZE_BYTES).encode()
    _write(token_path(folder), token, mode=0o600)
    return token


def _write(file: Path, data: bytes, *, mode: int = 0o644) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data, mode=mode)
    except OSError as error:
        raise ControlError(f"{file} can't be written: {error.strerror}; make room there, or mend that") from None


def may_ask(token: bytes, parts: Sequence[bytes]) -> bool:
    """Whether the question in ``parts`` (verb, token) brings ``token``."""
    return len(parts) > 1 and hmac.compare_digest(parts[1], token)


def token_path(folder: Path) -> Path:
    return folder / _TOKEN_FILE_NAME


def remove_token(folder: Path) -> None:
    token_path(folder).unlink(missing_ok=True)


def withdraw(folder: Path) -> None:
    """Take the file away again, unless it is another process's by now."""
    found = _read(folder)
    if found is not None and found.pid == os.getpid():
        path(folder).unlink(missing_ok=True)


def report_ready() -> None:
    """Tell the supervisor, if there is one, that the app is recovered and takes input. Later calls do nothing."""
    descriptor = os.environ.pop(READY_VARIABLE, "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), b"ready\n")
            os.close(int(descriptor))
        except OSError:
            pass  # the supervisor is gone, or was never there


# --- the asking side -------------------------------------------------------------------------------------------------


def running(folder: Path) -> ControlFile | None:
    """What the coordinator of this folder has announced, if its process lives."""
    found = _read(folder)
    if found is None:
        return None
    ticks = _process_start_ticks(found.pid)
    if ticks is None or (found.process_start_ticks and ticks != found.process_start_ticks):
        return None
    return found


def query(folder: Path, verb: str, timeout_s: float = QUERY_TIMEOUT_S) -> dict[str, Any]:
    """Ask the coordinator of ``folder`` (its name is the instance's).

    Raises NotRunningError, RefusedError, ControlError.
    """
    from coordinator.messenger import Messenger

    found = running(folder)
    if found is None:
        raise NotRunningError(f"the coordinator of {folder.name!r} does not run")
    answered = threading.Event()
    replies: list[bytes] = []

    def reply(parts: list[bytes]) -> None:
        replies.extend(parts)
        answered.set()

    messenger = Messenger()
    try:
        messenger.start()
        messenger.send_message(found.control, [verb.encode(), _token(folder)], reply)
        deadline = time.monotonic() + timeout_s
        while not answered.wait(min(ALIVE_CHECK_S, max(0.0, deadline - time.monotonic()))):
            if running(folder) != found:
                raise NotRunningError(f"the coordinator of {folder.name!r} has stopped")
            if time.monotonic() < deadline:
                continue
            raise ControlError(
                f"the coordinator of {folder.name!r} (process {found.pid}) gives no answer at {found.control}"
                f" within {timeout_s:g} s"
            )
    finally:
        messenger.close()
    try:
        answer = msgspec.json.decode(b"".join(replies), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ControlError(f"the coordinator of {folder.name!r} gave an answer that makes no sense: {error}") from None
    if isinstance(answer.get("refused"), str):
        raise RefusedError(folder.name, answer["refused"])
    return answer


def _token(folder: Path) -> bytes:
    path = token_path(folder)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ControlError(
            f"the coordinator of {folder.name!r} answers only to its owner: {path} cannot be read ({error.strerror})"
        ) from None


def _read(folder: Path) -> ControlFile | None:
    try:
        return msgspec.json.decode(path(folder).read_bytes(), type=ControlFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _process_start_ticks(pid: int) -> int | None:
    """When the process started, in the kernel's ticks since boot; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
