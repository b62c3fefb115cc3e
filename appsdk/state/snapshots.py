"""Copies of the state: by a forked child for a checkpoint, in memory for rewinds.

The child has a copy of the process's memory and of its one thread; it shares pages with its parent until one of them
writes. It encodes, writes and exits: none of the parent's handlers runs in it, none of the parent's files is open in
it.

A lock that another thread held at the fork stays held in the child. Python's own locks and those of the C library are
created again there; a lock of a library or of the user's, which encoding the state can need, is not. For that reason
Python 3.12 warns of each fork with other threads. Here other threads always exist, so the warning is of no use:
instead, a child that is silent for SILENCE_S_MAX is killed, and the next checkpoint is taken without a child.

The pipe carries a kind (1 byte), a size (8 bytes, little endian), then that many bytes: the blob, or a text.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from immortal.appsdk.errors import StateError
from immortal.protocol.readers import Record

CHUNK_SIZE_BYTES_MAX = 256 << 10
PIPE_SIZE_BYTES = 1 << 20  # the limit of an ordinary user
SILENCE_S_MAX = 120.0  # without a byte while there is room: 1 GiB is encoded in 3 s, then the first byte comes
_FRONT = struct.Struct("<BQ")
_BLOB, _STATE_ERROR, _PROBLEM = 0, 1, 2

Encode = Callable[[], tuple[int, Iterable[bytes]]]
"""Function that encodes the state: it returns the blob's size in bytes, and its pieces. It raises StateError."""

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJUSTMENT_MAX = b"1000"


class SnapshotReader:
    """Reader of a child's output, in pieces of any size: the blob's bytes, and how the child ended."""

    def __init__(self) -> None:
        self._front = b""
        self._kind = _PROBLEM
        self._missing_bytes = -1  # not known yet
        self._text = b""

    def receive_data(self, data: bytes) -> bytes:
        """Return the part of ``data`` that belongs to the blob."""
        if self._missing_bytes < 0:
            self._front += data
            if len(self._front) < _FRONT.size:
                return b""
            self._kind, self._missing_bytes = _FRONT.unpack_from(self._front)
            data, self._front = self._front[_FRONT.size :], b""
        self._missing_bytes -= len(data)
        if self._kind == _BLOB:
            return data
        self._text += data
        return b""

    def end(self, how: str) -> str:
        """End the reading; ``how``: how the child ended. Return why there is no blob; "" if it is complete.

        Raises StateError if the state can't be saved.
        """
        if self._missing_bytes:
            return f"the process that encoded the state {how} before it was done"
        text = self._text.decode("utf-8", "replace")
        if self._kind == _STATE_ERROR:
            raise StateError(text)
        return text


