"""Pictures of the docs, made from real runs: the demo, and the page of time travel.

    scripts/pictures [FOLDER]    the default is docs/pictures

The demo's output is a still SVG. The page is a PNG, made by chromium; without chromium it is left out.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 84
SEED = "7"
TIMEOUT_S = 300.0
SIZE_BYTES_MAX = 300_000
VIEWPORT_WIDTH_PX, VIEWPORT_HEIGHT_PX = 1180, 760
HEADER_HEIGHT_PX = 40
"""Height of the line with the registry's folder, which is left out."""
PICTURE_HEIGHT_PX = 510
MOMENT = "/i/stock/travel?at=2:0"
ORDERS = (("tea", 2), ("rice", 3), ("tea", 4))


def demo(file: Path) -> None:
    """Run scripts/demo and draw its output."""
    command = [sys.executable, "examples/wordcount/demo.py", "--seed", SEED]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"the demo failed:\n{done.stdout}{done.stderr}")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(f"[bold]$[/] scripts/demo --seed {SEED}")
    for line in done.stdout.splitlines():
        console.print(line, style="bold green" if line == "equal" else None, markup=False, soft_wrap=True)
    # rich's own form asks another host for a font
    svg_format = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="scripts/demo", theme=MONOKAI, code_format=svg_format, unique_id="demo")
    file.write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


def time_travel(file: Path, chromium: str) -> None:
    """Draw the page of `immortal web` for one moment of the stock that `immortal init` makes."""
    from playwright.sync_api import sync_playwright

    immortal = [sys.executable, "-m", "immortal.coordinator"]
    with tempfile.TemporaryDirectory(prefix="immortal-pictures-") as folder:
        project = Path(folder) / "corner-shop"

        def run(*arguments: str) -> None:
            where = project if project.exists() else folder
            subprocess.run([*immortal, *arguments], cwd=where, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)

        run("init", "corner-shop")
        run("up")
        try:
            for item, count in ORDERS:
                run("call", "shop", "order", item, str(count))
            with subprocess.Popen([*immortal, "web"], cwd=project, stdout=subprocess.PIPE, text=True) as web:
                assert web.stdout is not None
                login = web.stdout.readline().strip()
                try:
                    with sync_playwright() as playwright:
                        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                        page = browser.new_page(
                            viewport={"width": VIEWPORT_WIDTH_PX, "height": VIEWPORT_HEIGHT_PX}, color_scheme="light"
                        )
                        page.goto(login)
                        page.goto(login.partition("/login")[0] + MOMENT)
                        page.wait_for_load_state("networkidle")
                        page.screenshot(
                            path=file,
                            clip={
                                "x": 0,
                                "y": HEADER_HEIGHT_PX,
                                "width": VIEWPORT_WIDTH_PX,
                                "height": PICTURE_HEIGHT_PX,
                            },
                        )
                        browser.close()
                finally:
                    web.terminate()
        finally:
            run("down")


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / "demo.svg"]
    demo(made[0])
    if chromium := shutil.which("chromium"):
        made.append(folder / "time-travel.png")
        time_travel(made[1], chromium)
    else:
        print("there is no chromium: time-travel.png was left as it is", file=sys.stderr)
    for file in made:
        size_bytes = file.stat().st_size
        print(f"{file}: {size_bytes:,} bytes")
        if size_bytes > SIZE_BYTES_MAX:
            print(f"error: more than {SIZE_BYTES_MAX:,} bytes", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
