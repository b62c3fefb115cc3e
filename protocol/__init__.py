"""The bytes that apps and coordinators exchange: I/O-free, both directions. `docs/WIRE.md` specifies them."""

from protocol.compiled import CODEC

CODEC.install()
