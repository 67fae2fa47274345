"""What an intermediate state is worth: cutting states, Monte-Carlo values, labels, and what to do with noise."""
