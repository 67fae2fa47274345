"""Rows as long as real ones: 16,384 tokens packed into one equal their parts alone."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from espalier.data.batches.packing import Layout, place_rows
from espalier.models.inputs import model_inputs
from espalier.models.packed_attention import attention_name

SIZE = 16_384
# Tokens behind a common prompt (of 2,048), of rows with nothing in common, and many short ones.
PROMPT, SIDES, ALONE, SHORT = 2048, (1500, 900), (6000, 2500, 1388), 32


def rows_of() -> list[list[int]]:
    """Return rows of random tokens that fill a packed row."""
    draws = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 97, (count,), generator=draws).tolist()

    prompt = tokens(PROMPT)
    rows = [*(prompt + tokens(size) for size in SIDES), *(tokens(size) for size in ALONE)]
    left = SIZE - PROMPT - sum(SIDES) - sum(ALONE)
    return [*rows, *(tokens(left // SHORT) for _ in range(SHORT))]


def test_a_packed_row_of_16384_tokens_equals_its_parts_alone() -> None:
    """Hidden states of a float32 network, within a few times the rounding of sums over thousands of keys."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192)  # fmt: skip
    config._attn_implementation = attention_name("auto")
    body = LlamaForCausalLM(config).eval().model
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            parameter.mul_(5 if "proj" in name else 1)  # scores far from 0
        rows = rows_of()
        placed = place_rows(rows, Layout("shared"))
        assert placed.ids.shape == (1, SIZE)
        assert placed.segments is not None
        assert placed.segments.longest == max(ALONE)
        packed = body(**model_inputs(placed)).last_hidden_state[0]
        apart = []
        for row, path in zip(rows, placed.paths, strict=True):
            alone = body(input_ids=torch.tensor([row])).last_hidden_state[0]
            apart.append(float((packed[path] - alone).abs().max()))
    assert max(apart) < 1e-4 * float(packed.abs().max()), apart
