"""Parses a log's URL: ``SCHEME:LOCATION``, or only a path for a log in a folder. No I/O."""

from __future__ import annotations

import re

FOLDERS = "lmdb"
"""Scheme of paths."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*):(.*)", re.DOTALL)


def split_url(log: str) -> tuple[str, str]:
    """Split a log's URL into (scheme, location). Write lmdb:PATH for a path that looks like a URL."""
    found = _URL.fullmatch(log)
    return (FOLDERS, log) if found is None else (found[1], found[2])


def log_of_instance(log: str, instance_name: str) -> str:
    """Add the instance's name to the URL of a server, which keeps many logs. Return other URLs and paths unchanged."""
    is_of_many = not is_in_folder(log) and split_url(log)[1].startswith("//") and "#" not in log
    return f"{log}#{instance_name}" if is_of_many else log


def is_in_folder(log: str) -> bool:
    """Return True if ``log`` is a path, or the URL of one."""
    return split_url(log)[0] == FOLDERS
