"""Espalier trains language models to reason, step by step.

The folders beside this one are its sub-packages, by links: `espalier.data.records` is data/records.py, in a checkout
(installed or not) and in an installed package alike.
"""
