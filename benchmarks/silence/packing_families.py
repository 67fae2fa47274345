"""Rows computed together against each row alone, for tiny random networks of many families.

`measure()` writes a network of every family to a folder, loads it by the product's own loader, and compares what the
product makes of rows together (training, scoring, reinforcement learning), in the layout that it chose itself, with a
plain loop over single rows through transformers' own model and its own eager attention. Weights are large enough that
a missing sink, a window or a leak shows. Rows are longer and shorter than the windows, and share their beginnings.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from espalier.data.batches.packing import Layout, pad_rows
from espalier.data.examples.stored_examples import longest_of
from espalier.data.examples.token_examples import PairExample, StepExample, TokenExample
from espalier.data.records import Trajectory
from espalier.models.load import load_policy, load_reference
from espalier.models.packing_check import packing_of
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_trajectories
from espalier.rl.experience import policy_logits, policy_logprobs
from espalier.runtime.schemas import TrainConfig
from espalier.training.loop_from_config import make_layout
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.training.objectives.sft import SupervisedFineTuning
from espalier.training.reference_logprobs import ReferenceLogprobs
from espalier.training.scoring import Scorer

WINDOW, VOCABULARY, BETA = 8, 97, 0.1
LIMIT, HALF_LIMIT = 2e-5, 0.1  # of differences in float32 (rounding: at most 4e-6), and in bf16 (0.05)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ALTERNATE = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
_IMAGES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 4,
           "patch_size": 2}  # fmt: skip

# Name of a family → (transformers' model type, what its configuration says beside `_SIZES`).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, **_EXPERTS}),
    "qwen3_next": ("qwen3_next", {"head_dim": 8, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16,
                                  "layer_types": ["linear_attention", "full_attention"]}),
    "gemma3": ("gemma3_text", {"head_dim": 8, **_ALTERNATE}),
    "gemma3 with images": ("gemma3", {"text_config": _SIZES | {"head_dim": 8, **_ALTERNATE}, "vision_config": _IMAGES,
                                      "mm_tokens_per_image": 4, "image_token_index": 96, "pad_token_id": 0,
                                      "boi_token_index": 95, "eoi_token_index": 94}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3 with longrope": ("phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 24}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, **_ALTERNATE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "falcon_h1": ("falcon_h1", {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                                "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
                                "lm_head_multiplier": 0.5}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "llama4": ("llama4_text", {"head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 32,
                               "num_local_experts": 2}),
    "mamba": ("mamba", {"state_size": 4}),
    "bloom": ("bloom", {"n_head": 4}),
    "stablelm": ("stablelm", {}),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
}  # fmt: skip


@dataclass(frozen=True)
class FamilyResult:
    """`choice`: packed, padded or alone, and `layout` of a training batch. `largest`: the largest difference from rows
    alone, as a share of the largest number compared, over all of `differences` (name → difference), in float32.
    `scores`: of step scores in bf16, from those of each row scored alone (None: no such network). `reason` as the
    check at loading gives it."""

    choice: str
    layout: str
    largest: float
    differences: dict[str, float]
    scores: float | None
    reason: str

    @property
    def is_right(self) -> bool:
        """Whether nothing but rounding lies between rows together and rows alone."""
        return self.largest < LIMIT and (self.scores is None or self.scores < HALF_LIMIT)


def configuration(name: str) -> PretrainedConfig:
    """Of a tiny network of the family."""
    kind, more = FAMILIES[name]
    config: PretrainedConfig = AutoConfig.for_model(kind, **(more if "text_config" in more else _SIZES | more))
    return config


@torch.no_grad()
def write_network(name: str, folder: Path, auto: Any = AutoModelForCausalLM, seed: int = 0) -> Path | None:
    """Return a random network of the family in `folder`; None where transformers has none of this kind."""
    config = configuration(name)
    if auto is AutoModelForTokenClassification:
        config.num_labels = 1
    if type(config) not in auto._model_mapping:
        return None
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and "A_log" not in key
        parameter.add_((0.2 if is_matrix else 0.1) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def token_rows(seed: int = 0) -> list[list[int]]:
    """Return rows of 4 to 45 tokens; the second and third begin like the first for 18 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> list[int]:
        return torch.randint(2, 90, (size,), generator=generator).tolist()

    begin = draw(18)
    return [begin + draw(9), begin + draw(3), begin + draw(20), draw(4), draw(45), draw(7)]


