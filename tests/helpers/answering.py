"""Stand-in for a running coordinator: it gives fixed answers, or none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from immortal.coordinator.operator import control


@contextlib.contextmanager
def answering(folder: Path, answer: Callable[[], bytes | None]) -> Iterator[list[control.Question]]:
    """Yield the questions that have arrived. ``answer``: its bytes without the size; None for silence."""
    asked: list[control.Question] = []
    over = threading.Event()

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as reader:
                size_bytes = int.from_bytes(reader.read(control.LENGTH_PREFIX_SIZE_BYTES), "little")
                if over.is_set():
                    return
                asked.append(msgspec.json.decode(reader.read(size_bytes), type=control.Question))
                data = answer()
                if data is None:
                    over.wait()
                else:
                    connection.sendall(control.add_length_prefix(data))

    folder.mkdir(exist_ok=True)
    path = control.socket_path(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        control.announce(folder, path)
        try:
            yield asked
        finally:
            over.set()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
                last.connect(str(path))
            thread.join()
            control.withdraw(folder)
            path.unlink()
