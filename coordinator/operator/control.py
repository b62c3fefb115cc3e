"""Requests to a running coordinator: the file that announces its control socket, and one question with its answer.

A coordinator writes <folder>/coordinator.json when it is ready to answer, and `immortal run` <folder>/supervisor.json
when it can be told to stop and to restart (protocol/files.py). It answers at a Unix socket, <folder>/control.sock,
to its own user and to root (immortal.coordinator.operator.control_server).

Question and answer are JSON behind a length prefix (4 bytes, little endian). A connection has one question and answer.

    question {"verb": "skip", "argument": {...}}      answer: an object; {"refused": TEXT} if it refuses
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config import socket_addresses, write_atomically
from immortal.protocol import decoding, files
from immortal.protocol.errors import ImmortalError
from immortal.protocol.shared_registry import last_holder

QUERY_TIMEOUT_S = 5.0
ENDING_TIMEOUT_S = 0.5  # a process that ends closes its sockets before it is gone
QUESTION_SIZE_BYTES_MAX = 32 << 10  # the longest reason for a skip, or the keys of some 2,000 dead letters
ANSWER_SIZE_BYTES_MAX = 16 << 20  # the status of an instance with thousands of peers has some MiB
LENGTH_PREFIX_SIZE_BYTES = 4  # size of the length prefix
READY_VARIABLE = "IMMORTAL_READY_FD"  # a descriptor from the supervisor: a line is written to it at each "ready"
SOCKET_FILE_NAME = "control.sock"
_READ_SIZE_BYTES = 1 << 20
_RETRY_S = 0.02  # between two attempts if the kernel's queue of connections is full


class ControlError(ImmortalError):
    """Raised if a coordinator cannot be asked, or gives no usable answer."""


class NotRunningError(ControlError):
    """Raised if a coordinator does not run here. ``is_elsewhere``: it can run on the machine that the message names."""

    def __init__(self, message: str, *, is_elsewhere: bool = False) -> None:
        super().__init__(message)
        self.is_elsewhere = is_elsewhere


class RefusedError(ControlError):
    """Raised if a coordinator refused a request; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the coordinator of {name!r} does not do that: {reason}")
        self.reason = reason


class RunningError(ControlError):
    """Raised if an instance runs, but the operation needs one that does not run."""


class ControlFile(files.ProcessFile, frozen=True, kw_only=True):
    """Contents of the file in which a running coordinator announces itself."""

    control: str  # the path of the socket that answers


class Question(msgspec.Struct, frozen=True):
    """Request to a coordinator. ``argument``: JSON, for the verb."""

    verb: str
    argument: msgspec.Raw = msgspec.Raw(b"{}")


def path(folder: Path) -> Path:
    return folder / files.COORDINATOR_FILE_NAME


def supervisor_path(folder: Path) -> Path:
    return folder / files.SUPERVISOR_FILE_NAME


def socket_path(folder: Path) -> Path:
    """Return the path of the control socket, if the file system of ``folder`` can have sockets."""
    return socket_addresses.socket_path(folder, SOCKET_FILE_NAME)


def add_length_prefix(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_PREFIX_SIZE_BYTES, "little") + data


# --- the coordinator's side ------------------------------------------------------------------------------------------


def announce(folder: Path, control: Path) -> None:
    """Announce this process as the coordinator that answers at ``control``. Raises ControlError."""
    _write(path(folder), msgspec.json.encode(ControlFile(control=str(control), **files.current_process_fields())))


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[None]:
    """Announce this process as the supervisor of the instance of ``folder`` during the block. Raises ControlError."""
    _write(supervisor_path(folder), msgspec.json.encode(files.ProcessFile(**files.current_process_fields())))
    try:
        yield
    finally:
        files.withdraw(supervisor_path(folder))


def _write(file: Path, data: bytes) -> None:
    try:
        files.make_folder(file.parent)
        write_atomically(file, data, mode=files.PUBLIC_FILE_MODE)  # clients read whether it runs
    except OSError as error:
        raise ControlError(f"{file} can't be written: {error.strerror}; make room there, or mend that") from None


def withdraw(folder: Path) -> None:
    """Remove the coordinator's file, unless it is another process's by now."""
    files.withdraw(path(folder))


