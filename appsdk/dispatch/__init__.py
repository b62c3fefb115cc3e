"""Dispatch: from incoming bytes to the handlers that they call, and back, without I/O."""
