"""Rounds of training: rows of earlier rounds, the next policy, the record of a round."""