class Snapshot:
    """Child process and the pipe from it.

    ``reason``: set when :meth:`read` has returned no bytes: why there is no blob; "" if it is complete. ``has_hung``:
    the child was silent for too long, and was killed. Times are monotonic, in seconds.
    """

    def __init__(self, encode: Encode) -> None:
        self.reason = ""
        self.has_hung = False
        self.silent_since_s = time.monotonic()
        self._reader = SnapshotReader()
        self._child = self._pipe = -1
        self._thaw = False
        try:
            self._start(encode)
        except OSError as error:  # no memory, too many processes or files
            self.reason = f"the process that was to encode the state could not be started: {error}"
            self.close()

    def _start(self, encode: Encode) -> None:
        self._pipe, writer = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # more than this user can have: then it takes longer
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE_BYTES)
        parent, prctl = os.getpid(), _load_prctl()  # the child must load nothing
        # If the user has frozen objects, they must stay frozen.
        self._thaw = gc.get_freeze_count() == 0
        if self._thaw:
            gc.freeze()  # a collection in the parent would touch, and so copy, every page with objects
        # Blocked for the child's life: none of the parent's handlers can run in it, not even before its first line.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: see above
                self._child = os.fork()
                if not self._child:
                    _run_child(encode, writer, parent, prctl)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writer)
        os.set_blocking(self._pipe, False)

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something; -1 after its end."""
        return self._pipe

    def read(self) -> bytes | None:
        """Return the next bytes of the blob, at most CHUNK_SIZE_BYTES_MAX; empty at the end; None: none are there yet.

        Raises StateError if the state can't be saved.
        """
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, CHUNK_SIZE_BYTES_MAX)
            except BlockingIOError:
                if self.time_left_s() > 0:
                    return None
                self._give_up()
                return b""
            self.silent_since_s = time.monotonic()
            if not data:
                how = self._end()
                self.reason = self._reader.end(how)
            elif blob := self._reader.receive_data(data):
                return blob
        return b""

    def time_left_s(self) -> float:
        """Return the seconds until the child has been silent for too long."""
        return self.silent_since_s + SILENCE_S_MAX - time.monotonic()

    def note_unread(self) -> None:
        """Note that the pipe is full: the child counts as silent only from the time at which there is room again."""
        self.silent_since_s = time.monotonic()

    def _give_up(self) -> None:
        self.close()
        self.has_hung = True
        self.reason = (
            f"the process that encoded the state said nothing for {SILENCE_S_MAX:g} s and was killed. Perhaps it "
            "waited for a lock that another thread of the app held as it began. The next checkpoint is encoded in the "
            "app"
        )

    def _end(self) -> str:
        """Reap the child; return how it ended."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._thaw:
            gc.unfreeze()
            self._thaw = False
        child, self._child = self._child, -1
        if child < 0:
            return "was not started"
        try:
            # The child closes its end of the pipe as one of its last acts: this returns at once.
            _, status = os.waitpid(child, 0)
        except ChildProcessError:  # the app ignores SIGCHLD, or waits for all its children
            return "ended"
        if os.WIFSIGNALED(status):
            return f"was killed by signal {os.WTERMSIG(status)}"
        return f"left with status {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """End the child if it still runs."""
        if self._child >= 0:
            with contextlib.suppress(ChildProcessError):
                # Kill it only while the ID is certainly still this child's.
                if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                    os.kill(self._child, signal.SIGKILL)
                else:
                    self._child = -1
        self._end()


Prctl = Callable[..., int]


@functools.cache
def _load_prctl() -> Prctl | None:
    """Return Linux's prctl; None if there is none: then a child whose parent is gone ends when it writes."""
    try:
        import ctypes  # here: it takes milliseconds, and few apps need it

        prctl: Prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return prctl


# --- in the child -----------------------------------------------------------------------------------------------------


def _run_child(encode: Encode, writer: int, parent: int, prctl: Prctl | None) -> NoReturn:
    status = 1
    try:
        gc.disable()
        _die_with(parent, prctl)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        kind, size_bytes, pieces = _encoded(encode)
        _write(writer, _FRONT.pack(kind, size_bytes))
        for piece in pieces:
            _write(writer, piece)
        status = 0
    finally:
        os._exit(status)  # none of the parent's code must run: no finally, no atexit, no flush of a buffer


def _encoded(encode: Encode) -> tuple[int, int, Iterable[bytes]]:
    try:
        return _BLOB, *encode()
    except MemoryError as error:
        problem: BaseException = error
    except Exception as error:
        if not isinstance(error.__cause__, MemoryError):
            text = str(error).encode("utf-8", "replace")
            return _STATE_ERROR, len(text), [text]
        problem = error.__cause__
    text = f"there is not enough memory to encode the state beside the app: {problem!r}".encode()
    return _PROBLEM, len(text), [text]


def _die_with(parent: int, prctl: Prctl | None) -> None:
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before
            os._exit(1)
    # If memory runs out, this process should end, not the app.
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(descriptor, _OOM_SCORE_ADJUSTMENT_MAX)
        finally:
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# A copy of the state in memory and the records since: from these an app rewinds when a call fails.
#
# A checkpoint's blob is a copy without cost. When much log follows it, a new copy replaces it: always for a small
# state, for a large one only while calls have failed lately. Without a copy the app is recovered from its checkpoint,
# by a restart.


