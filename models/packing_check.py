"""Whether rows may be computed together: asked of the network itself, once, before anything is trained or scored.

Packed rows (`data.batches.packing`) are exact for attention alone. A layer with a state or a convolution runs on over
the borders of rows, attention in chunks does not see them, a kernel may lack a term of the scores: all of it silent. So
three short rows, two of which begin alike, go through the network's body on its own device: each alone by the network's
own attention (the truth), padded, and packed with their common beginning once (layout `shared`, of which `packed` is
the simpler case). What differs from the truth by more than rounding is not used: `packed`, else `padded`, else `alone`,
one row at a time.

What rounding does, the network says itself: the embeddings of one row are moved by their last bit (`noise`).
Hidden states are compared, not logits (a fresh scalar head says 0 to everything), in evaluation mode and without
autocast or TF32: weights are float32 here, where the noise is some 1e-6 of the largest value, and the smallest leak of
a freshly drawn network some 1e-3. A kernel of half precision (flash-attention) is held to a coarser limit, and the
layout to the fine one by an exact kernel. Nothing random is drawn and no state is kept.

What short rows cannot show is read from the configuration (`models.row_limits`).
"""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from espalier.data.batches.packing import Layout, PlacedRows, pack_rows, place_rows
from espalier.data.records import BadInput
from espalier.models.attention_kernels import BadAttention
from espalier.models.evaluating import evaluating
from espalier.models.gpu_attention import AUTO
from espalier.models.in_parts import halves_in_float32, is_part
from espalier.models.inputs import model_inputs, network
from espalier.models.packed_attention import PREFIX, takes_packed_rows, watched
from espalier.models.row_limits import longest_row, longest_together, other_layers, unseen_limit

log = logging.getLogger(__name__)

# Differences are shares of the largest hidden value. `_TIMES` the noise is allowed: float32, float16 and bf16 networks
# of 2 to 48 layers were seen to differ by 0.2 to 2.3 times it; `_FLOOR` at least; `_HALF`: kernels of bf16.
_FLOOR, _TIMES, _HALF = 2e-5, 8.0, 5e-2
HOW_ROWS_ARE = {"packed": "packed", "padded": "padded, not packed", "alone": "computed one at a time"}
_SHARED, _TAILS, _OTHER = 8, (5, 3), 6  # tokens of the rows


@dataclass(frozen=True)
class PackingCheck:
    """`choice`: packed, padded or alone. `leak` and `padding`: the largest difference of packed and of padded rows from
    rows alone, `noise` that of rounding, as shares of the largest hidden value (0 where not measured, infinity where
    the network refuses). `reason`: why rows are not packed; empty where they are.
    `max_length`: a batch with a longer row is computed one row at a time; `refuses_longer`: a longer row is refused.
    `is_head_last`: logits are what the output head says."""

    choice: str
    leak: float = 0.0
    padding: float = 0.0
    noise: float = 0.0
    reason: str = ""
    max_length: int | None = None
    is_head_last: bool = True
    refuses_longer: bool = False

    def choice_for(self, longest: int) -> str:
        """Return the choice for rows of which the longest has so many tokens. Raises BadInput for one that is
        refused."""
        is_too_long = self.max_length is not None and longest > self.max_length
        if is_too_long and self.refuses_longer:
            raise BadInput(
                f"a row of {longest} tokens for a network of {self.max_length} positions: its rotary frequencies "
                "('dynamic') would change for this row and for others: take shorter rows (params.max_tokens, "
                f"server.max_model_len={self.max_length}, examples.max_length={self.max_length})"
            )
        return "alone" if is_too_long else self.choice


def packing_of(model: Any) -> PackingCheck:
    """Return what `check_packing` says of the network, wrapped or not; asked at the first call and said in one line
    where rows are not packed. Where ZeRO-3 cuts the weights an engine has to gather them: all ranks make that call."""
    net = network(model)
    name = getattr(getattr(net, "config", None), "_attn_implementation", None)
    known = getattr(net, "_packing", None)
    if known is None or known[0] != name:
        check = check_packing(net)
        if check.reason and str(name).startswith(PREFIX):
            log.warning("%s: rows are %s: %s", type(net).__name__, HOW_ROWS_ARE[check.choice], check.reason)
        if not isinstance(net, PreTrainedModel):
            return check
        known = (net.config._attn_implementation, check)
        net._packing = known  # type: ignore[assignment]
    measured: PackingCheck = known[1]
    return measured


def packs_rows(model: Any) -> bool:
    """Say whether rows are packed for this model, wrapped or not."""
    return packing_of(model).choice == "packed"


@torch.no_grad()
def check_packing(model: Any) -> PackingCheck:
    """Measure. Where the product's own attention is not the network's, the network's own is set, in place."""
    net = network(model)
    if not isinstance(net, PreTrainedModel):
        return PackingCheck("padded")
    try:
        with _still(net):
            return _measure(net)
    except Exception as error:  # networks of other forms fail in many ways, and nothing is known of them then
        return PackingCheck("padded", reason=f"it could not be asked ({_line(error)})", is_head_last=False)


