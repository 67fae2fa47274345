"""The quick start as a whole, killed at random moments."""
