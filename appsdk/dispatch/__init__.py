"""From the bytes that come in to the handlers that they call, and back, without I/O."""
