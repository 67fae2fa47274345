"""Preference pairs of sampled solutions: by outcome, by process rewards, from shared states, of partial solutions."""
