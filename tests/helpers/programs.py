"""Users' programs for the search at the start, really imported. ``#: words`` marks a line to be found."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from immortal.appsdk.determinism.check import Finding, check
from immortal.appsdk.handlers.definition import definition_of

_numbers = itertools.count()

HEAD = """
from __future__ import annotations
from typing import Any
import immortal
from immortal import Immortal, Impulses, Transient, impulse, initial, on_primary, peer, rpc
"""


class Program:
    """Modules of a user, really imported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def module(self, source: str, name: str = "") -> Any:
        name = name or f"determinism_program_{next(_numbers)}"
        return self.module_of(HEAD + textwrap.dedent(source), name)

    def module_of(self, source: str, name: str) -> Any:
        (self._folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        self._monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        self._monkeypatch.delitem(sys.modules, name)
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def check(self, source: str, name: str = "Counter") -> list[Finding]:
        return check(definition_of(getattr(self.module(source), name)))

    def compare(self, source: str, name: str = "Counter") -> None:
        """Check that the findings are those that the source announces."""
        module = self.module(source)
        findings = check(definition_of(getattr(module, name)))
        found = {(finding.line, str(finding)) for finding in findings if finding.file == module.__file__}
        lines = (HEAD + textwrap.dedent(source)).splitlines()
        announced = {
            (number, words.strip())
            for number, line in enumerate(lines, 1)
            for words in ([*line.split("#:")[1:]] if "#:" in line else [])
        }
        for number, words in announced:
            assert any(line == number and words in text for line, text in found), (lines[number - 1], found)
        unannounced = found - {(line, text) for line, text in found if any(line == number for number, _ in announced)}
        assert not unannounced
