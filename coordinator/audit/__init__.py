"""What security needs to be known afterwards: who was refused, what operators did; one log for each instance."""
