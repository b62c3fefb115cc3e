"""Steps of every call: its arguments, its context, the batches that leave, its failure."""
