"""Models before and after their training: a tiny base policy, an adapter merged into its base."""
