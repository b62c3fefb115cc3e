"""Logs as traces: messages by time (:mod:`.messages`), spans of them (:mod:`.spans`), and what viewers read."""
