"""State of an instance: its schema, its form in a checkpoint, journals of waiting handlers, copies and differences."""

from immortal.appsdk.state.schema import Envelope, StateSchema, Transient, decode_envelope, encode_envelope

__all__ = ["Envelope", "StateSchema", "Transient", "decode_envelope", "encode_envelope"]
