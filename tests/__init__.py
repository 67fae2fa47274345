"""Tests, in folders named as what they test; support/ holds what several of them share."""
