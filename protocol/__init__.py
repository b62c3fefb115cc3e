"""The bytes that apps and coordinators exchange: I/O-free, both directions. `docs/WIRE.md` specifies them."""

from immortal.protocol.compiled import CODEC

CODEC.install()
