"""Output streams to peers: the handshake, what is in flight, what a replay checks."""
