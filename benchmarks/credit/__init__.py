"""Learning curves of credit methods at equal generated tokens, equal seconds and equal updates."""
