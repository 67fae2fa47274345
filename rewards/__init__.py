"""How good a trajectory is, and each of its steps."""
