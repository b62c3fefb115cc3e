"""The command `immortal`: parses and wires, nothing else."""

from immortal.cli.commands import main

__all__ = ["main"]
