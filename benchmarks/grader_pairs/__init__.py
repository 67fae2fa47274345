"""Pairs of answers whose verdict is known by how they are made: for the truth and hostile runs of the grader."""
