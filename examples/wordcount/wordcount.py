"""Two services that count words: Reader feeds lines, Counter counts. The code handles no failures.

    cd examples/wordcount
    immortal register counter --peer 'tcp://127.0.0.1:*'      immortal run counter wordcount:Counter
    immortal register reader --peer 'tcp://127.0.0.1:*'       immortal run reader wordcount:Reader

WORDCOUNT_FILES names a file that lists the input files, one a line; without it this file counts itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


def input_files() -> list[Path]:
    """Return the input files, in order."""
    listing = os.environ.get("WORDCOUNT_FILES")
    if listing is None:
        return [Path(__file__)]
    return [Path(line) for line in Path(listing).read_text().splitlines()]


def text_of(file: Path) -> str:
    return file.read_bytes().decode(errors="replace")


def lines_of(files: Sequence[Path], start: int) -> Iterator[str]:
    """Yield all lines of all files, one after the other, from line ``start`` (the first is 0) on."""
    for file in files:
        lines = text_of(file).splitlines()
        yield from lines[start:]
        start = max(0, start - len(lines))


FILES = input_files()


class Counter(Immortal):
    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + 1


class Reader(Immortal):
    counter = peer(Counter, "counter")
    lines: int

    def __init__(self) -> None:
        self.lines = 0

    @impulse
    def line(self, text: str) -> None:
        self.lines += 1
        self.counter.count.fork(text)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for text in lines_of(FILES, start=self.lines):
            impulses.line(text)
