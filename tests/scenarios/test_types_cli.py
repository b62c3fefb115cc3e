"""Values of libraries' types through real processes: calls from the command line, a crash, a verify, what is shown."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.helpers.cli import Run, immortal

APP = """
import os
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pydantic
from immortal import Immortal, Impulses, on_primary, rpc

class Line(pydantic.BaseModel):
    item: str
    count: int = pydantic.Field(gt=0)

class Store(Immortal, checkpoint="fork"):
    totals: npt.NDArray[np.float64]
    table: pa.Table
    lines: list[Line]

    def __init__(self) -> None:
        self.totals = np.zeros(2)
        self.table = pa.table({"item": ["a"]})
        self.lines = []

    @rpc
    def add(self, numbers: npt.NDArray[np.float64], line: Line) -> npt.NDArray[np.float64]:
        self.totals += numbers
        self.lines.append(line)
        return self.totals

    @rpc
    def load(self, table: pa.Table) -> int:
        self.table = table
        return len(table)

    @on_primary
    def ready(self, impulses: Impulses) -> None:
        print("process", os.getpid(), "has", len(self.lines), flush=True)
"""


def test_calls_a_crash_and_what_commands_say(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(APP)
    immortal(tmp_path, "register", "store", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "store", "store:Store", "--restart")
    line = '{"item": "a", "count": 2}'
    try:
        first = run.line(" has ").split()
        immortal(tmp_path, "call", "store", "add", "[1.5, 2]", line)
        immortal(tmp_path, "checkpoint", "store")
        assert immortal(tmp_path, "call", "store", "load", '[{"item": "b"}, {"item": "c"}]').strip() == "2"
        refused = immortal(tmp_path, "call", "store", "add", '["x"]', line, status=1)
        assert "Store.add: parameter 'numbers': Expected `ndarray` of float64, got one of <U1" in refused
        refused = immortal(tmp_path, "call", "store", "add", "[1, 2]", '{"item": "a", "count": 0}', status=1)
        assert "Store.add: parameter 'line': Expected `Line`: count: Input should be greater than 0" in refused
        os.kill(int(first[first.index("process") + 1]), signal.SIGKILL)
        assert run.line(" has ", 2).endswith("has 1")
        answer = json.loads(immortal(tmp_path, "call", "store", "add", "[1, 1]", line))
        assert (answer["dtype"], answer["shape"]) == ("<f8", [2])
        # what came out goes in again
        immortal(tmp_path, "call", "store", "add", json.dumps(answer), line)
        assert run.stop() == 0
    finally:
        run.kill()
    assert "Store.add" in immortal(tmp_path, "log", "show", "store", "--app", "store:Store")
    immortal(tmp_path, "verify", "store")
    immortal(tmp_path, "what-if", "store", "--app", "store:Store")
