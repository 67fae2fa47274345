"""The memory plan of a rank: every part by hand on a small decoder, and on networks that are built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from espalier.data.batches.packing import Layout, place_rows
from espalier.data.records import BadInput
from espalier.models.load import load_policy
from espalier.models.logprobs import response_logprobs
from espalier.models.token_scores import LEAST_TOKENS
from espalier.rl.memory_of_run import rl_setup
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig, TrainConfig
from espalier.training.memory_of_run import (
    MicroBatch,
    NoPlan,
    changes,
    check_memory_plan,
    cutting_of,
    explain_memory,
    network_of,
    shape_of,
    smallest_change,
    train_setup,
    with_adapters,
)
from espalier.training.memory_plan import (
    Network,
    Setup,
    Shape,
    Work,
    activation_bytes,
    memory_plan,
    score_bytes,
    work_of,
)

# 100 x 8 embedding, as large a head; 2 layers of 4 x 64 attention (2 heads of 4), 3 x 8 x 20 MLP and two norms
P = 2 * 800 + 2 * (4 * 64 + 480 + 16) + 8
SHAPE = Shape(P, layers=2, hidden=8, heads=2, kv_heads=2, head_size=4, mlp=20, vocabulary=100, looked_up=800)
FOUR = MicroBatch(4)
FP32 = Setup((Network(SHAPE, P),), Work(tokens=10, reads=9), is_bf16=False, max_scores=500)


def parts(setup: Setup, name: str) -> dict[str, int]:
    (found,) = [phase for phase in memory_plan(setup).phases if phase.name == name]
    return found.parts


def test_one_process_in_float32_by_hand() -> None:
    # of a token in a layer: 2 x 4 x 8 norms, 2 x 4 x 8 what they give, 5 x 4 x 8 attention, 4 x 4 x 20 the MLP
    layer = 64 + 64 + 160 + 320
    activations = 10 * 2 * layer + 4 * 10 * 8 + 4 * 9 * 8  # and the last norm's
    assert activation_bytes(SHAPE, FP32) == activations
    held = {"weights": 4 * P, "moments": 8 * P}
    assert parts(FP32, "between steps") == held
    assert parts(FP32, "backward pass") == held | {
        "activations": activations,
        "scores": 8 * 500,  # 9 x 100 are more than 500
        "gradients": 4 * P + 4 * 800,  # those of earlier passes, and the head's on its way
    }
    assert parts(FP32, "optimizer step") == held | {"gradients": 4 * P + 4 * 800}
    only = replace(FP32, work=replace(FP32.work, passes=1))
    assert parts(only, "backward pass")["gradients"] == 4 * 800
    assert parts(only, "optimizer step")["gradients"] == 4 * P


def test_bf16_keeps_copies_of_what_is_multiplied_and_half_of_most_activations() -> None:
    bf16 = replace(FP32, is_bf16=True)
    found = parts(bf16, "backward pass")
    assert found["copies to compute with"] == 2 * (P - 800)
    assert found["activations"] == 10 * 2 * (64 + 32 + 80 + 160) + 4 * 10 * 8 + 2 * 9 * 8
    assert found["scores"] == 4 * 500


def test_a_last_layer_that_is_read_at_few_tokens_and_keys_behind_a_shared_prompt() -> None:
    few = replace(FP32, work=Work(tokens=10, reads=5, copied_keys=7))
    attention, behind = 10 * (32 + 32 + 160) + 2 * 4 * 8 * 7, 10 * (32 + 32 + 320)
    assert activation_bytes(SHAPE, few) == 2 * attention + int(1.5 * behind) + 4 * 10 * 8 + 4 * 5 * 8
    eager = replace(FP32, is_eager=True, work=Work(tokens=10, reads=9, pairs=100))
    assert activation_bytes(SHAPE, eager) == activation_bytes(SHAPE, FP32) + 2 * 4 * 2 * 100
    checkpointed = replace(FP32, recomputes="full")
    assert activation_bytes(SHAPE, checkpointed) == 10 * 2 * 32 + 10 * 608 + 4 * 10 * 8 + 4 * 9 * 8
    products = 10 * (32 + 4 * (16 + 16)), 10 * 4 * (16 + 40)  # of 8 queries and keys, of 20 in the MLP
    again = 10 * 608 - sum(products)
    selective = replace(FP32, recomputes="selective")
    assert activation_bytes(SHAPE, selective) == 2 * sum(products) + again + 4 * 10 * 8 + 4 * 9 * 8


def test_zero_cuts_what_its_stage_cuts() -> None:
    cut = replace(FP32, has_deepspeed=True, ranks=4, bucket=1000, stage=2)
    moments, second, own = 2 * P, P, P  # 8 P, 4 P and 4 P over 4 ranks
    two = {"weights": 4 * P, "moments": moments, "second copy of weights": second}
    assert parts(cut, "between steps") == two
    assert parts(cut, "backward pass")["gradients"] == own + 3200
    assert (parts(cut, "backward pass")["buckets"], "scores" in parts(cut, "backward pass")) == (4000, False)
    one = replace(cut, stage=1)
    assert parts(one, "backward pass")["gradients"] == 4 * P + 3200
    three = replace(cut, stage=3, live=500, prefetch=300)
    held = {"weights": own, "moments": moments, "second copy of weights": second, "gradients": own, "buckets": 4000}
    assert parts(three, "between steps") == held
    assert parts(three, "backward pass")["gathered weights"] == 4 * 500 + 4 * 300
    assert parts(three, "backward pass")["scores"] == 8 * 500 - 4 * 300
    assert parts(three, "optimizer step")["gradients"] == own + 4 * 1000 + 2 * own
    away = replace(cut, offloads_optimizer=True)
    assert parts(away, "between steps") == {"weights": 4 * P}
    assert memory_plan(away).host == {"moments": moments, "second copy of weights": second, "gradients": own}
    whole = replace(three, offloads_optimizer=True, offloads_weights=True)
    assert parts(whole, "between steps") == {"buckets": 4000}
    assert memory_plan(whole).host["weights"] == own


def test_learners_take_turns_and_what_is_read_lies_beside_them() -> None:
    both = replace(FP32, networks=(FP32.networks[0], Network(replace(SHAPE, outputs=1), P)), frozen=50,
                   reference=replace(SHAPE, parameters=20), ranks=2, delivered=30, buffers=77, averaged=20)  # fmt: skip
    assert parts(both, "between steps") == {"frozen networks": 200 + 80, "weights": 8 * P, "moments": 16 * P}
    assert len(memory_plan(both).phases) == 5
    assert parts(both, "backward pass")["gradients"] == 4 * P + 3200  # the policy's: a scalar head has no scores
    assert parts(both, "delivery")["merged weight"] == 120
    assert parts(both, "delivery")["delivery buffers"] == 77
    proof = {**parts(both, "delivery"), "weight with noise": 3200}  # the embedding, 100 x 8
    assert parts(both, "start-up proof") == proof
    cut = replace(both, has_deepspeed=True, stage=3)
    assert parts(cut, "start-up proof")["weight with noise"] == 3200
    assert memory_plan(both).host == {"moving average": 80}


def test_a_reference_lies_where_it_is_read_and_where_zero_cuts_it() -> None:
    """400 of its numbers are looked up."""
    own = replace(SHAPE, parameters=1600, vocabulary=50)
    beside = replace(FP32, reference=own, is_start=True)
    assert parts(beside, "between steps")["frozen networks"] == 6400
    assert parts(replace(beside, is_bf16=True), "between steps")["frozen networks"] == 4 * 400 + 2 * 1200
    first = replace(beside, is_asked_first=True)
    assert "frozen networks" not in parts(first, "backward pass")
    asked = parts(first, "reference's pass")
    assert asked == {"frozen networks": 6400, "weights": 4 * P, "moments": 8 * P}, "as of a run that goes on"
    wide = parts(replace(first, work=Work(tokens=900, reads=900), max_scores=10**6), "reference's pass")
    assert wide == {"frozen networks": 6400, "weights": 4 * P, "scores": 4 * 900 * 50}
    begun = parts(
        replace(first, has_deepspeed=True, stage=2, work=Work(900, 900), max_scores=10**6), "reference's pass"
    )
    assert begun["moments"] == 8 * P, "DeepSpeed has them from the start"
    assert "scores" in begun
    cut = replace(beside, has_deepspeed=True, stage=3, ranks=4)
    assert parts(cut, "between steps")["frozen networks"] == 1600
    assert parts(replace(cut, is_bf16=True), "between steps")["frozen networks"] == 1000
    outside = replace(cut, offloads_optimizer=True, offloads_weights=True)
    assert "frozen networks" not in parts(outside, "between steps")
    assert memory_plan(outside).host["frozen networks"] == 1600
    assert "frozen networks" not in parts(with_adapters(beside), "between steps")
    assert parts(with_adapters(replace(beside, is_start=False)), "between steps")["frozen networks"] == 6400


@pytest.mark.parametrize(("how", "num_read", "is_first"), [
    ("auto", 2.0, True), ("auto", 1.0, False), ("online", 2.0, False), ("precomputed", 1.0, True),
])  # fmt: skip
def test_a_reference_is_asked_first_where_the_training_asks_it_so(
    how: str, num_read: float, is_first: bool, tiny_policy: Path
) -> None:
    words = [f"model.path={tiny_policy}", "examples.path=pairs.jsonl", "output_dir=o", f"reference_logprobs={how}"]
    config = compose_config(TrainConfig, "exp/dpo/word_arithmetic", words)
    setup = train_setup(config, Work(10, 9), 1, num_read, is_gpu=True)
    assert setup.is_asked_first == is_first
    assert setup.reference == setup.networks[0].shape
    assert setup.is_start
    names = [phase.name for phase in memory_plan(setup).phases]
    assert ("reference's pass" in names) == is_first


def test_remedies_are_held_against_the_run_that_they_make() -> None:
    """A reference is cut by ZeRO-3 too; with adapters an engine gets merged weights, one by one."""
    run = replace(FP32, reference=SHAPE, is_start=True, ranks=8, bucket=10, live=10, prefetch=10)
    zero3 = next(change.setup for change in changes(run, FOUR) if change.setting == "deepspeed=zero3")
    assert parts(zero3, "between steps")["frozen networks"] == -(-4 * P // 8)
    served = replace(run, buffers=8)
    assert parts(with_adapters(served, rank=2), "delivery")["merged weight"] == 4 * 2 * 8 * 20
    assert "merged weight" not in parts(with_adapters(zero3, rank=2), "between steps")
    sent = next(change.setup for change in changes(replace(served, delivered=P), FOUR)
                if change.setting == "deepspeed=zero3")  # fmt: skip
    assert parts(sent, "delivery")["delivery buffers"] == 8 + 3200
    assert "merged weight" not in parts(sent, "delivery")
    read = replace(served, frozen=P)
    assert parts(with_adapters(read), "between steps")["frozen networks"] == 4 * P


def test_adapters_have_the_only_gradients() -> None:
    adapted = with_adapters(FP32, rank=2)
    # per layer: 4 x 2 (8 + 8) attention, 3 x 2 (8 + 20) MLP
    assert adapted.networks[0].trained == 2 * (4 * 32 + 3 * 56) == 592
    assert parts(adapted, "between steps") == {"weights": 4 * (P + 592), "moments": 8 * 592}
    assert parts(adapted, "backward pass")["gradients"] == 4 * 592


def test_rows_as_they_are_placed_are_the_work() -> None:
    prompt = list(range(20))
    shared = place_rows([[*prompt, 50, 51], [*prompt, 60, 61, 62]], Layout("shared"))
    # one prompt of 20, answers of 2 and 3: their keys are 22 and 23
    assert work_of(shared, 5, 3) == Work(25, 5, copied_keys=45, pairs=400 + 2 * 22 + 3 * 23, passes=3)
    padded = place_rows([[1, 2, 3], [4]], Layout("padded"))
    assert work_of(padded, 2, 1) == Work(6, 2, pairs=18, passes=1)


@pytest.mark.parametrize(("is_bf16", "attention"), [(False, "sdpa"), (True, "sdpa"), (False, "eager")])
def test_activations_are_those_that_autograd_keeps(tiny_policy: Path, is_bf16: bool, attention: str) -> None:
    """Every tensor that a forward pass saves, each storage once and no weight."""
    model = load_policy(str(tiny_policy), attention)
    model.train()
    ids = torch.randint(5, 200, (4, 160), generator=torch.Generator().manual_seed(0))
    read = torch.ones_like(ids, dtype=torch.bool)
    read[:, :8] = False
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
        torch.autocast("cpu", torch.bfloat16, enabled=is_bf16),
    ):
        response_logprobs(model, ids, torch.ones_like(ids), 1.0, read)
    shape = network_of(str(tiny_policy)).shape
    head = {(shape.vocabulary, shape.hidden)}
    sizes = {at: value for at, value in kept.items() if at not in own}
    weights = {tuple(value.shape) for value in model.parameters() if value.dim() == 2} | head
    found = sum(value.untyped_storage().nbytes() for value in sizes.values() if tuple(value.shape) not in weights)
    found -= 4 * shape.vocabulary * 4 * 152  # the softmax of the only chunk, which is among the scores
    work = Work(4 * 160, 4 * 152, pairs=4 * 160 * 160)
    planned = activation_bytes(shape, replace(FP32, work=work, is_bf16=is_bf16, is_eager=attention == "eager"))
    assert planned == pytest.approx(found, rel=0.06)


def test_parameters_are_counted_as_the_network_has_them(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy))
    found = network_of(str(tiny_policy))
    assert found.trained == found.shape.parameters == model.num_parameters()
    scalar = network_of(str(tiny_policy), 1)
    head = model.config.hidden_size * model.config.vocab_size
    tied = model.config.tie_word_embeddings
    assert scalar.shape.parameters == model.num_parameters() - (0 if tied else head) + model.config.hidden_size + 1
    assert scalar.shape.is_scalar
    lora = {"_target_": "espalier.models.lora.Lora", "rank": 2}
    adapted = network_of(str(tiny_policy), lora=lora)
    assert adapted.trained == adapted.shape.parameters - model.num_parameters()
    assert adapted.trained == with_adapters(replace(FP32, networks=(found,)), 2).networks[0].trained
    with pytest.raises(NoPlan, match="a base in 4 bits"):
        network_of(str(tiny_policy), lora=lora | {"bits": 4})


def test_what_does_not_fit_is_refused_with_the_smallest_change_that_does() -> None:
    large = replace(FP32, work=Work(tokens=4000, reads=3600), ranks=2)
    peak = memory_plan(large).peak.bytes
    assert check_memory_plan(large, FOUR, peak).peak.bytes == peak
    assert smallest_change(large, FOUR, peak - 1) == ["precision=bf16"]
    slow = smallest_change(replace(large, is_bf16_fast=False), FOUR, peak - 1)
    assert slow, "another remedy"
    assert "precision=bf16" not in slow
    in_bf16 = replace(large, is_bf16=True)
    with pytest.raises(
        BadInput, match=r"a rank needs .* in the backward pass .*: set model\.gradient_checkpointing=selective$"
    ):
        check_memory_plan(in_bf16, FOUR, memory_plan(in_bf16).peak.bytes - 1)
    checked = replace(in_bf16, recomputes="full")
    assert smallest_change(checked, FOUR, memory_plan(checked).peak.bytes - 1) == ["update.micro_batch_size=2"]
    tight = memory_plan(replace(checked, work=replace(checked.work, tokens=1000, reads=900))).peak.bytes
    assert smallest_change(in_bf16, FOUR, tight) == ["model.gradient_checkpointing=true", "update.micro_batch_size=1"]
    with pytest.raises(BadInput, match="take more ranks, a larger device or a smaller network"):
        check_memory_plan(in_bf16, FOUR, 100)
    names = [change.setting for change in changes(replace(in_bf16, recomputes="full"), MicroBatch(1))]
    assert names == [f"deepspeed={name}" for name in ("zero2", "zero3", "zero2_offload", "zero3_offload")]


@pytest.mark.parametrize("name", ["none", "zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload",
                                  "zero3_offload"])  # fmt: skip
def test_every_engine_is_read_off_its_json(name: str, tiny_policy: Path) -> None:
    given = [f"model.path={tiny_policy}", "output_dir=o", f"deepspeed={name}", "kl.coefficient=0.1", "critic=scratch",
             "advantage=gae", "ema.decay=0.9"]  # fmt: skip
    setup = rl_setup(compose_config(RLConfig, "rl", given), 2, is_gpu=True)
    assert setup.has_deepspeed == (name != "none")
    assert setup.offloads_optimizer == name.endswith("offload")
    if name[4:5] in ("1", "2", "3"):
        assert setup.stage == int(name[4])
        assert setup.bucket == 50_000_000
    own = setup.networks[0].shape
    assert setup.reference == own
    in_halves = (own.parameters + own.vocabulary * own.hidden) // 2 if setup.is_bf16 else own.parameters
    held = memory_plan(setup).phases[0].parts.get("frozen networks", 0)
    assert held == {"none": 4 * in_halves, "zero3": 2 * in_halves, "zero3_offload": 0}.get(name, held)
    assert len(setup.networks) == 2
    assert memory_plan(setup).host["moving average"] > 0


def test_a_network_without_a_plan_is_named_and_refused_where_a_limit_is_stated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def none(_: bool) -> Setup:
        raise NoPlan("no memory plan of a mamba network")

    assert explain_memory(none, FOUR, 0.0) is None
    assert "memory: no memory plan of a mamba network" in caplog.text
    with pytest.raises(BadInput, match=r"stage\.memory_gib=8 cannot be compared"):
        explain_memory(none, FOUR, 8.0)
    assert explain_memory(lambda _: FP32, FOUR, 0.0) is not None
    assert "no limit is known" in caplog.text


def test_offloading_is_read_off_deepspeeds_own_keys() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 7, "reduce_bucket_size": 5}
    found = cutting_of({"zero_optimization": zero}, 3, is_gpu=False)
    assert (found["stage"], found["ranks"], found["live"], found["bucket"]) == (3, 3, 7, 5)
    assert (found["offloads_weights"], found["offloads_optimizer"]) == (True, False)
    assert (found["max_scores"], found["least_scored"], found["is_gpu"]) == (2**22, LEAST_TOKENS, False)


def test_scores_stand_for_some_tokens_at_a_time_however_large_the_vocabulary() -> None:
    run = replace(FP32, work=Work(tokens=1000, reads=900), max_scores=30 * SHAPE.vocabulary)
    assert score_bytes(SHAPE, run) == 8 * 30 * SHAPE.vocabulary
    assert score_bytes(SHAPE, replace(run, least_scored=256)) == 8 * 256 * SHAPE.vocabulary
    assert score_bytes(SHAPE, replace(run, work=Work(tokens=100, reads=90), least_scored=256)) == (
        8 * 90 * SHAPE.vocabulary
    )
    on_cpu = replace(run, is_gpu=False)  # a gradient is written over logits that were computed for it
    assert score_bytes(SHAPE, on_cpu) == 4 * 30 * SHAPE.vocabulary
    assert score_bytes(SHAPE, replace(on_cpu, max_scores=900 * SHAPE.vocabulary)) == 8 * 900 * SHAPE.vocabulary


def test_a_budget_of_tokens_is_lowered_in_place_of_rows_which_it_overrides() -> None:
    run = replace(FP32, work=Work(tokens=4000, reads=3600), is_bf16=True, recomputes="full", ranks=2)
    below = memory_plan(run).peak.bytes - 1
    assert smallest_change(run, MicroBatch(4000, True, 900), below) == ["update.micro_batch_tokens=2000"]
    names = [change.setting for change in changes(run, MicroBatch(4000, True, 900))]
    assert names[:3] == ["update.micro_batch_tokens=2000", "update.micro_batch_tokens=1000", "deepspeed=zero2"]
    few = replace(run, work=Work(tokens=1000, reads=900))
    assert next(changes(few, MicroBatch(4000, True))).setup.work.tokens == 1000


def test_a_row_longer_than_the_budget_of_tokens_is_planned_whole(tiny_policy: Path) -> None:
    given = [f"model.path={tiny_policy}", "output_dir=o", "update.micro_batch_tokens=100"]  # of 512
    work = rl_setup(compose_config(RLConfig, "rl", [*given, "params.max_tokens=256"]), 1, is_gpu=True).work
    assert (work.tokens, work.reads) == (512, 256)


@pytest.mark.parametrize(("given", "tokens"), [
    ("client=data_parallel_engines server=none client.max_model_len=300", 300),
    ("client=data_parallel_engines server=none +client.options.max_model_len=200", 200),
    ("+server.options.max-model-len=400", 400),
    ("+server.options.max_model_len=auto", 512),  # the positions of the policy
])  # fmt: skip
def test_rows_are_planned_as_long_as_the_engines_own_options_let_them_be(
    given: str, tokens: int, tiny_policy: Path
) -> None:
    words = [f"model.path={tiny_policy}", "output_dir=o", "update.micro_batch_size=1", *given.split()]
    assert rl_setup(compose_config(RLConfig, "rl", words), 1, is_gpu=True).work.tokens == tokens


def test_whole_distributions_of_two_networks_have_no_plan(tiny_policy: Path) -> None:
    words = [f"model.path={tiny_policy}", "output_dir=o", "kl.coefficient=0.1", "kl.kind=full"]
    with pytest.raises(NoPlan, match=r"no memory plan of kl\.kind=full"):
        rl_setup(compose_config(RLConfig, "rl", words), 1, is_gpu=True)


def test_experts_of_any_name_have_no_plan() -> None:
    from transformers import Dots1Config

    with pytest.raises(NoPlan, match="a mixture of experts"):
        shape_of(Dots1Config(n_routed_experts=8), 1)
