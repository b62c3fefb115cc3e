"""Calls: their arguments, their context, the batches that leave, and their failures."""
