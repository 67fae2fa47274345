"""What a run taught: the quick start's report, its charts and its summary."""
