"""Sockets of the app: listening, authentication, and the connection."""
