"""The coordinator's side of its app: sockets, the shared secret, authentication, and the endpoint for the loop."""
