"""The sides of the benchmark of what could be wrong without a word."""
