"""Records as training examples, with what a loss reads of them."""
