"""docs/patterns/pirate.md, its frames and requirements name what there is. Its programs run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from immortal.appsdk.patterns.pirate import clients, driver, frames, server, store
from immortal.appsdk.patterns.pirate.pool import Policy

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "pirate.md").read_text()
FRAMES = (ROOT / "docs" / "reference" / "pattern-frames.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "pirate.md").read_text()


def test_each_test_that_the_requirements_name_is_there() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_pirate_*.py"))
    sources += (ROOT / "tests" / "scenarios" / "test_pirate.py").read_text()
    named = set(re.findall(r"`(test_\w+)`", REQUIREMENTS))
    assert len(named) > 20
    assert not {name for name in named if f"def {name}(" not in sources}


def test_its_limits() -> None:
    for said in (
        f"- replies of one client: {store.REPLIES_OF_CLIENT_MAX}, and "
        f"{store.REPLIES_OF_CLIENT_SIZE_BYTES_MAX >> 20} MiB, each with {store.REPLY_OVERHEAD_BYTES} bytes more",
        f"- replies of all its clients: {store.REPLIES_SIZE_BYTES_MAX >> 20} MiB",
        f"- clients: {store.CLIENTS_MAX:,}, the last used ones",
        f"The folder can take {store.MAP_SIZE_BYTES >> 30} GiB",
        f"bytes, up to {frames.BODY_SIZE_BYTES_MAX >> 20} MiB",
        f"({server.WAITING_MAX} requests or {server.WAITING_SIZE_BYTES_MAX >> 20} MiB of one name wait there)",
        f"- `TooManyRequests`: {driver.OPEN_REQUESTS_MAX:,} of this client are open",
        f"timeout={clients.TIMEOUT_DEFAULT_S:g}, policy=Policy(",
    ):
        assert said in GUIDE, said
    (policy,) = re.findall(r"policy=(Policy\(.*?\))\)", GUIDE)
    assert eval(policy, {"Policy": Policy}) == Policy()


def test_its_types_of_messages() -> None:
    rows = re.findall(r"^\| (\d) \| ([A-Z]+) \|", FRAMES, re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(kind.value, kind.name) for kind in frames.Kind]
