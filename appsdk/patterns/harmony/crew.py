"""Several worker processes of one machine: of a death the cluster hears at once, and another takes its place."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from immortal.appsdk.client import ClientError, connect, with_timeout
from immortal.appsdk.patterns.harmony.cluster import Cluster
from immortal.appsdk.patterns.harmony.saying import complain

USAGE_STATUS = 2  # of a process that would end like this each time
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0
_SHORT_LIFE_S = 5.0  # whose like is started again with longer and longer pauses
_TELL_S = 2.0


class Crew:
    """``arguments``: of the command, for one process. Raises NotConnectable."""

    def __init__(self, cluster: str, arguments: Sequence[str], processes: int) -> None:
        self._cluster = cluster
        self._command = [sys.executable, "-m", "immortal.appsdk.patterns.harmony", "work", cluster, *arguments]
        self._ending = threading.Event()
        self._lock = threading.RLock()  # a signal may come while its thread has it
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._places = [threading.Thread(target=self._keep, name=f"place {index}") for index in range(processes)]
        self._status = 0

    def run(self) -> int:
        """Until :meth:`end`, or a worker says that it can't be. The status to end with."""
        for place in self._places:
            place.start()
        try:
            for place in self._places:
                place.join()
        finally:
            self.end()
            for place in self._places:
                place.join()
        return self._status

    def end(self) -> None:
        """Workers end what they have at work. Asked again, as one may hang, they are killed: others do it."""
        with self._lock:
            again = self._ending.is_set()
            self._ending.set()
            for process in self._alive:
                if again:
                    process.kill()
                else:
                    process.terminate()

    def _keep(self) -> None:
        pause_s = _PAUSE_MIN_S
        while not self._ending.is_set():
            name = f"worker-{uuid.uuid4().hex[:16]}"
            began_s = time.monotonic()
            with self._lock:
                if self._ending.is_set():
                    return
                process = subprocess.Popen([*self._command, "--name", name])
                self._alive.add(process)
            status = process.wait()
            with self._lock:
                self._alive.discard(process)
            if status == USAGE_STATUS:
                self._status = status
                self.end()
            if self._ending.is_set():
                return
            complain(f"harmony: {name} has ended with status {status}, another takes its place")
            with suppress(ClientError), connect(Cluster, self._cluster) as cluster:  # or it notices the silence
                with_timeout(cluster, _TELL_S).leave(name, died=True)
            short = time.monotonic() - began_s < _SHORT_LIFE_S
            pause_s = min(2 * pause_s, _PAUSE_MAX_S) if short else _PAUSE_MIN_S
            self._ending.wait(pause_s)
