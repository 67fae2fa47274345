"""Reinforcement learning: beside a peer, part by part, with planted faults, killed at random moments."""
