"""Time travel to any moment of a log: the state after a message, its changes, the origin of a value.

`immortal replay` runs an app as in service, in its own process behind a socket. Here the app's dispatcher runs beside
the log's reader, so that each message can be inspected when it is handled. All of that is again a separate process,
since it runs the user's code. ``sessions.py`` starts, asks and ends such processes, and is their program.
"""
