"""Project of two services in a folder, and `immortal dev` on it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.helpers import commands
from tests.helpers.cli import DEADLINE_S

SHOP = """
import immortal
from immortal import Immortal, peer, rpc


class Till(Immortal):
    cents: int

    def __init__(self) -> None:
        self.cents = 0

    @rpc
    def sold(self, cents: int) -> None:
        self.cents += cents
        print("till has", self.cents)
        immortal.logger.warning("restarting nothing", cents=self.cents)


class Shop(Immortal):
    till = peer(Till, "till")
    orders: int

    def __init__(self) -> None:
        self.orders = 0

    @rpc
    def order(self, count: int) -> int:
        self.orders += 1
        self.till.sold.fork(100 * count)
        return self.orders
"""

NEXT = """
import shop
from immortal import rpc, upgrades


@upgrades(shop.Till)
class Till(shop.Till):
    sales: int

    def __init__(self) -> None:
        super().__init__()
        self.sales = 0

    @rpc
    def sold(self, cents: int) -> None:
        super().sold(cents)
        self.sales += 1
        print("of sales:", self.sales)
"""  # shop2.py: the till's next version

PROJECT = """
name = "corner-shop"

[services.till]
app = "shop:Till"

[services.shop]
app = "shop:Shop"
keep_checkpoints = "all"

[services.shop.environment]
GREETING = "good morning"
"""


def make_project(folder: Path, source: str = SHOP, project: str = PROJECT) -> None:
    (folder / "shop.py").write_text(source)
    if project:
        (folder / "immortal.toml").write_text(project)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "immortal", *arguments]


def immortal(folder: Path, *arguments: str, status: int = 0, **environment: str) -> str:
    """Run a command in ``folder``; return its output. It must end with ``status`` and without a traceback."""
    done = commands.run(folder, *arguments, environment=environment)
    output = done.stdout + done.stderr
    assert done.returncode == status, f"status {done.returncode}: {output}"
    assert "Traceback" not in output, output
    return output


class Development:
    """Process of `immortal dev` without a terminal, and its lines as they are printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command("dev", *arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._looked = 0
        self._ended = False
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def see(self, *texts: str) -> str:
        """Return the next line, after the last one seen, that has all of ``texts``."""

        def found() -> int | None:
            numbers = range(self._looked, len(self.lines))
            return next((number for number in numbers if all(text in self.lines[number] for text in texts)), None)

        with self._more:
            assert self._more.wait_for(lambda: found() is not None or self._ended, DEADLINE_S), self._missing(texts)
            number = found()
            assert number is not None, self._missing(texts)
            self._looked = number + 1
            return self.lines[number]

    def _missing(self, texts: tuple[str, ...]) -> str:
        shown = "\n".join(self.lines)
        return f"no line with {texts} came:\n{shown}"

    def ready(self, *names: str) -> None:
        """Wait until each of ``names`` is ready, in any order."""
        with self._more:
            there = self._more.wait_for(
                lambda: all(
                    any(line.startswith(f"{name} ") and line.endswith(" ready") for line in self.lines[self._looked :])
                    for name in names
                ),
                DEADLINE_S,
            )
            assert there, self._missing(names)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children die with it
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
