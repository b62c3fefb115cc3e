"""`python -m coordinator` is `immortal`."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
