"""The road of a user's own files and models, measured."""
