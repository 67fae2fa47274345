"""The road from files of a user's own: road.py."""
