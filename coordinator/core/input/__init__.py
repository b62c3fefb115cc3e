"""Input on its way to the log: from the app, from peers; admission control and back-pressure."""
