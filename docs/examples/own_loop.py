"""Espalier's functions in a loop of your own: rewards, values of states, a process reward model, advantages, an update.

Run it whole or cell by cell, in seconds on a CPU. Nothing is downloaded: the models are tiny, with random weights.
"""

# %% Data: a problem, three solutions, and how four completions of the state before each step were graded
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForCausalLM

import espalier
from espalier.models.tiny import build_tiny

PROMPT, GOLD = "Mia has 3 apples. Mia buys 4 more. Mia doubles the apples. How many apples now?\n", "14"
RESPONSES = ["3 + 4 = 7\n7 * 2 = 14\n#### 14", "3 + 4 = 7\n7 + 2 = 9\n#### 9", "I do not know."]
COMPLETIONS = [[[1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]], [[1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]], [[1, 0, 1, 0]]]
folder = tempfile.TemporaryDirectory()
sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_length": 256, "seed": 0}
tiny = build_tiny(Path(folder.name) / "tiny", [PROMPT + response for response in RESPONSES], **sizes)

# %% Steps, rewards, and the value of the state that each step starts from
steps = [espalier.split_steps(response) for response in RESPONSES]
rewards = [float(espalier.grade(response, GOLD, kind="marked_number").is_correct) for response in RESPONSES]
values = [[state.value for state in espalier.monte_carlo_values(states)] for states in COMPLETIONS]

# %% A process reward model learns the value that each step leads to, and scores; yours: espalier.load_prm(FOLDER)
prm = espalier.load_prm(tiny, num_labels=1)
tokens = [espalier.encode_steps(prm.tokenizer, PROMPT, row) for row in steps]
rows = [torch.tensor([row.prompt_ids + row.response_ids]) for row in tokens]
adam = torch.optim.Adam(prm.network.parameters(), lr=1e-3)
for k in [0, 1, 2] * 20:
    logits = prm.network(rows[k]).logits[0, [len(tokens[k].prompt_ids) + end - 1 for end in tokens[k].step_ends], 0]
    adam.zero_grad()
    binary_cross_entropy_with_logits(logits, torch.tensor([*values[k][1:], rewards[k]])).backward()
    adam.step()
scores = espalier.score_steps(prm, [(PROMPT, row) for row in steps])
lowest = [espalier.aggregate_scores(row, "minimum") for row in scores]
print(f"step scores {scores}; the best solution is number {lowest.index(max(lowest))}")

# %% Advantages: one number per rollout (GRPO), one per token from the values of states (VinePPO)
grpo = espalier.grpo_advantages(rewards)
vineppo = [espalier.vineppo_advantages(values[k], rewards[k], tokens[k].step_ends) for k in range(3)]
print(f"GRPO {grpo}; VinePPO, last token of each step: {[vineppo[1][end - 1] for end in tokens[1].step_ends]}")

# %% Policy-gradient steps in plain torch: the mean over tokens of advantage times log-prob rises
policy = AutoModelForCausalLM.from_pretrained(tiny)
sgd, objectives = torch.optim.SGD(policy.parameters(), lr=0.1), []
sampled = torch.cat([rows[k][0, len(tokens[k].prompt_ids) :] for k in range(3)])
advantages = torch.tensor([advantage for row in vineppo for advantage in row])
for _ in range(3):
    logits = torch.cat([policy(rows[k]).logits[0, len(tokens[k].prompt_ids) - 1 : -1] for k in range(3)])
    loss = (advantages * cross_entropy(logits, sampled, reduction="none")).mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    objectives.append(-loss.item())
print(f"objective {objectives}")
