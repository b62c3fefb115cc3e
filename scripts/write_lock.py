"""Writer of requirements-dev.lock, from pip's report of a dry run (see scripts/lock)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def lock_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the Python and machine, then one line for each package, without the files' addresses.

    Raises ValueError for a package without a hash, except the project itself.
    """
    here = report["environment"]
    python = f"{here['implementation_name']} {here['python_version']}"
    yield f"# for {python} on {here['sys_platform']} {here['platform_machine']}"
    yield "# by scripts/lock, from pyproject.toml; scripts/setup dev installs it"
    pinned = {}
    for one in report["install"]:
        download, metadata = one["download_info"], one["metadata"]
        if "dir_info" in download:
            continue  # the project itself
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        found = download.get("archive_info", {}).get("hashes", {}).get("sha256")
        if found is None:
            raise ValueError(f"{name} {metadata['version']} has no sha256: it can't be locked")
        pinned[name] = f"{name}=={metadata['version']} --hash=sha256:{found}"
    yield from (pinned[name] for name in sorted(pinned))


if __name__ == "__main__":
    print(*lock_lines(json.loads(Path(sys.argv[1]).read_text())), sep="\n")
