"""The check at loading, on tiny networks of many families: whatever it chooses, rows together equal each row alone."""

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.silence.packing_families import FAMILIES, configuration, measure_family, token_rows, write_network
from espalier.data.batches.collate import collate_tokens
from espalier.data.batches.packing import Layout, pad_rows, place_rows
from espalier.data.examples.stored_examples import longest_of
from espalier.data.examples.token_examples import StepExample, TokenExample
from espalier.data.records import BadInput, Trajectory
from espalier.models.attention_kernels import BadAttention
from espalier.models.inputs import model_inputs
from espalier.models.load import load_policy
from espalier.models.logits import all_logits, one_by_one, response_values
from espalier.models.logprobs import response_logprobs, target_scores
from espalier.models.packing_check import PackingCheck, check_packing, choose_layout, packing_of
from espalier.models.scalar_head import load_critic, load_process_reward
from espalier.rewards.process import row_logits, score_trajectories
from espalier.rl.engines_from_config import check_window
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import TrainConfig
from espalier.training.cut_networks import CutNetwork, CutNetworks
from espalier.training.loop_from_config import make_layout
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.training.objectives.sft import SupervisedFineTuning
from tests.support.root_config import root_config

CHOICES = {
    "llama": "packed", "qwen2": "packed", "qwen3": "packed", "qwen3_moe": "packed", "qwen3_next": "padded",
    "gemma3": "packed", "gemma3 with images": "packed", "gemma2": "packed", "mistral": "packed", "phi3": "packed",
    "phi3 with longrope": "packed", "gpt_oss": "packed", "falcon_h1": "padded", "lfm2": "padded", "llama4": "padded",
    "mamba": "padded", "bloom": "padded", "stablelm": "padded", "gptj": "padded",
}  # fmt: skip
OFTEN = ("llama", "qwen3_moe", "gemma3", "mistral", "gpt_oss", "lfm2", "phi3 with longrope")
ROWS = [[5, 9, 30, 31, 7], [5, 9, 30, 31, 8, 8, 12, 40], [40, 41]]


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_rows_together_equal_each_row_alone_in_every_family(name: str, attention: str, tmp_path: Path) -> None:
    """SFT, DPO and process rewards with gradients, reference log-probs, predictions and the passes of reinforcement
    learning, against transformers' own network on one row at a time."""
    found = measure_family(name, tmp_path, attention)
    assert found.choice == CHOICES[name]
    assert found.layout == ("shared" if found.choice == "packed" and name != "phi3 with longrope" else "padded")
    assert found.is_right, found


def test_what_leaks_is_said_in_one_line_once_and_refused_where_it_is_forced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_network("lfm2", tmp_path)
    model = load_policy(str(tmp_path))
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        check = packing_of(model.train())
        assert packing_of(SimpleNamespace(module=model)) is check
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    assert (check.choice, check.leak > 0.01, check.padding < 1e-5) == ("padded", True, True)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "Lfm2ForCausalLM: rows are padded, not packed: packed, they change one another by "
    )
    assert "conv" in caplog.messages[0]
    assert choose_layout(model, "auto", 100) == choose_layout(model, "padded", 100) == "padded"
    for forced in ("shared", "packed"):
        with pytest.raises(
            BadAttention, match=f"update.layout={forced} packs rows, and Lfm2ForCausalLM cannot .* update.layout=auto"
        ):
            choose_layout(model, forced, 100)
    batch = collate_tokens([TokenExample("a", ROWS[0], 1), TokenExample("b", ROWS[2], 1)], Layout("packed"))
    with pytest.raises(BadAttention, match=r"packed rows for Lfm2ForCausalLM: .*: set update.layout=auto"):
        target_scores(model, batch)


def test_policy_and_reference_have_to_be_able_to_take_the_layout(tmp_path: Path) -> None:
    for name in ("llama", "lfm2"):
        write_network(name, tmp_path / name)
    policy, reference = load_policy(str(tmp_path / "llama")), load_policy(str(tmp_path / "lfm2"))
    examples = [TokenExample("a", ROWS[0], 1)]

    def kind(layout: str, frozen: Any) -> str:
        config = root_config(TrainConfig, layout=layout)
        return make_layout(config, SimpleNamespace(reference=frozen), policy, longest_of(examples), 0).kind

    assert (kind("auto", None), kind("packed", None), kind("padded", None)) == ("shared", "packed", "padded")
    assert kind("auto", reference) == "padded"
    with pytest.raises(BadAttention, match="Lfm2ForCausalLM"):
        kind("shared", reference)


def test_a_head_of_zeros_hides_no_leak(tmp_path: Path) -> None:
    write_network("qwen3_next", tmp_path)
    model = load_process_reward(str(tmp_path), 1)
    assert not model(input_ids=torch.tensor([[5, 6]])).logits.any()
    assert packing_of(model).choice == "padded"
    assert packing_of(load_critic(str(tmp_path), "scratch")).choice == "padded"


