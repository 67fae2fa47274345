"""A small PPO run for `test_rl_ranks.py`: `python rl_ranks.py POLICY RUN_DIR`, alone or behind torchrun."""

import sys
from pathlib import Path

import torch
from rl_cases import make_trainer

from data.tasks.word_arithmetic import WordArithmetic
from models.load import load_tokenizer
from rl.advantages.generalized import GeneralizedAdvantage
from runtime.distributed import process_group
from runtime.schemas import CriticConfig, KLConfig


def main() -> None:
    """Two iterations with a critic, a KL penalty and whitening; model/ and critic/ at the end."""
    torch.set_num_threads(1)
    policy, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
    task = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    tokenizer = load_tokenizer(str(policy))
    with process_group(timeout_seconds=120):
        trainer = make_trainer(
            policy, task, tokenizer, run_dir, "", GeneralizedAdvantage(gamma=1.0, lam=0.95),
            critic=CriticConfig(learning_rate=1e-3), kl=KLConfig(coefficient=0.05, kind="k3"), whitening="standard",
            loss_normaliser="sequence", max_mean_ratio=10.0, num_iterations=2, num_epochs=1, eval_every=0, save_every=1,
        )  # fmt: skip
        trainer.run()
        trainer.save_model()


if __name__ == "__main__":
    main()
