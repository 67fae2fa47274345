"""What the code looks like, counted from its source: one module for each kind of count, collected by house.py.

Every count returns a `Found`: the number, and the places that it counts (or lacks), worst first.
"""