def notify_ready() -> None:
    """Tell the supervisor, if there is one, that an app has recovered and takes input."""
    descriptor = os.environ.get(READY_VARIABLE, "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), b"ready\n")
        except OSError:
            del os.environ[READY_VARIABLE]  # the supervisor is gone, or was never there


# --- the client's side -----------------------------------------------------------------------------------------------


def running(folder: Path) -> ControlFile | None:
    """Return the announcement of the coordinator of ``folder``; None if its process has ended."""
    return files.read_living(path(folder), ControlFile)


def supervisor(folder: Path) -> files.ProcessFile | None:
    """Return the announcement of the `immortal run` of ``folder``; None if its process has ended."""
    return files.read_living(supervisor_path(folder), files.ProcessFile)


def refuse_running(folder: Path) -> None:
    """Raise RunningError while the instance of ``folder`` runs, or is about to be started again."""
    found = supervisor(folder) or running(folder)
    if found is not None:
        stop = f"'immortal stop {folder.name}' stops it"
        raise RunningError(f"{folder.name!r} runs, as process {found.pid}: {stop}")


def query(folder: Path, verb: str, timeout_s: float = QUERY_TIMEOUT_S, *, argument: object = None) -> dict[str, Any]:
    """Ask the coordinator of ``folder`` (its name is the instance's). ``argument``: a JSON value, for the verb.

    Raises NotRunningError, RefusedError, ControlError.
    """
    name = folder.name
    found = running(folder)
    if found is None:
        elsewhere = last_holder(folder)
        where = f" on this machine; {elsewhere}: ask there" if elsewhere else ""
        raise NotRunningError(f"the coordinator of {name!r} does not run{where}", is_elsewhere=bool(elsewhere))
    question = msgspec.json.encode(Question(verb, msgspec.Raw(msgspec.json.encode(argument or {}))))
    if len(question) > QUESTION_SIZE_BYTES_MAX:
        raise ControlError(
            f"the question to the coordinator of {name!r} has {len(question)} bytes, at most {QUESTION_SIZE_BYTES_MAX}"
            " are allowed: ask for less at once"
        )
    no_answer = f"the coordinator of {name!r} (process {found.pid}) gives no answer at {found.control}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            data = _exchange(client, found.control, add_length_prefix(question), time.monotonic() + timeout_s)
    except TimeoutError:
        raise ControlError(f"{no_answer} within {timeout_s:g} s") from None
    except PermissionError:
        raise ControlError(f"{no_answer}: only the user who runs it, and root, may ask") from None
    except (OSError, EOFError) as error:
        if _has_ended(folder, found):
            raise NotRunningError(f"the coordinator of {name!r} has stopped") from None
        raise ControlError(f"{no_answer}: {error}") from None
    try:
        answer = decoding.decode_json(data, type=dict[str, Any])
    except decoding.DecodeError as error:
        raise ControlError(f"the coordinator of {name!r} gave an answer that makes no sense: {error}") from None
    if isinstance(answer.get("refused"), str):
        raise RefusedError(name, answer["refused"])
    if "denied" in answer:
        raise ControlError(f"the coordinator of {name!r} gives no answer: {answer['denied']}")
    return answer


def _has_ended(folder: Path, found: ControlFile) -> bool:
    """Return True if the process has ended, or is ending: its sockets are closed before it is gone."""
    deadline_s = time.monotonic() + ENDING_TIMEOUT_S
    while running(folder) == found:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_RETRY_S)
    return True


def _exchange(client: socket.socket, place: str, question: bytes, deadline_s: float) -> bytes:
    """Send a question; return the answer without its size. Raises OSError (TimeoutError among them), EOFError."""

    def limit_wait() -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        client.settimeout(left_s)

    while True:
        limit_wait()
        try:
            client.connect(place)
            break
        except BlockingIOError:
            time.sleep(_RETRY_S)
    client.sendall(question)
    answer = bytearray()
    size_bytes: int | None = None
    while size_bytes is None or len(answer) < size_bytes:
        limit_wait()
        data = client.recv(_READ_SIZE_BYTES)
        if not data:
            raise EOFError(f"it closed the connection after {len(answer)} bytes")
        answer += data
        if size_bytes is None and len(answer) >= LENGTH_PREFIX_SIZE_BYTES:
            size_bytes = int.from_bytes(answer[:LENGTH_PREFIX_SIZE_BYTES], "little")
            del answer[:LENGTH_PREFIX_SIZE_BYTES]
            if size_bytes > ANSWER_SIZE_BYTES_MAX:
                raise EOFError(f"its answer has {size_bytes} bytes, at most {ANSWER_SIZE_BYTES_MAX} are expected")
    return bytes(answer)
