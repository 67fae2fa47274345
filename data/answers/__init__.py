"""Extract a final answer from a response; decide whether two answers are equal."""
