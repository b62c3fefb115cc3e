"""State machine of a coordinator: events in, effects out. No I/O, no clock, no randomness, no thread."""

from immortal.protocol.compiled import CORE

CORE.install()
