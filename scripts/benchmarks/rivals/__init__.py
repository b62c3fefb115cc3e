"""What Immortal is compared with."""
