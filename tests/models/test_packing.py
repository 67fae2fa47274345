"""Packed rows: every token has the position and the keys it has alone, and so the same log-prob and gradient."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from espalier.data.batches.collate import collate_tokens
from espalier.data.batches.packing import Layout, pack_rows, place_rows
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample
from espalier.models import attention_kernels, gpu_attention, packed_attention, token_scores
from espalier.models.attention_kernels import BadAttention
from espalier.models.gpu_attention import by_flex, by_sequences, flash, key_layout, varlen
from espalier.models.inputs import model_inputs
from espalier.models.load import load_policy
from espalier.models.logprobs import response_logprobs, target_scores
from espalier.models.packed_attention import attention_name
from espalier.models.packing_check import packing_of
from tests.support.objective_cases import BATCH_CASES, case

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=8)
ALTERNATE: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
NETWORKS = [
    (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2}),
    (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 4}),
    (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
    (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 4, "sliding_window": None}),
    (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 7}),
    (Gemma2Config, Gemma2ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7,
                                       "attn_logit_softcapping": 0.1}),
    (Gemma3TextConfig, Gemma3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16, **ALTERNATE}),
    (GptOssConfig, GptOssForCausalLM, {"num_key_value_heads": 2, "head_dim": 16, **ALTERNATE, "num_local_experts": 4,
                                       "num_experts_per_tok": 2}),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(ROWS, st.sampled_from([1, 2, 4]))
def test_every_token_sees_its_own_row_up_to_itself_and_nothing_else(rows: list[list[int]], min_shared: int) -> None:
    packed = pack_rows(rows, min_shared=min_shared)
    ends = torch.tensor(packed.segments.lengths).cumsum(0).tolist()
    runs = [range(end - length, end) for end, length in zip(ends, packed.segments.lengths, strict=True)]
    for row, path in zip(rows, packed.paths, strict=True):
        assert packed.ids[path].tolist() == row
        assert packed.position_ids[path].tolist() == list(range(len(row)))
        for place, token in enumerate(path.tolist()):
            own = next(index for index, run in enumerate(runs) if token in run)
            keys = [key for above in packed.segments.above[own] for key in runs[above]]
            assert [*keys, *range(runs[own].start, token + 1)] == path[: place + 1].tolist()
    if min_shared == 1:  # the nodes of the prefix tree
        assert len(packed.ids) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    alone = pack_rows(rows, is_sharing=False)
    assert alone.ids.tolist() == [token for row in rows for token in row]


def test_keys_of_all_segments_are_laid_out_for_one_call() -> None:
    packed = pack_rows([[1, 2, 3, 4], [1, 2, 5], [9]], min_shared=2)
    assert packed.segments.lengths == (2, 2, 1, 1)
    assert packed.segments.above == ((), (0,), (0,), ())
    places, sizes = key_layout(packed.segments)
    assert places.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5]
    assert sizes == [2, 4, 3, 1]


def related_rows() -> list[list[int]]:
    """Rows of 3 to 50 tokens, some with long beginnings in common, one the beginning of another, two alike."""
    draw = random.Random(1)
    base = [draw.randrange(97) for _ in range(40)]
    tails = [[draw.randrange(97) for _ in range(size)] for size in (5, 9, 20)]
    others = [[draw.randrange(97) for _ in range(size)] for size in (3, 50)]
    return [*(base[:30] + tail for tail in tails), *others, base[:20] + others[1][:9], base[:25], base, base]


@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("fewest", [1, pytest.param(3, marks=pytest.mark.slow), 1000], ids="at once {}".format)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("config", "network", "extra"), NETWORKS, ids=lambda value: getattr(value, "__name__", ""))
def test_packed_rows_give_the_logits_and_gradients_of_each_row_alone(
    kernel: str,
    config: Any,
    network: Any,
    extra: dict[str, Any],
    fewest: int,
    is_rounded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments one by one, short ones of about one size at once, all at once; the network's own eager attention knows
    windows of 7 tokens, soft caps and sinks; `is_rounded`: every size is rounded up, as in bf16."""
    if is_rounded:
        monkeypatch.setattr(attention_kernels, "missing", lambda size, step, tensor: -size % step)
        monkeypatch.setattr(token_scores, "missing", lambda size, step, tensor: -size % step)
    monkeypatch.setattr(packed_attention, "_FEWEST", fewest)
    packed_attention._plan.cache_clear()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = network(config(vocab_size=97, **shape, **extra)).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.mul_(5 if "proj" in name else 1)  # scores far from 0
            if name.endswith("sinks"):
                parameter.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    plain.set_attn_implementation("eager")
    ours = network(plain.config).eval()
    ours.load_state_dict(plain.state_dict())
    ours.set_attn_implementation(attention_name(kernel if network._supports_sdpa else "eager"))
    rows = related_rows()
    placed = place_rows(rows, Layout("shared"))
    assert placed.ids.shape[1] < 0.7 * sum(map(len, rows))
    logits = ours(**model_inputs(placed)).logits[0]
    mine, want = torch.zeros(()), torch.zeros(())
    for row, path in zip(rows, placed.paths, strict=True):
        alone = plain(input_ids=torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits[path], alone, rtol=0, atol=1e-5)
        mine, want = mine + logits[path].square().sum(), want + alone.square().sum()
    mine.backward()  # type: ignore[no-untyped-call]
    want.backward()  # type: ignore[no-untyped-call]
    for name, parameter in plain.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert float((gradient - parameter.grad).abs().max()) < 1e-5 * float(parameter.grad.abs().max()), name
    padded = place_rows(rows, Layout("padded"))
    kept = padded.attention_mask
    with torch.no_grad():
        difference = (ours(**model_inputs(padded)).logits - plain(**model_inputs(padded)).logits) * kept[..., None]
    assert float(difference.abs().max()) < 1e-5


