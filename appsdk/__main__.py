"""Command ``python -m immortal.appsdk module:Class``."""

import os
import sys

from immortal.appsdk.running.runner import main

HASH_SEED_VARIABLE = "PYTHONHASHSEED"

if __name__ == "__main__":
    # Python draws the hash seed of str and bytes anew for each process, and with it the order of a set: a handler that
    # goes through one would not be replayed. The seed can only be given from outside, so start over with one.
    if os.environ.get(HASH_SEED_VARIABLE, "random") == "random" and not sys.flags.ignore_environment:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, HASH_SEED_VARIABLE: "0"})
    sys.exit(main())
