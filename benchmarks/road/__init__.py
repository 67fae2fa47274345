"""Verifiers that write against a reward model that scores."""
