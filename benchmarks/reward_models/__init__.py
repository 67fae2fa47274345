"""Credit estimators: learning curves at equal tokens, seconds and updates, and beside the exact values of states."""
