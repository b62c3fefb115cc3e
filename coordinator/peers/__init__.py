"""Peers: where they are, which keys they have, who may call, and the way of frames to and from them."""
