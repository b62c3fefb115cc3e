"""Any moment of a log, looked at from within: the state behind a message, what it changed, where a value comes from.

`immortal replay` runs an app as it is in service, in a process of its own behind a socket. Here the app's dispatcher
runs beside the log's reader, so that each message can be looked at as it is handled. All of that is a process of its
own again, since it runs the user's code. ``sessions.py`` starts, asks and ends such processes, and is what they run.
"""
