"""What services say: on one screen, and in files that are put aside."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from immortal.coordinator.project.output import (
    FILE_NAME,
    LINES_HELD_MAX,
    OLD_COUNT,
    Console,
    LogFiles,
    Tail,
    merge_by_time,
)


class Screen(io.StringIO):
    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def since(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def test_lines_have_names_and_control_characters_do_nothing() -> None:
    screen = Screen(terminal=False)
    console = Console(["till", "s"], screen, lambda: "never here")
    console.write_line("s", "ready", "info", "12:00:00.000")
    console.write_line("till", "a\x1b[2Jb")
    assert screen.since() == "s    | 12:00:00.000 info    ready\ntill | a\\x1b[2Jb\n"


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    screen = Screen()
    Console(["s"], screen).write_line("s", "oh", "error", "12:00:00.000")
    assert screen.since() == "\x1b[36ms |\x1b[0m \x1b[31m12:00:00.000 error   oh\x1b[0m\n"


def test_the_states_stay_below() -> None:
    screen = Screen()
    console = Console(["s"], screen, lambda: "s ready")
    console.on_changed()
    console.write_line("s", "hello")
    assert screen.since() == "s ready\r\x1b[2Ks | hello\ns ready"


def test_lines_wait_while_somebody_is_asked() -> None:
    async def asked() -> None:
        screen = Screen()
        console = Console(["s", "t"], screen)
        answers: list[str] = []
        console.add_question("s", "(Pdb) ", answers.append)
        console.write_line("t", "later")
        console.interrupt("t", "now")
        console.add_question("t", "(other) ", answers.append)
        assert screen.since() == "s | (Pdb) \nt | now\ns | (Pdb) "
        console.on_ended("s", "stopped")
        assert screen.since() == "\nt | (other) "
        task = asyncio.create_task(console.ask("s", "[y]es, [n]o? ", "yn"))
        await asyncio.sleep(0)
        console.on_ended("t", "stopped")
        assert screen.since() == "\ns | [y]es, [n]o? "
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert screen.since() == "\nt | later\n"
        assert answers == []

    asyncio.run(asked())


def test_what_waits_is_bounded() -> None:
    screen = Screen()
    console = Console(["s"], screen)
    console.add_question("s", "(Pdb) ", lambda text: None)
    for number in range(LINES_HELD_MAX + 2):
        console.write_line("s", str(number))
    screen.since()
    console.on_ended("s", "stopped")
    lines = screen.since().splitlines()
    assert lines[1:3] == ["... 2 lines are left out", "s | 2"]
    assert len(lines) == LINES_HELD_MAX + 2


def test_files_are_put_aside_and_read_as_one(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, lambda: None, size_bytes_max=200)
    tail = Tail(tmp_path, "s")
    followed: list[str] = []
    for number in range(40):
        files.write_line("s", f"line {number}", "info")
        followed += tail.new_lines()
    files.close()
    assert [line.split()[-1] for line in followed] == [str(number) for number in range(40)]
    assert len(list((tmp_path / "s").iterdir())) == 1 + OLD_COUNT
    kept = [line.split()[-1] for _, line in merge_by_time([Tail(tmp_path, "s")])]
    assert kept == [str(number) for number in range(40 - len(kept), 40)]
    assert 10 < len(kept) < 40
    assert all(path.stat().st_size <= 200 for path in (tmp_path / "s").iterdir())


def test_lines_of_many_are_by_time_and_the_last_of_each(tmp_path: Path) -> None:
    for name, times in {"s": (1, 3, 5), "t": (2, 4)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE_NAME).write_text("".join(f"2026-01-01T00:00:0{at}.000Z - {at}\n" for at in times))

    def order(count: int | None = None) -> list[str]:
        return [line.split()[-1] for _, line in merge_by_time([Tail(tmp_path, "s"), Tail(tmp_path, "t")], count)]

    assert order() == ["1", "2", "3", "4", "5"]
    assert order(1) == ["4", "5"]