def mixing(path: Path) -> Any:
    """A network in which every token sees the mean of its whole batch: rows are right alone and in no other way."""
    model = load_policy(str(path)).eval()
    layer = model.base_model.layers[0]
    layer.register_forward_hook(lambda module, given, output: output + output.mean(dim=(0, 1)))
    return model


def test_rows_that_padding_changes_are_computed_one_at_a_time(tiny_policy: Path) -> None:
    model, examples = mixing(tiny_policy), [TokenExample(str(k), row, 1) for k, row in enumerate(ROWS)]
    assert packing_of(model).choice == "alone"
    assert packing_of(model).reason.startswith("padded, they differ from rows alone (by ")
    alone = [model(input_ids=torch.tensor([row])).logits[0] for row in ROWS]
    logs = [torch.log_softmax(one[:-1], -1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            for one, row in zip(alone, ROWS, strict=True)]  # fmt: skip
    layout = Layout(choose_layout(model, "auto", 8))
    batch = collate_tokens(examples[::-1], layout)
    scores = target_scores(model, batch)
    torch.testing.assert_close(scores.logprobs, torch.cat(logs[::-1]), rtol=0, atol=1e-5)
    loss = SupervisedFineTuning().loss(model, batch).total
    loss.backward()
    mine = model.lm_head.weight.grad.clone()
    model.zero_grad()
    (-torch.cat(logs).sum()).backward()
    torch.testing.assert_close(mine, model.lm_head.weight.grad, rtol=1e-4, atol=1e-5)

    ids, mask, wanted = pad_rows(ROWS, [1, 1, 1], 0)
    found, _ = response_logprobs(model, ids, mask, response_mask=wanted)
    logits = all_logits(model, {"input_ids": ids, "attention_mask": mask})
    for row, (want, one) in enumerate(zip(logs, alone, strict=True)):
        torch.testing.assert_close(found[row, : len(want)], want, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[row, : len(one)], one, rtol=0, atol=1e-5)
        assert not logits[row, len(one) :].any()


def test_scalar_heads_are_read_one_row_at_a_time_too(tiny_policy: Path) -> None:
    model = load_critic(str(tiny_policy), "policy").eval()
    model.base_model.layers[0].register_forward_hook(lambda module, given, output: output + output.mean(dim=(0, 1)))
    want = [model(input_ids=torch.tensor([row])).logits[0, :, 0].detach() for row in ROWS]
    ids, mask, _ = pad_rows(ROWS, [1, 1, 1], 0)
    values = response_values(model, ids, mask)
    for row, one in enumerate(want):
        torch.testing.assert_close(values[row, : len(one) - 1], one[:-1], rtol=0, atol=1e-5)
    examples = [StepExample(str(k), row, [1, len(row) - 1], [0.0, 1.0]) for k, row in enumerate(ROWS)]
    objective = ProcessRewardObjective()
    loss = objective.loss(model, objective.collate(examples, Layout(choose_layout(model, "auto", 8)))).total
    by_hand = sum(float(torch.nn.functional.softplus(one[1]) + torch.nn.functional.softplus(-one[-1])) for one in want)
    assert float(loss.detach()) == pytest.approx(by_hand, abs=1e-4)
    with torch.inference_mode():
        for index, logits in (pair for batch in row_logits(model, ROWS, 0, 1000) for pair in batch):
            torch.testing.assert_close(logits[:, 0].float(), want[index], rtol=0, atol=0.05)  # bf16


def test_attention_that_is_not_the_networks_own_is_replaced_by_it(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours: Any = ALL_ATTENTION_FUNCTIONS["packed_eager"]
    right = ours.padded
    monkeypatch.setattr(
        ours, "padded", lambda module, query, *given, **named: right(module, 2 * query, *given, **named)
    )
    model = load_policy(str(tiny_policy), "eager")
    check = packing_of(model)
    assert check.choice == "padded"
    assert check.padding < 1e-5
    assert check.reason.startswith("it attends by the network's own eager function: by that of model.attention")
    assert model.config._attn_implementation == "eager"
    assert packing_of(model) is check
    assert caplog.messages == [f"LlamaForCausalLM: rows are padded, not packed: {check.reason}"]


def test_chunks_and_windows_that_layers_keep_to_themselves_are_found_by_short_rows(tmp_path: Path) -> None:
    write_network("llama4", tmp_path / "llama4")
    assert "attention in chunks of 32 tokens" in check_packing(load_policy(str(tmp_path / "llama4"))).reason
    write_network("mistral", tmp_path / "mistral")
    model = load_policy(str(tmp_path / "mistral"))
    model.config.sliding_window = 64  # longer than the rows of the check
    own = type(model.model.layers[0].self_attn)
    assert check_packing(model).choice == "packed"
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.config = type(model.config)(**{**model.config.to_dict(), "sliding_window": None})
        layer.self_attn.config._attn_implementation = model.config._attn_implementation
        assert inner.__func__ is own.forward
    assert "a sliding window of 64 tokens that its layers do not hand over" in check_packing(model).reason


def dynamic_network(folder: Path) -> Any:
    """A network of 64 positions whose rotary frequencies grow with its rows."""
    config = configuration("llama")
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return load_policy(str(folder)).eval()


@torch.no_grad()
def test_rotary_frequencies_that_stay_grown_after_a_long_row_are_refused_that_row(tmp_path: Path) -> None:
    """Rows of 30, 40 and 64 tokens equal each alone, together and before and after a row of 65 that is refused."""
    model = dynamic_network(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    draw = random.Random(0)
    rows = [[draw.randrange(2, 90) for _ in range(size)] for size in (30, 40, 64, 65)]
    want = [plain(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    grown = plain(input_ids=torch.tensor([rows[2]]), use_cache=False).logits[0]
    assert float((grown - want[2]).abs().max()) > 1e-3  # transformers keeps what the row of 65 has made
    check = packing_of(model)
    assert (check.choice, check.max_length, check.refuses_longer) == ("packed", 64, True)
    ids, mask, _ = pad_rows(rows, [0] * 4, 0)
    calls: list[Any] = [
        lambda: all_logits(model, {"input_ids": ids, "attention_mask": mask}),
        lambda: all_logits(model, {"input_ids": ids[3:], "attention_mask": mask[3:]}),
        lambda: response_logprobs(model, ids, mask),
        lambda: response_logprobs(model, ids[3:], mask[3:]),
        lambda: list(row_logits(model, rows, 0, 1000)),
        lambda: choose_layout(model, "auto", 65),
    ]
    for call in calls:
        with pytest.raises(BadInput, match="a row of 65 tokens for a network of 64 positions"):
            call()
    trajectory = Trajectory("p/7", "p", "", "a", ["a"], rows[3][:1], rows[3][1:], [64], "stop", "", None, False)
    with pytest.raises(BadInput, match=r"trajectory 'p/7': a row of 65 tokens for a network of 64 positions"):
        score_trajectories(model, [trajectory], pad_id=0)
    check_window(model, 64)
    for window in (65, None):
        with pytest.raises(BadConfig, match=r"server\.max_model_len=64"):
            check_window(model, window)
    few = (ids[:3, :64], mask[:3, :64])
    padded = all_logits(model, {"input_ids": few[0], "attention_mask": few[1]})
    found, _ = response_logprobs(model, *few)
    for row, truth in enumerate(want[:3]):
        size = len(truth)
        torch.testing.assert_close(padded[row, :size], truth, rtol=0, atol=1e-4)
        logs = torch.log_softmax(truth[:-1], -1).gather(1, ids[row, 1:size, None])[:, 0]
        torch.testing.assert_close(found[row, : size - 1], logs, rtol=0, atol=1e-4)


def test_states_that_are_no_numbers_and_cut_weights_that_take_rows_one_at_a_time(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
        assert check_packing(model).choice == "packed"  # the head is no part of the body
        model.model.norm.weight.fill_(float("nan"))
    assert check_packing(model).reason == "its hidden states are not numbers"
    model.lm_head.weight.ds_id = 7
    model._packing = (model.config._attn_implementation, PackingCheck("alone", reason="so"))
    with pytest.raises(BadAttention, match=r"one at a time \(so\), which ZeRO-3 cannot: set deepspeed=zero2"):
        choose_layout(model, "auto", 5)
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    with pytest.raises(BadAttention, match="ranks would make unequal numbers of passes with ZeRO-3"):
        one_by_one(model, inputs)
    taking_turns = CutNetwork(model, CutNetworks({}))  # where they may
    assert [row["input_ids"].tolist() for row in one_by_one(taking_turns, inputs)] == [[[5, 6, 7]], [[5, 6]]]


def test_logits_that_are_more_than_the_head_are_seen_by_the_networks_own_answer(tmp_path: Path) -> None:
    """Falcon-H1 multiplies them by a number of its own."""
    assert configuration("falcon_h1").lm_head_multiplier == 0.5
    write_network("falcon_h1", tmp_path)
    model = load_policy(str(tmp_path)).eval()
    assert not packing_of(model).is_head_last
    row = token_rows()[0]
    with torch.no_grad():
        found, _ = response_logprobs(model, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))
        want = torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0, :-1], -1)
    torch.testing.assert_close(found[0], want.gather(1, torch.tensor(row[1:])[:, None])[:, 0], rtol=0, atol=1e-5)


def test_rounding_of_a_deep_network_is_no_leak(tmp_path: Path) -> None:
    """In float32 and in bf16, which the check allows for by what the last bit of the embeddings does."""
    config = configuration("llama")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 24, 128, 256
    torch.manual_seed(0)
    for kind in (torch.float32, torch.bfloat16):
        for name in ("packed_sdpa", "packed_eager"):
            model = LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=kind)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            check = check_packing(model)
            assert check.choice == "packed", (kind, name, check)


def test_packed_rows_of_a_forced_layout_are_those_that_are_asked_for(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy))
    draw = random.Random(0)
    rows = [[draw.randrange(5, 60) for _ in range(size)] for size in (9, 4)]
    for layout in ("packed", "shared"):
        placed = place_rows(rows, Layout(choose_layout(model, layout, 9)))
        assert model(**model_inputs(placed)).logits.shape[:2] == (1, 64)  # 13 tokens, rounded up
