"""Reinforcement learning with a live engine: rollout → reward → experience → advantage → update → weight sync."""
