"""``python -m immortal``: the command ``immortal``."""

from immortal.cli import main

if __name__ == "__main__":
    main()
