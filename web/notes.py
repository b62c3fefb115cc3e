"""Notes that people wrote about moments: a file beside the registry, one JSON object a line."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec

from immortal.protocol import decoding
from immortal.protocol.files import make_folder
from immortal.web.errors import WebError

FOLDER_NAME = ".web"  # in the home, where no instance can have this name
NOTES_MAX = 1000  # of one instance
TEXT_CHARACTERS_MAX = 2000


class Note(msgspec.Struct, frozen=True):
    record: int
    index: int
    text: str
    time_ns: int


class Notes:
    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER_NAME / "notes"
        self._lock = threading.Lock()

    def of(self, name: str) -> list[Note]:
        """Return the notes about an instance, by moment."""
        try:
            lines = self._path(name).read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(decoding.decode_json(line, type=Note))
            except decoding.DecodeError:
                continue  # a crash in the middle of it
        return sorted(found, key=lambda note: (note.record, note.index, note.time_ns))

    def add(self, name: str, record: int, index: int, text: str) -> None:
        """Raises WebError."""
        text = text.strip()
        if not text or len(text) > TEXT_CHARACTERS_MAX:
            raise WebError(f"a note has {len(text)} characters: 1 to {TEXT_CHARACTERS_MAX} were expected")
        line = msgspec.json.encode(Note(record, index, text, time.time_ns())) + b"\n"
        with self._lock:
            if len(self.of(name)) >= NOTES_MAX:
                raise WebError(f"{name} has {NOTES_MAX} notes: remove some of them from {self._path(name)}")
            make_folder(self._folder)
            descriptor = os.open(self._path(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(line)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"
