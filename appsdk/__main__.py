"""Command ``python -m immortal.appsdk module:Class``, which runs the app of an instance."""

import os
import sys

from immortal.appsdk.running.runner import main

HASH_SEED_VARIABLE = "PYTHONHASHSEED"

if __name__ == "__main__":
    # Python draws a new hash seed of str and bytes for each process. The order of a set depends on it, so a replay of a
    # handler that iterates over a set would differ. The seed can only be set from outside: start again with a fixed
    # one.
    if os.environ.get(HASH_SEED_VARIABLE, "random") == "random" and not sys.flags.ignore_environment:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, HASH_SEED_VARIABLE: "0"})
    sys.exit(main())
