"""The tutorial on what-if, as it is typed: its figures, the broken rule, and the fix."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.pictures import ROOT, write_tutorial
from tests.helpers.commands import run

SHOWN = (ROOT / "docs/tutorial/what-if.md").read_text()
FIXED = """\
        if count >= 20:
            cents = cents * 8 // 10
        elif count >= 10:
            cents = cents * 9 // 10
"""


def said(folder: Path, *arguments: str, status: int = 0) -> str:
    done = run(folder, *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_it_finds_the_wrong_discount(tmp_path: Path) -> None:
    orders, what_if = write_tutorial(tmp_path)
    said(tmp_path, "up")
    try:
        for order in orders:
            assert f"order {' '.join(order)}\n{said(tmp_path, 'call', 'shop', 'order', *order)}" in SHOWN
        found = said(tmp_path, *what_if, status=3)
        (shown,) = re.findall(r"^\$ immortal what-if .*?\n(.*?)```", SHOWN, re.DOTALL | re.MULTILINE)
        for line in re.split(r"\s*\.\.\.:?\s*", shown):
            assert line in re.sub(r" \([\d:TZ.-]+\)", "", found), found
        assert "<svg" in (tmp_path / what_if[-1]).read_text()
        code = tmp_path / "shop_v2.py"
        code.write_text(re.sub(r"( {8}if count >= \d+:.*\n.*\n)+", FIXED, code.read_text()))
        found = said(tmp_path, *what_if, status=3)
        assert "paid['ann']: was 5500; would be 5000" in found
        assert "the check" not in found
    finally:
        said(tmp_path, "down")
