"""Protocols of apps, coordinators, peers and clients, without I/O. `docs/WIRE.md` specifies the bytes."""

from immortal.protocol.compiled import CODEC

CODEC.install()
