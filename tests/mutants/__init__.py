"""Small changes of the code, which the tests must notice: ``scripts/mutants``."""