def _alone(model: Any, row: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def _logprobs_alone(model: Any, row: Sequence[int]) -> torch.Tensor:
    """Return log-probs [T - 1] of all tokens but the first."""
    logs = torch.log_softmax(_alone(model, row)[:-1], dim=-1)
    return logs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def _distance(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Return the largest difference as a share of the largest number."""
    largest = max(float(want.abs().max()) for want in truth)
    differences = torch.cat([(mine - want).abs().flatten() for mine, want in zip(found, truth, strict=True)])
    return float(differences.nan_to_num(nan=float("inf")).max()) / max(largest, 1e-30)


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def _same_step(
    objective: Any, examples: Sequence[Any], model: Any, plain: Any, alone: Callable[[Any], torch.Tensor]
) -> tuple[float, float, Layout]:
    """Return (difference of the loss, of the gradients, the layout) of one training step; `alone`: the loss of an
    example."""
    layout = make_layout(TrainConfig(), objective, model, longest_of(examples), 0)
    model.train()
    loss = objective.loss(model, objective.collate(examples, layout)).total
    want = torch.stack([alone(example) for example in examples]).sum()
    mine, truth = _gradients(model, loss), _gradients(plain, want)
    # A weight that has no gradient in either way (an expert that no token chose) may be absent or 0.
    names = [name for name in truth if name in mine or bool(truth[name].any())]
    gap = _distance([mine[name] for name in names], [truth[name] for name in names])
    return _distance([loss.detach()], [want.detach()]), gap, layout


def _policies(folder: Path, attention: str) -> tuple[dict[str, float], str, PreTrainedModel]:
    """Return (differences of everything a causal language model does, layout, the product's network)."""
    rows = token_rows()
    model, reference = load_policy(str(folder / "policy"), attention), load_reference(str(folder / "old"), attention)
    plain, old = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, attn_implementation="eager")
        for name in ("policy", "old")
    )
    demonstrations = [TokenExample(str(number), row, 2) for number, row in enumerate(rows)]
    found: dict[str, float] = {}
    step = _same_step(SupervisedFineTuning(), demonstrations, model, plain,
                      lambda example: -_logprobs_alone(plain, example.ids)[1:].sum())  # fmt: skip
    found["sft loss"], found["sft gradients"], layout = step

    pairs = [PairExample(str(number), row[:-3], row[-3:], rows[5][number:], 0.5) for number, row in enumerate(rows[:4])]

    def preference(example: PairExample) -> torch.Tensor:
        sides = [[*example.prompt_ids, *side] for side in (example.chosen_ids, example.rejected_ids)]
        start = len(example.prompt_ids) - 1
        own, frozen = ([_logprobs_alone(one, side)[start:].sum() for side in sides] for one in (plain, old))
        margin = own[0] - frozen[0].detach() - own[1] + frozen[1].detach()
        return -torch.nn.functional.logsigmoid(BETA * margin)

    objective = DirectPreference(reference, beta=BETA)
    found["dpo loss"], found["dpo gradients"], _ = _same_step(objective, pairs, model, plain, preference)
    with torch.no_grad():
        truth = [_logprobs_alone(plain, row) for row in rows]
        found |= _scored(model, demonstrations, rows, truth, [_alone(plain, row) for row in rows])
        found["reference log-probs"] = _reference(folder, reference, objective.collate(pairs, layout), old)
    return found, layout.kind, model


def _scored(
    model: Any,
    examples: Sequence[TokenExample],
    rows: Sequence[Sequence[int]],
    truth: Sequence[torch.Tensor],
    logits: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Return differences of predictions and of the passes of reinforcement learning; `truth`, `logits` of each row."""
    model.eval()
    found: list[Any] = Scorer(model, 0, "fp32").score(examples)
    ids, attention_mask, response_mask = pad_rows(rows, [1] * len(rows), 0)
    logprobs, _ = policy_logprobs(model, ids, attention_mask, response_mask, 1.0)
    aligned = policy_logits(model, ids, attention_mask)
    sizes = [len(row) for row in rows]
    return {
        "predictions": _distance([torch.tensor(one.token_logprobs) for one in found], [want[1:] for want in truth]),
        "rl log-probs": _distance([logprobs[row, 1:size] for row, size in enumerate(sizes)], truth),
        "rl logits": _distance([aligned[row, 1:size] for row, size in enumerate(sizes)], [one[:-1] for one in logits]),
    }


def _reference(folder: Path, reference: Any, batch: Any, old: Any) -> float:
    """Return difference of the sums that are computed once and kept."""
    asked = ReferenceLogprobs(reference, 1.0, folder)
    asked.fill(lambda _: [batch], 1)
    ends = batch.target_rows.bincount().tolist()
    rows = _rows_of(batch)
    truth = [_logprobs_alone(old, row)[-size:].sum() for row, size in zip(rows, ends, strict=True)]
    return _distance([asked.sums(batch)], [torch.stack(truth)])


def _rows_of(batch: Any) -> list[list[int]]:
    """Return the rows of a batch of pairs, whichever way they lie: from the last target back to the start."""
    flat = batch.ids.flatten()
    if batch.segments is None:
        return [row[: int(mask.sum())].tolist() for row, mask in zip(batch.ids, batch.attention_mask, strict=True)]
    ends = torch.tensor(batch.segments.lengths).cumsum(0).tolist()
    chains = {own: [*above, own] for own, above in enumerate(batch.segments.above)}
    found = []
    for number in range(batch.num_rows):
        places = batch.target_places[batch.target_rows == number] + 1
        last = next(own for own, end in enumerate(ends) if int(places[-1]) < end)
        found.append(
            [int(t) for own in chains[last] for t in flat[ends[own] - batch.segments.lengths[own] : ends[own]]]
        )
    return found


def _process_rewards(folder: Path, attention: str) -> tuple[dict[str, float], float]:
    """Return (differences in training a process reward model, and that of step scores from those of each row alone)."""
    rows = token_rows()
    model = load_process_reward(str(folder / "prm"), None, attention)
    plain = AutoModelForTokenClassification.from_pretrained(
        folder / "prm", dtype=torch.float32, attn_implementation="eager"
    )
    examples = [StepExample(str(number), row, [len(row) // 2, len(row) - 1], [0.25, 1.0])
                for number, row in enumerate(rows)]  # fmt: skip

    def alone(example: StepExample) -> torch.Tensor:
        logits = _alone(plain, example.ids)[example.positions, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.tensor(example.values), reduction="sum"
        )

    found: dict[str, float] = {}
    found["prm loss"], found["prm gradients"], _ = _same_step(ProcessRewardObjective(), examples, model, plain, alone)
    trajectories = [
        Trajectory(str(number), "p", "", "ab", ["a", "b"], row[:1], row[1:], [len(row) // 2, len(row) - 1], "stop", "",
                   None, False)
        for number, row in enumerate(rows)
    ]  # fmt: skip
    score = partial(score_trajectories, model, pad_id=0)
    together = score(trajectories)
    single = [score([trajectory])[0] for trajectory in trajectories]
    return found, _distance([torch.tensor(together)], [torch.tensor(single)])


def measure_family(name: str, folder: Path, attention: str = "sdpa") -> FamilyResult:
    """Return everything about one family, whose networks are written to `folder`."""
    write_network(name, folder / "policy")
    write_network(name, folder / "old", seed=1)
    differences, layout, model = _policies(folder, attention)
    scores = None
    if write_network(name, folder / "prm", AutoModelForTokenClassification) is not None:
        of_rewards, scores = _process_rewards(folder, attention)
        differences |= of_rewards
    check = packing_of(model)
    return FamilyResult(check.choice, layout, max(differences.values()), differences, scores, check.reason)


def measure(attention: str = "sdpa", names: Sequence[str] = tuple(FAMILIES)) -> dict[str, FamilyResult]:
    """Return families, all of them by default, by `attention` (eager or sdpa)."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure_family(name, Path(folder), attention)
    return found
