"""Plain values and texts for records, status, handlers and comparisons: the commands and the page show the same."""
