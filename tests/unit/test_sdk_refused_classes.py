"""A class that the SDK refuses, or a module that can't be imported: the user's line comes first, no frame of ours."""

from __future__ import annotations

import contextvars
import sys
from pathlib import Path

import pytest

from immortal.appsdk.running.listing import main as listing
from immortal.appsdk.running.runner import load_or_report, run_to_status

CLASS = "import socket\nimport immortal\nfrom immortal import Immortal, query, rpc\n\nclass Shop(Immortal%s):\n    "


@pytest.mark.parametrize(
    ("options", "member", "line", "said"),
    [
        ("", "door: socket.socket", 6, "Shop: attribute 'door': socket is no type that can be encoded"),
        ("", "@rpc\n    def sell(self, *items: str) -> None: ...", 7, "Shop.sell: parameter '*items': "),
        ("", "@rpc\n    def sell(self, item) -> None: ...", 7, "Shop.sell: parameter 'item' has no annotation"),
        ("", "@query\n    async def left(self) -> int: ...", 7, "Shop.left: @query belongs on a plain 'def'"),
        (", checkpoint='odd'", "left: int", 5, "Shop: checkpoint='odd': 'inline' or 'fork' were expected"),
        ("", "began = immortal.now()", 6, "immortal.now(): no handler runs here"),
        ("", "@rpc\n    def sell(self, item: 'Tea') -> None: ...", 7, "Shop.sell: an annotation can't be resolved"),
    ],
)
def test_a_refused_class(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    member: str,
    line: int,
    said: str,
) -> None:
    source = CLASS % options + member + "\n"
    (tmp_path / "refused.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "refused", raising=False)
    # A plain object of another test would stand for the handler that runs.
    if (cls := contextvars.Context().run(load_or_report, "refused:Shop")) is not None:
        run_to_status(cls, "unix:/nowhere")
    shown = capsys.readouterr().err
    first, second, *_ = shown.split("\n")
    assert first.endswith(f": refused.py, line {line}: {source.splitlines()[line - 1].strip()}")
    assert second.startswith(f"  {said}")
    assert "Traceback" not in shown
    if cls is None:  # as `immortal dev` and `up` list it
        contextvars.Context().run(listing, ["refused"])
        assert capsys.readouterr().err == "".join(shown.partition("refused.py, line")[1:])


def test_a_module_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raising.py").write_text("def price():\n    return 1 / 0\n\n\nTEA = price()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert load_or_report("raising:Shop") is None
    first, *trace = capsys.readouterr().err.splitlines()
    assert first == "app raising:Shop: importing 'raising' failed:"
    assert trace[1].lstrip().startswith(f'File "{tmp_path}/raising.py", line 5')
    assert trace[-1] == "    ZeroDivisionError: division by zero"
    assert sum("File " in one for one in trace) == 2
