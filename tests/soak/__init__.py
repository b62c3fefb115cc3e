"""The soak: processes killed and stopped at random and at named points, over the examples; then the counts."""