def lengthened(example: Any, prefix: list[int]) -> Any:
    """The example with a longer prompt."""
    more = len(prefix)
    match example:
        case PairExample():
            return replace(example, prompt_ids=prefix + example.prompt_ids)
        case StepExample():
            return replace(example, ids=prefix + example.ids, positions=[more + place for place in example.positions])
        case TokenExample() | OutcomeExample():
            return replace(example, ids=prefix + example.ids, prompt_length=more + example.prompt_length)


@pytest.mark.parametrize("name", BATCH_CASES)
def test_no_loss_metric_or_gradient_depends_on_the_layout(name: str, tiny_policy: Path) -> None:
    found = []
    prefix = [int(value) for value in torch.randint(5, 60, (24,), generator=torch.Generator().manual_seed(0))]
    for kind in ("padded", "packed", "shared"):
        torch.manual_seed(0)
        objective, model, examples = case(name, tiny_policy)
        batch = objective.collate([lengthened(example, prefix) for example in examples], Layout(kind))
        loss = objective.loss(model, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((float(loss.total.detach()), loss.metrics, gradients, objective.count(batch), batch))
    total, metrics, gradients, count, _ = found[0]
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for other in found[1:]:
        assert other[0] == pytest.approx(total, abs=1e-5)
        assert other[3] == count
        for name_, (value, number) in metrics.items():
            assert other[1][name_] == (pytest.approx(value, abs=2e-5), number)
        for mine, want in zip(other[2], gradients, strict=True):
            assert float((mine - want).abs().max()) <= 1e-5 * max(1.0, largest)
    assert found[2][4].ids.numel() < found[1][4].ids.numel() == found[1][4].num_tokens  # the prefix stands once


def test_padded_rows_of_tensors_are_packed_for_the_pass(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy)).eval()
    rows = [[5, 9, 30, 31, 7] * 5, [5, 9, 30, 31, 7] * 4 + [8, 8], [40, 41]]
    placed = place_rows(rows, Layout("padded"))
    assert placed.attention_mask is not None
    mask = torch.zeros(placed.ids.shape, dtype=torch.bool)
    mask[0, 3:9] = mask[2, 1] = True
    with torch.no_grad():
        everywhere, entropies = response_logprobs(model, placed.ids, placed.attention_mask, 0.8)
        some, _ = response_logprobs(model, placed.ids, placed.attention_mask, 0.8, mask)
        model.set_attn_implementation("sdpa")
        want, want_entropies = response_logprobs(model, placed.ids, placed.attention_mask, 0.8)
    torch.testing.assert_close(everywhere, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, want_entropies, rtol=0, atol=1e-5)
    torch.testing.assert_close(some, want * mask[:, 1:], rtol=0, atol=1e-5)
    assert float(everywhere[2, 1:].abs().sum()) == 0  # padding


