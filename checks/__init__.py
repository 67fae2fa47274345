"""Checks of a machine, a model, a task and a config before money is spent: doctor.py runs them."""
