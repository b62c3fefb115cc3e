"""State of an instance: its schema, its form in a checkpoint, what waits in it, copies and differences of it."""

from immortal.appsdk.state.schema import Envelope, StateSchema, Transient, decode_envelope, encode_envelope

__all__ = ["Envelope", "StateSchema", "Transient", "decode_envelope", "encode_envelope"]
