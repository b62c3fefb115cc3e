"""Life cycle of an instance: recovery, upgrade, feeding the app, pause and stop."""
