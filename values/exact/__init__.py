"""True values of states, computed from the policy's own probabilities instead of sampled, on tasks that can be
enumerated (`data/tasks/enumerable.py`)."""