@pytest.mark.parametrize("setting", [True, "selective"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_recomputed_layers_see_the_same_keys(
    setting: bool | str, attention: str, kind: torch.dtype, tiny_policy: Path
) -> None:
    found = []
    examples = [TokenExample(str(k), [7, 9, 30, 31] * 6 + [40 + k, 50, 60], 24) for k in range(3)]
    for value in (False, setting):
        model = load_policy(str(tiny_policy), attention, value).train()
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            target_scores(model, collate_tokens(examples, Layout())).logprobs.sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for mine, want in zip(*found, strict=True):
        torch.testing.assert_close(mine, want)


class Products(TorchDispatchMode):
    """Within: the shapes of all matrix products, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.addmm):
            self.shapes.add((str(func), *(str(tuple(a.shape)) for a in args if torch.is_tensor(a))))
        return func(*args, **(kwargs or {}))


def test_batches_of_other_lengths_make_products_of_the_same_shapes() -> None:
    """oneDNN builds a kernel for every new shape in bf16, which takes longer than the product itself."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, use_cache=False, **shape))
    model.set_attn_implementation(attention_name("eager"))
    packing_of(model)  # asked here, it adds no products below
    found = []
    for sizes in [(135, 150, 94, 6, 7, 9, 10, 11), (129, 133, 96, 5, 14, 8, 6, 7, 3)]:  # 422, 401 tokens
        rows = [[index + 1] * size for index, size in enumerate(sizes)]
        mask = torch.tensor([[1] * size + [0] * (150 - size) for size in sizes])
        ids = torch.tensor([row + [0] * (150 - len(row)) for row in rows])
        with Products() as products, torch.autocast("cpu", torch.bfloat16):
            response_logprobs(model, ids, mask)[0].sum().backward()  # type: ignore[no-untyped-call]
        found.append(products.shapes)
    assert found[0] == found[1]
    assert len(found[0]) >= 12


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_window_is_compared_with_the_longest_row_not_with_the_packed_length(kernel: str) -> None:
    """Of eight rows of 6 tokens no query is hidden a key by a window of 6: the fast way without a mask is taken."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = MistralForCausalLM(MistralConfig(vocab_size=97, num_key_value_heads=1, sliding_window=6, **shape))
    model.set_attn_implementation(attention_name(kernel))
    asked: list[int | None] = []
    plan = packed_attention._plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "_plan", lambda *given: (asked.append(given[1]), plan(*given))[1])
        model(**model_inputs(place_rows([[token] * 6 for token in range(8)], Layout("packed"))))
        model(**model_inputs(place_rows([[1] * 7, [2] * 3], Layout("packed"))))
    assert asked == [None, 6]


def test_masks_kept_from_a_pass_without_gradients_serve_one_with_them() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = MistralForCausalLM(MistralConfig(vocab_size=97, num_key_value_heads=1, sliding_window=3, **shape))
    inputs = model_inputs(place_rows([[token] * 9 for token in range(6)], Layout("packed")))
    for kernel in ("sdpa", "eager"):
        for fewest in (1, 1000):
            packed_attention._plan.cache_clear()
            model.set_attn_implementation(attention_name(kernel))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(packed_attention, "_FEWEST", fewest)
                with torch.inference_mode():
                    model(**inputs)
                model(**inputs).logits.sum().backward()


@pytest.mark.parametrize("kernel", ["flash", "flash_attention_2", "varlen_attention", "flex_attention"])
def test_a_kernel_that_is_not_there_is_named(kernel: str) -> None:
    if kernel != "flash" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BadAttention, match=r"model\.attention"):
        attention_name(kernel)


def sequences(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: Any, key_ends: Any, *sizes: int, **how: Any
) -> torch.Tensor:
    """What flash_attn_varlen_func and varlen_attn compute, causal and aligned at the end, without a GPU."""
    found, (left, right) = [], how["window_size"]
    assert how.get("causal", right == 0)
    for row in range(len(query_ends) - 1):
        queries = query[query_ends[row] : query_ends[row + 1]].float()
        keys, values = (part[key_ends[row] : key_ends[row + 1]].float() for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * how.get("softmax_scale", how.get("scale"))
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        if left >= 0:
            seen = seen.triu(len(keys) - len(queries) - left)
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
    return torch.cat(found).to(query.dtype)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("kernel", ["flash", "varlen", "flex"])
@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 30, 38), (16, 8, 8), (31, 20, 15)], ids=str)
def test_kernels_for_gpus_get_the_keys_of_shared_segments_whatever_the_row_is_rounded_to(
    sizes: tuple[int, int, int], kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three of these as many tokens are added to the row as keys are repeated. Flex attention is the real one."""
    package = ModuleType("flash_attn")
    monkeypatch.setattr(package, "flash_attn_varlen_func", sequences, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", sequences)
    shared, first, second = sizes
    rows = [[*range(shared), *range(100, 100 + first)], [*range(shared), *range(200, 200 + second)]]
    packed = pack_rows(rows)
    num_tokens = len(packed.ids)
    segments = replace(packed.segments, num_unread=-num_tokens % 64)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 4, num_tokens + segments.num_unread, 16).bfloat16() for _ in range(3)]
    how = attention_kernels.How(0.25, window=window)
    kernels = (attention_kernels.eager_kernel, attention_kernels.eager_batch)
    attend = {"flash": by_sequences(flash), "varlen": by_sequences(varlen), "flex": by_flex}[kernel]
    found = attend(*tensors, segments, how)[:, :num_tokens]
    wanted = packed_attention.by_segments(kernels, *tensors, segments, how)[:, :num_tokens]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


def test_a_kernel_that_rounds_whole_precision_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """By a kernel that gives the queries back: what it gets is rounded to bfloat16, what it gives is float32 again."""
    gpu_attention._warn_of_bf16.cache_clear()  # said by no earlier test
    packed = pack_rows([[1, 2, 3], [4, 5]])
    tensors = [torch.randn(1, 2, len(packed.ids), 8) for _ in range(3)]
    echo = by_sequences(lambda tensors, borders, longest, how: tensors[0])
    for _ in range(2):
        found = echo(*tensors, packed.segments, attention_kernels.How(0.25))
    assert torch.equal(found[0], tensors[0][0].transpose(0, 1).bfloat16().float())
    assert caplog.text.count("attention of float32 is computed in bfloat16") == 1
    caplog.clear()
    echo(*[tensor.bfloat16() for tensor in tensors], packed.segments, attention_kernels.How(0.25))
    assert "computed in bfloat16" not in caplog.text


def test_flex_attention_caps_scores_and_repeats_no_heads() -> None:
    packed = pack_rows([[*range(20), 50, 51], [*range(20), 60, 61, 62]])
    torch.manual_seed(0)
    query = 4 * torch.randn(1, 4, len(packed.ids), 16)
    key, value = torch.randn(2, 1, 2, len(packed.ids), 16).unbind(0)
    how = attention_kernels.How(0.25, softcap=2.0)
    kernels = (attention_kernels.eager_kernel, attention_kernels.eager_batch)
    found = by_flex(query, key, value, packed.segments, how)
    wanted = packed_attention.by_segments(kernels, query, key, value, packed.segments, how)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
