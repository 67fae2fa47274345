"""Counts of the house itself (configs, options, names): pure functions over its files, each with a goal of its own."""
