"""How good every token of a rollout was: one file an estimator (`rl.types.AdvantageEstimator`)."""
