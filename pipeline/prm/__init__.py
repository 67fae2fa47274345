"""Published judged steps, scores of steps, and how good the scores are."""
