"""Command ``python -m immortal``, the same as ``immortal``. A supervisor also starts its coordinator with it."""

import sys
from importlib.util import find_spec

# OpenSSL's hashes would add 3.5 MiB to each coordinator. Python has its own of those that are used; hashlib and hmac
# take these if OpenSSL's are missing. Other commands can run the user's code, which may need what only OpenSSL has.
if (
    "coordinator" in (*sys.argv[1:2], *sys.argv[3:4])  # the latter after --home HOME
    and find_spec("_blake2")
    and (find_spec("_sha256") or find_spec("_sha2"))
):
    sys.modules["_hashlib"] = None  # type: ignore[assignment]
    # typing_extensions would add 0.4 MiB. msgspec takes typing's names if it is missing; psycopg may need it later.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec  # noqa: F401

    del sys.modules["typing_extensions"]

from immortal.cli import main

if __name__ == "__main__":
    main()