def is_cut(model: Any) -> bool:
    """Say whether ZeRO-3 has cut the weights: a forward pass is then one of all ranks."""
    return any(is_part(parameter) for parameter in network(model).parameters())


@contextmanager
def _still(net: PreTrainedModel) -> Iterator[None]:
    """Give evaluation mode, no autocast, no TF32 (cuDNN's convolutions have it by default); afterwards all as it
    was."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        exact = (torch.autocast(net.device.type, enabled=False), torch.backends.cudnn.flags(enabled=False))
        with evaluating(net), exact[0], exact[1], halves_in_float32(net):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _rows(net: PreTrainedModel) -> list[list[int]]:
    """Return three rows of common tokens, two of which begin alike."""
    config = net.config.get_text_config()
    settings = {**vars(net.config), **vars(config)}
    special = {value for name, value in settings.items() if name.endswith(("token_id", "token_index"))
               and isinstance(value, int)}  # fmt: skip
    plain = [token for token in range(min(config.vocab_size, 1000)) if token not in special]
    draw = random.Random(0)
    shared, *rest = ([draw.choice(plain) for _ in range(size)] for size in (_SHARED, *_TAILS, _OTHER))
    return [shared + rest[0], shared + rest[1], rest[2]]


def _states(net: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """Return hidden states [B, T, H] behind the last layer."""
    moved = {name: value.to(net.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    states: torch.Tensor = net.base_model(**moved, use_cache=False)[0]
    return states.float().cpu()


def _placed(rows: Sequence[Sequence[int]], kind: str) -> PlacedRows:
    if kind == "padded":
        return place_rows(rows, Layout("padded"))
    packed = pack_rows(rows, min_shared=2)
    ids, positions = packed.ids.unsqueeze(0), packed.position_ids.unsqueeze(0)
    return PlacedRows(ids, packed.paths, position_ids=positions, segments=packed.segments)


def _rows_together(net: PreTrainedModel, rows: Sequence[Sequence[int]], kind: str) -> list[torch.Tensor]:
    placed = _placed(rows, kind)
    states = _states(net, model_inputs(placed)).flatten(0, 1)
    return [states[path] for path in placed.paths]


def _distance(states: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    largest = max(float(row.abs().max()) for row in truth)
    differences = torch.cat([(mine - want).abs().flatten() for mine, want in zip(states, truth, strict=True)])
    furthest = float(differences.nan_to_num(nan=float("inf")).max())
    return furthest / max(largest, 1e-30)


def _alone(net: PreTrainedModel, rows: Sequence[Sequence[int]]) -> tuple[list[torch.Tensor], float]:
    """Return (the states of each row alone, how far those of the first move where its embeddings do by their
    rounding)."""

    def nudge(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.arange(output.shape[-1], device=output.device) % 2 * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output.dtype)

    truth = [_states(net, {"input_ids": torch.tensor([row])})[0] for row in rows]
    hook = net.get_input_embeddings().register_forward_hook(nudge)
    try:
        nudged = _states(net, {"input_ids": torch.tensor([rows[0]])})[0]
    finally:
        hook.remove()
    return truth, _distance([nudged], [truth[0]])


def _try(
    net: PreTrainedModel, rows: Sequence[Sequence[int]], kind: str, truth: list[torch.Tensor]
) -> tuple[float, str]:
    """Return (distance, the error of a network that refuses)."""
    try:
        return _distance(_rows_together(net, rows, kind), truth), ""
    except Exception as error:  # networks refuse in many ways; each means that this layout is none for them
        return float("inf"), _line(error)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:120]}".splitlines()[0]


@contextmanager
def _attention(net: PreTrainedModel, name: str) -> Iterator[None]:
    """Within: the network attends by another function."""
    before = net.config._attn_implementation
    net.set_attn_implementation(name)
    try:
        yield
    finally:
        net.set_attn_implementation(before)


def _measure(net: PreTrainedModel) -> PackingCheck:
    rows, name = _rows(net), net.config._attn_implementation or ""
    with watched() as calls, suppress(BadAttention):  # which shows in the padded rows again
        _states(net, {"input_ids": torch.tensor([rows[-1]])})
    attends_here = bool(calls.windows)
    with _attention(net, "eager") if attends_here else nullcontext():
        truth, noise = _alone(net, rows)
        is_head_last = _is_head_last(net, rows[-1])
    if not all(bool(row.isfinite().all()) for row in truth):
        return PackingCheck("padded", reason="its hidden states are not numbers")
    fine = max(_FLOOR, _TIMES * noise)
    is_half = "flash" in name or "varlen" in name
    limit = _HALF if is_half else fine
    padding, refused = _try(net, rows, "padded", truth)
    base = PackingCheck("padded", padding=padding, noise=noise, is_head_last=is_head_last,
                        max_length=longest_together(net.config),
                        refuses_longer=longest_row(net.config) is not None)  # fmt: skip
    if padding > limit:
        return _without_ours(net, rows, truth, fine, replace(base, reason=refused), attends_here)
    if not takes_packed_rows(net):
        return replace(base, reason=f"it attends by '{name}', which takes no packed rows")
    leak, refused = _try(net, rows, "packed", truth)
    if is_half and leak <= limit:
        with _attention(net, PREFIX + "eager"):
            leak, refused = _try(net, rows, "packed", truth)
    base = replace(base, leak=leak)
    if refused:
        return replace(base, reason=f"it refuses packed ones ({refused})")
    if leak > fine:
        return replace(base, reason=f"packed, they change one another by {leak:.1e} of the largest "
                       f"hidden value (rounding: {noise:.1e}){other_layers(net.config)}")  # fmt: skip
    unseen = unseen_limit(net.config, calls.windows)
    if unseen:
        return replace(base, reason=f"{unseen} is not built for packed ones")
    if name == PREFIX + AUTO and (doubt := _doubt_of_kernel(net, rows, truth)):
        log.warning("model.attention=auto: packed rows are computed by sdpa, as in bfloat16 %s", doubt)
        net.set_attn_implementation(PREFIX + "sdpa")
    return replace(base, choice="packed")


def _doubt_of_kernel(net: PreTrainedModel, rows: Sequence[Sequence[int]], truth: Sequence[torch.Tensor]) -> str:
    """Return what is wrong with the kernel that `auto` takes in bfloat16, which a float32 pass does not reach: packed
    rows are held against rows alone, both in bfloat16, by what bfloat16 itself moves."""
    with torch.autocast(net.device.type, torch.bfloat16):
        alone = [_states(net, {"input_ids": torch.tensor([row])})[0].float() for row in rows]
        leak, refused = _try(net, rows, "packed", alone)
    limit = max(_HALF, 2 * _distance(alone, truth))
    if refused:
        return f"its kernel refuses them ({refused})"
    return f"they change one another by {leak:.1e} of the largest hidden value" if leak > limit else ""


def _without_ours(
    net: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    truth: list[torch.Tensor],
    limit: float,
    base: PackingCheck,
    attends_here: bool,
) -> PackingCheck:
    """Find padded rows wrong by the product's attention: by the network's own, else one row at a time."""
    difference = base.reason or f"by {base.padding:.1e} of the largest hidden value (rounding: {base.noise:.1e})"
    if attends_here:
        net.set_attn_implementation("eager")
        padding, _ = _try(net, rows, "padded", truth)
        if padding <= limit:
            return replace(base, padding=padding, reason="it attends by the network's own eager function: by that of "
                           f"model.attention padded rows differ ({difference})")  # fmt: skip
        base = replace(base, padding=padding)
    return replace(base, choice="alone", reason=f"padded, they differ from rows alone ({difference})")


def _is_head_last(net: PreTrainedModel, row: Sequence[int]) -> bool:
    """Say whether the logits are what the output head gives, and nothing stands behind it."""
    head = net.get_output_embeddings()
    if not isinstance(head, torch.nn.Module):
        return True
    given: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, arguments, output: given.append(output))
    try:
        logits = net(input_ids=torch.tensor([row], device=net.device), use_cache=False).logits
    finally:
        hook.remove()
    return len(given) == 1 and given[0].shape == logits.shape and bool(torch.equal(given[0].float(), logits.float()))


def choose_layout(model: Any, layout: str, longest: int) -> str:
    """Return the kind of layout to use for rows of which the longest has so many tokens, where `layout` is asked for;
    `auto`: shared where rows may be packed, else padded. Raises BadAttention where packed rows are forced and leak, and
    where rows have to be computed one at a time with weights that ZeRO-3 has cut (ranks would make unequal numbers of
    passes), and BadInput for a row that the network does not take."""
    check = packing_of(model)
    choice = check.choice_for(longest)
    why = check.reason or f"a row of {longest} tokens (above {check.max_length}) changes the rotary frequencies of " \
                          "those beside it"  # fmt: skip
    name = type(network(model)).__name__
    if choice == "alone" and is_cut(model):
        raise BadAttention(f"{name}: rows have to be computed one at a time ({why}), which ZeRO-3 cannot: set "
                           "deepspeed=zero2")  # fmt: skip
    if choice == "alone" and check.choice != "alone":
        log.warning("%s: batches with a row of more than %d tokens are computed one row at a time: %s", name,
                    check.max_length, why)  # fmt: skip
    if layout == "padded" or (layout == "auto" and choice != "packed"):
        return "padded"
    if choice != "packed":
        raise BadAttention(
            f"update.layout={layout} packs rows, and {name} cannot have that: {why}: set update.layout=auto"
        )
    return "shared" if layout == "auto" else layout
