"""The state machines: events in, effects out. No I/O, no clock, no randomness, no thread."""

from protocol.compiled import CORE

CORE.install()