SMALL_SIZE_BYTES_MAX = 1 << 20  # of a state: a new copy each TAIL_SIZE_BYTES_MAX of log costs almost nothing
TAIL_SIZE_BYTES_MAX = 16 << 20  # of the records since the copy: a rewind handles them again
KEPT_TAIL_SIZE_BYTES_MAX = 256 << 20  # ... if the later state can't be copied: to find the message that broke it
RECENT_FAILURE_SIZE_BYTES = 256 << 20  # of log: for so much after a failure, copies of a large state are kept


@dataclass(slots=True)
class Copy:
    """Copy of the state. ``blob``: as in a checkpoint, after the record ``sequence_id``; ``tail``: records since."""

    blob: bytes
    sequence_id: int
    tail: list[Record] = field(default_factory=list)
    tail_size_bytes: int = 0
    retry_size_bytes: int = 0  # size of the tail at which the next copy is tried, after one failed


class Copies:
    """Copies of the state, one at a time. ``current``: None if there is none. ``enabled``: copies are taken.

    ``keeps_large``: of a large state too, from the beginning. ``keeps_all``: they are kept even if no call has failed
    for long. ``pinned``: keep the present copy, since a message after it will be taken back later.
    """

    def __init__(self, *, enabled: bool, keeps_large: bool) -> None:
        self.current: Copy | None = None
        self.keeps_all = self.pinned = False
        self.enabled = enabled
        self._large_left_bytes = RECENT_FAILURE_SIZE_BYTES if keeps_large else 0

    def expect_failures(self) -> None:
        """Keep copies from here on: a call has failed, and the next one can fail."""
        self._large_left_bytes = RECENT_FAILURE_SIZE_BYTES

    def take(self, pieces: Sequence[bytes], sequence_id: int) -> bool:
        """Keep the blob of ``pieces`` as the copy after the record ``sequence_id``; return False if an older copy has
        to stay."""
        if self.pinned and self.current is not None:
            return False
        self.current = None
        if self.enabled and self._may_keep(sum(map(len, pieces))):
            self.current = Copy(b"".join(pieces), sequence_id)
        return True

    def sequence_id(self, default: int) -> int:
        """Return the record after which a rewind would begin."""
        return default if self.current is None else self.current.sequence_id

    def forget(self) -> None:
        """Forget the copy: the code changes, or the state changes by other means than records."""
        self.current = None

    def add(self, record: Record, *, rewound: bool, undo_size_bytes: int = 0) -> bool:
        """Add a handled record; return True if a new copy is due. ``rewound``: one of its messages failed.
        ``undo_size_bytes``: size of the data that tables keep in memory for a rewind."""
        copy = self.current
        if copy is None:
            return False
        size_bytes = len(record.content)
        self._large_left_bytes = max(0, self._large_left_bytes - size_bytes)
        copy.tail.append(record)
        copy.tail_size_bytes += size_bytes
        if self.pinned or copy.tail_size_bytes < copy.retry_size_bytes:
            return False
        if rewound and copy.tail_size_bytes > len(copy.blob):
            return True  # the next rewind must cost no more than a copy
        if max(copy.tail_size_bytes, undo_size_bytes) <= max(TAIL_SIZE_BYTES_MAX, len(copy.blob) // 4):
            return False
        if not self._may_keep(len(copy.blob)):
            self.current = None
        return self.current is not None

    def note_failed_copy(self) -> None:
        """Note that the state can't be copied now."""
        copy = self.current
        if copy is not None and copy.tail_size_bytes < KEPT_TAIL_SIZE_BYTES_MAX:
            copy.retry_size_bytes = 2 * copy.tail_size_bytes
        else:
            self.current = None

    def _may_keep(self, size_bytes: int) -> bool:
        return self.keeps_all or size_bytes <= SMALL_SIZE_BYTES_MAX or self._large_left_bytes > 0
