"""One file an estimator: how good every token of a rollout was. The protocol is `rl.types.AdvantageEstimator`."""
