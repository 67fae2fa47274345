"""What goes wrong without a word: silence.py, and a module for each of its parts."""
