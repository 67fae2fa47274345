"""Reinforcement learning with a live engine: rollout → reward → advantage → update → weight sync."""
