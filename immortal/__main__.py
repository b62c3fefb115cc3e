"""Command ``python -m immortal``, the same as ``immortal``; a supervisor starts its coordinator with it, too."""

import sys
from importlib.util import find_spec

# OpenSSL's hashes would be 3.5 MiB of each coordinator. Python has its own of those that are used, and hashlib and hmac
# take these where there are no others. Other verbs may run the user's code, which may want what only OpenSSL has.
if (
    "coordinator" in (*sys.argv[1:2], *sys.argv[3:4])  # the latter behind --home HOME
    and find_spec("_blake2")
    and (find_spec("_sha256") or find_spec("_sha2"))
):
    sys.modules["_hashlib"] = None  # type: ignore[assignment]

from immortal.cli import main

if __name__ == "__main__":
    main()
