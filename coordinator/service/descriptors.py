"""How many descriptors a coordinator may have: connections that say nothing take one each until their time is up."""

from __future__ import annotations

import resource

WANTED = 1 << 16  # more than one stranger's address has ports


def raise_limit() -> None:
    """Take what the system allows this process, up to WANTED: what it starts with is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
