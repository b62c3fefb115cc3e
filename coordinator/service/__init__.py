"""Processes of an instance: the runtime of its coordinator, and the supervisor that starts coordinator and app."""
