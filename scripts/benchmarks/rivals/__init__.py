"""Systems that Immortal is compared with."""
