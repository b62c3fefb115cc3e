"""Pictures of the docs, made from real runs: the demo, the page of time travel, and that of a what-if.

    scripts/pictures [FOLDER]    the default is docs/pictures

The demo's output is a still SVG. The pages are PNGs, made by chromium; without chromium they are left out.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 84
SEED = "7"
TIMEOUT_S = 300.0
SIZE_BYTES_MAX = 300_000
WIDTH_PX, VIEWPORT_HEIGHT_PX = 1180, 760
HEADER_HEIGHT_PX = 40
"""Height of the line with the registry's folder, which is left out."""
PICTURE_HEIGHT_PX = 510
MOMENT = "/i/stock/travel?at=2:0"
ORDERS = (("tea", "2"), ("rice", "3"), ("tea", "4"))
IMMORTAL = (sys.executable, "-m", "immortal")


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


@contextmanager
def project(folder: Path, orders: Sequence[Sequence[str]]) -> Iterator[Callable[..., None]]:
    """Run the project in ``folder``, and order from its shop. Yield a function that runs a command there."""

    def run(*arguments: str, status: int = 0) -> None:
        done = subprocess.run(
            [*IMMORTAL, *arguments], cwd=folder, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode != status:
            raise SystemExit(f"{' '.join(arguments)} ended with status {done.returncode}")

    run("up")
    try:
        for order in orders:
            run("call", "shop", "order", *order)
        yield run
    finally:
        run("down")


def screenshot(file: Path, chromium: str, *addresses: str, cropped_px: int = 0) -> None:
    """Draw the last of these pages, which are opened one after the other, without what is at its top."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH_PX, "height": VIEWPORT_HEIGHT_PX}, color_scheme="light")
        for address in addresses:
            page.goto(address)
        page.wait_for_load_state("networkidle")
        clip = {"x": 0, "y": cropped_px, "width": WIDTH_PX, "height": PICTURE_HEIGHT_PX}
        page.screenshot(path=file, clip=clip)
        browser.close()


def time_travel(file: Path, chromium: str) -> None:
    """Draw the page of `immortal web` for one moment of the stock that `immortal init` makes."""
    with tempfile.TemporaryDirectory(prefix="immortal-pictures-") as folder:
        place = Path(folder) / "corner-shop"
        subprocess.run([*IMMORTAL, "init", "corner-shop"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with (
            project(place, ORDERS),
            subprocess.Popen([*IMMORTAL, "web"], cwd=place, stdout=subprocess.PIPE, text=True) as web,
        ):
            assert web.stdout is not None
            login = web.stdout.readline().strip()
            try:
                moment = login.partition("/login")[0] + MOMENT
                screenshot(file, chromium, login, moment, cropped_px=HEADER_HEIGHT_PX)
            finally:
                web.terminate()


def what_if(file: Path, chromium: str) -> None:
    """Draw the page that the tutorial on what-if makes."""
    with tempfile.TemporaryDirectory(prefix="immortal-pictures-") as folder:
        orders, command = write_tutorial(Path(folder))
        with project(Path(folder), orders) as run:
            run(*command, status=3)
        screenshot(file, chromium, (Path(folder) / command[-1]).as_uri())


def write_tutorial(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Write the files of the tutorial on what-if; return its orders, and the arguments of its what-if."""
    text = (ROOT / "docs/tutorial/what-if.md").read_text()
    for name, body in re.findall(r"```\w+\n# (\S+)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(body)
    (rule,) = re.findall(r"```python\n( +if count .*?)```", text, re.DOTALL)
    last = "        return await"
    (folder / "shop_v2.py").write_text((folder / "shop.py").read_text().replace(last, rule + last))
    (command,) = re.findall(r"^\$ immortal (what-if .*)$", text, re.MULTILINE)
    return [
        one.split() for one in re.findall(r"^\$ immortal call shop order (.*)$", text, re.MULTILINE)
    ], command.split()


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / "demo.svg"]
    demo(made[0])
    if chromium := shutil.which("chromium"):
        made += [folder / "time-travel.png", folder / "what-if.png"]
        time_travel(made[1], chromium)
        what_if(made[2], chromium)
    else:
        print("there is no chromium: the pages' pictures were left as they are", file=sys.stderr)
    for file in made:
        size_bytes = file.stat().st_size
        print(f"{file}: {size_bytes:,} bytes")
        if size_bytes > SIZE_BYTES_MAX:
            print(f"error: more than {SIZE_BYTES_MAX:,} bytes", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
