"""How good every token of a rollout was: one file per algorithm, of parts in rl/credit/."""
