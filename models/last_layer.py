"""The last layer computed only where its output is read.

Behind its attention the last layer of a transformer works on each token alone, and of its output a loss reads the
step ends of a trajectory, or the tokens before a response: the rest of its output projection and of its MLP is
computed, and differentiated, for nothing. Here these are left out; values and gradients of what is read are the
same. It saves up to one layer of the network: a third of a benchmark's small model, a few hundredths of a large one.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from espalier.models.shapes import ROWS, missing

# Decoder layers of one form: x += attention(norm(x)), with `o_proj` last in it; x += mlp(norm(x)).
_KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# Beyond this share of tokens that are read, picking them costs what it saves (measured on a CPU at 0.67).
MAX_SHARE = 0.6
_CLASSES: dict[type, type] = {}


class _ReadLayer:
    """What a last layer does when it is given `reads` [R], places in the flattened [B, T] without repetition."""

    def forward(
        self: Any, hidden_states: torch.Tensor, *positional: Any, reads: torch.Tensor | None = None, **named: Any
    ) -> torch.Tensor:
        """[B, T, H] → [B, T, H]: the layer's own answer; 0 at places that are not read."""
        if reads is None:
            output: torch.Tensor = super().forward(hidden_states, *positional, **named)  # type: ignore[misc]
            return output

        def pick(module: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return given[0].flatten(0, 1).index_select(0, reads).unsqueeze(0)

        residual = hidden_states.flatten(0, 1).index_select(0, reads).unsqueeze(0)
        hook = self.self_attn.o_proj.register_forward_pre_hook(pick)
        try:
            attended, _ = self.self_attn(self.input_layernorm(hidden_states), *positional, **named)
        finally:
            hook.remove()
        states = residual + attended
        states = states + self.mlp(self.post_attention_layernorm(states))
        nothing = torch.zeros_like(hidden_states, dtype=states.dtype).flatten(0, 1)
        return nothing.index_copy(0, reads, states[0]).view_as(hidden_states)


def _reading(layer: type) -> type:
    """Return the class of such a layer, under the name of its own."""
    if layer not in _CLASSES:
        _CLASSES[layer] = type(layer.__name__, (_ReadLayer, layer), {"__module__": layer.__module__})
    return _CLASSES[layer]


def _last_layer(model: Any) -> Any:
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    return layers[-1] if layers is not None and len(layers) else None


def read_last_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Let the last layer take `reads`, in place; a network of another form stays as it is."""
    layer = _last_layer(model)
    if type(layer).__name__ in _KNOWN and not isinstance(layer, _ReadLayer):
        layer.__class__ = _reading(type(layer))
    return model


def reads_of(model: Any, positions: torch.Tensor, num_places: int, num_unread: int = 0) -> dict[str, torch.Tensor]:
    """Make the arguments that a transformers model is called with beside its inputs, so that of `num_places` tokens,
    `num_unread` of them spare, only `positions` [N] (any order, repetitions allowed) have to be right: none where its
    last layer takes no such thing, or little is saved. A few more than `positions` round their number up
    (`models.shapes`)."""
    if not isinstance(_last_layer(model), _ReadLayer):
        return {}
    reads = positions.unique()
    if not 0 < len(reads) <= MAX_SHARE * (num_places - num_unread):
        return {}
    more = missing(len(reads), ROWS, reads)
    if 0 < more < num_places - len(reads):
        others = torch.ones(num_places, dtype=torch.bool).index_fill(0, reads, False).nonzero().squeeze(1)
        reads = torch.cat((reads, others[:more]))
    return {"reads": reads}
