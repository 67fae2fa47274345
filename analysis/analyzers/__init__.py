"""Analyzers: what a finished run or its files say about values, gradients, diversity and cost (VinePPO's list)."""
