"""Samples and values: what they cost, and sampling runs that are broken on purpose."""
