"""The state machines: events in, effects out. No I/O, no clock, no randomness, no thread."""

from immortal.protocol.compiled import CORE

CORE.install()
