"""What each call goes through, whoever makes it: its arguments, its context, the batches that leave, how it fails."""
