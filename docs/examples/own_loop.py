"""Espalier's functions in a loop of your own: grade, score steps, value states, make advantages, take one step.

Run it whole or cell by cell, in seconds on a CPU. Nothing is downloaded: policy and reward model are tiny and have
random weights; name folders of your own in their place.
"""

# %% Data: a problem, three solutions, and how four completions of the state before each step were graded
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import espalier
from espalier.models.tiny import build_tiny

PROMPT, GOLD = "Mia has 3 apples. Mia buys 4 more. Mia doubles the apples. How many apples now?\n", "14"
RESPONSES = ["3 + 4 = 7\n7 * 2 = 14\n#### 14", "3 + 4 = 7\n7 + 2 = 9\n#### 9", "I do not know."]
COMPLETIONS = [[[1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]], [[1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]], [[1, 0, 1, 0]]]

# %% Rewards and steps
rewards = [float(espalier.grade(response, GOLD, kind="marked_number").is_correct) for response in RESPONSES]
steps = [espalier.split_steps(response) for response in RESPONSES]

# %% Step scores of a process reward model: the best of three by the lowest score
folder = tempfile.TemporaryDirectory()
sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_length": 256, "seed": 0}
tiny = build_tiny(Path(folder.name) / "tiny", [PROMPT + response for response in RESPONSES], **sizes)
prm = espalier.load_prm(tiny, num_labels=1)  # yours: espalier.load_prm("experiments/quickstart/prm/model")
scores = espalier.score_steps(prm, [(PROMPT, row) for row in steps])
best = max(range(len(scores)), key=lambda i: espalier.aggregate_scores(scores[i], "minimum"))
print(f"rewards {rewards}, step scores {scores}, best of {len(scores)}: solution {best}")

# %% Advantages: one number per rollout (GRPO), one per token from the values of states (VinePPO)
grpo = espalier.grpo_advantages(rewards)
values = [espalier.monte_carlo_values(row) for row in COMPLETIONS]
tokens = [espalier.encode_steps(prm.tokenizer, PROMPT, row) for row in steps]
vineppo = [
    espalier.vineppo_advantages([state.value for state in states], reward, row.step_ends)
    for states, reward, row in zip(values, rewards, tokens, strict=True)
]
print(f"GRPO {grpo}; VinePPO, tokens of solution 0: {vineppo[0]}")

# %% One policy-gradient step in plain torch: the sum of advantage times log-prob over all tokens rises
policy = AutoModelForCausalLM.from_pretrained(tiny)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
objectives = []
for _ in range(2):
    objective = torch.tensor(0.0)
    for row, advantages in zip(tokens, vineppo, strict=True):
        logits = policy(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        logprobs = -torch.nn.functional.cross_entropy(logits, torch.tensor(row.response_ids), reduction="none")
        objective = objective + (torch.tensor(advantages) * logprobs).sum()
    optimizer.zero_grad()
    (-objective / sum(map(len, vineppo))).backward()
    optimizer.step()
    objectives.append(float(objective.detach()))
print(f"objective before the step {objectives[0]:.3f}, after it {objectives[1]:.3f}")
