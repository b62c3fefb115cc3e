"""Asking a running coordinator: where it says how it is reached, and one question and answer through the messenger.

A coordinator writes <folder>/coordinator.json when it is ready to answer, and `immortal run` <folder>/supervisor.json
when it can be told to stop and to restart (protocol.process_file). <folder>/control_token, made anew at each start, is
what a question must bring: only the instance's owner can read it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.config import write_atomically
from protocol import process_file
from protocol.errors import ImmortalError
from protocol.process_file import COORDINATOR_FILE_NAME, SUPERVISOR_FILE_NAME, ProcessFile

QUERY_TIMEOUT_S = 5.0
ALIVE_CHECK_S = 0.25  # how often a waiting query looks whether the coordinator still lives
READY_VARIABLE = "IMMORTAL_READY_FD"  # a descriptor from the supervisor: a line is written to it at each "ready"
_TOKEN_FILE_NAME = "control_token"  # noqa: S105 (a name)
_TOKEN_SIZE_BYTES = 32


class ControlError(ImmortalError):
    """A coordinator cannot be asked."""


class NotRunningError(ControlError):
    """There is no coordinator to ask."""


class RefusedError(ControlError):
    """A coordinator does not do what it is asked for; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the coordinator of {name!r} does not do that: {reason}")
        self.reason = reason


class RunningError(ControlError):
    """What is asked for needs an instance that does not run."""


class ControlFile(ProcessFile, frozen=True, kw_only=True):
    """What a running coordinator says about itself."""

    control: str  # the endpoint that answers


def path(folder: Path) -> Path:
    return folder / COORDINATOR_FILE_NAME


def supervisor_path(folder: Path) -> Path:
    return folder / SUPERVISOR_FILE_NAME


# --- the coordinator's side ------------------------------------------------------------------------------------------


def announce(folder: Path, control: str) -> None:
    """Write this process down as the coordinator that answers at ``control``. Raises ControlError."""
    _write(path(folder), msgspec.json.encode(ControlFile(control=control, **process_file.own_fields())))


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[None]:
    """This process is the one that starts and stops the instance of ``folder``. Raises ControlError."""
    _write(supervisor_path(folder), msgspec.json.encode(ProcessFile(**process_file.own_fields())))
    try:
        yield
    finally:
        _withdraw(supervisor_path(folder))


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
    """Take the coordinator's file away again, unless it is another process's by now."""
    _withdraw(path(folder))


def _withdraw(file: Path) -> None:
    found = process_file.read(file, ProcessFile)
    if found is not None and found.pid == os.getpid():
        file.unlink(missing_ok=True)


def report_ready() -> None:
    """Tell the supervisor, if there is one, that the app, or the next one, is recovered and takes input."""
    descriptor = os.environ.get(READY_VARIABLE, "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), b"ready\n")
        except OSError:
            del os.environ[READY_VARIABLE]  # the supervisor is gone, or was never there


# --- the asking side -------------------------------------------------------------------------------------------------


def running(folder: Path) -> ControlFile | None:
    """What the coordinator of this folder has announced, if its process lives."""
    return process_file.read_living(path(folder), ControlFile)


def supervisor(folder: Path) -> ProcessFile | None:
    """The `immortal run` of this folder, if it lives."""
    return process_file.read_living(supervisor_path(folder), ProcessFile)


def refuse_running(folder: Path) -> None:
    """Raises RunningError while the instance of ``folder`` runs, or is about to be started again."""
    found = supervisor(folder) or running(folder)
    if found is not None:
        stop = f"'immortal stop {folder.name}' stops it"
        raise RunningError(f"{folder.name!r} runs, as process {found.pid}: {stop}")


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
    if "denied" in answer:
        raise ControlError(f"the coordinator of {folder.name!r} gives no answer: {answer['denied']}")
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
