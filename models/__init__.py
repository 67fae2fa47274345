"""Networks: loading, the tiny policy, log-probs of a response, the process reward model's scalar head."""
