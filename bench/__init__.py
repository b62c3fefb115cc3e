"""`immortal bench`: real apps, real coordinators, durable logs; what is measured is what a user gets."""
