"""What an experiment amounts to: every number by hand, and against the run's own loader and schedule."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.checks.plan_gpu import PlanGpu
from espalier.data.batches.loader import Loader
from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.examples.token_examples import OutcomeExample, PairExample, TokenExample, example_length
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Demonstration, PreferencePair
from espalier.models.load import load_tokenizer
from espalier.pipeline.stage import run_stage
from espalier.runtime import entrypoint
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.schemas import StageConfig
from espalier.training import explain as explain_module
from espalier.training import loop_from_config, memory_of_run
from espalier.training.explain import Explain, describe, experiment_config, rows_of, warn_of_training_memory
from espalier.training.loop_from_config import load_data, make_loop

Run = Callable[..., dict[str, Any]]


class Context:
    """Where a stage counts."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}


@pytest.fixture
def explain(tiny_policy: Path, tmp_path: Path) -> Run:
    """Runs the stage on 10 demonstrations, one too long: `explain("train", "update.batch_size=4", ...)`."""
    rows = [Demonstration(f"d{i}", "12 + 7?", " 19" + " and" * i) for i in range(9)]
    write_records(tmp_path / "train.jsonl", [*rows, Demonstration("long", "1", "2" * 200)])
    pair = PreferencePair("p0", "q", "outcome", "Q", "a", "b", [5, 6, 7], [8, 9], [10, 11, 12, 13], 1.0, 0.0)
    write_records(tmp_path / "pairs.jsonl", [pair])

    def run(name: str, *overrides: str, num_ranks: int = 1, data: str = "train", **settings: Any) -> dict[str, Any]:
        files = [f"model.path={tiny_policy}", f"examples.path={tmp_path}/{data}.jsonl", "examples.max_length=60"]
        return Explain(name, [*files, *overrides], num_ranks, **settings).run("", Context())

    return run


def test_batches_ranks_steps_and_epochs_by_hand(explain: Run) -> None:
    found = explain("train", "update.batch_size=4", "update.micro_batch_size=1", "num_epochs=3", num_ranks=2)
    assert found["batch"] == {
        "examples_per_step": 4, "ranks": 2, "micro_batches_per_rank_and_step": 2, "examples_per_micro_batch": 1,
        "tokens_per_micro_batch": None,
    }  # fmt: skip
    steps = found["steps"]
    assert (steps["steps"], steps["why"]) == (7, "ceil(9 examples x 3 epochs / 4)")
    assert (steps["examples_seen"], steps["epochs"]) == (28, round(28 / 9, 4))
    assert found["tokens"]["padding_share_of_padded_batches"] == 0.0, "one example a micro-batch"


def test_a_budget_of_tokens_and_a_layout(explain: Run) -> None:
    found = explain("train", "update.batch_size=9", "update.micro_batch_tokens=60", "max_steps=1")
    assert found["batch"]["tokens_per_micro_batch"] == 60
    assert found["batch"]["micro_batches_per_rank_and_step"] >= found["tokens"]["tokens"] / 60
    assert 0.5 < found["tokens"]["computed_share"] < 1, "completions begin alike"
    packed = explain(
        "train", "update.batch_size=9", "max_steps=1", "update.micro_batch_size=9", "update.layout=packed"
    )["tokens"]
    assert packed["computed_share"] == 1
    padded = explain(
        "train", "update.batch_size=9", "update.micro_batch_size=9", "max_steps=1", "update.layout=padded"
    )["tokens"]
    assert padded["computed_share"] == pytest.approx(padded["largest_padded_micro_batch"] / padded["tokens"], abs=1e-4)
    assert "update.layout=padded computes" in "\n".join(describe({**found, "tokens": padded}))


def test_the_warm_up_and_the_learning_rate(explain: Run) -> None:
    settings = [
        "update.batch_size=3",
        "update.micro_batch_size=3",
        "max_steps=20",
        "update.learning_rate=0.4",
        "update.schedule=linear",
    ]
    steps = explain("train", *settings, "update.warmup_share=0.2")["steps"]
    assert (steps["steps"], steps["why"], steps["warmup_steps"]) == (20, "max_steps=20", 4)
    assert steps["learning_rate"] == pytest.approx({"first": 0.1, "highest": 0.4, "last": 0.4 / 16})
    found = explain("train", *settings, "update.warmup_steps=50")
    assert "50 warm-up steps from 0.008 to 0.16, which the run does not get through" in "\n".join(describe(found))


def test_evaluations_and_checkpoints_are_those_of_the_loop(explain: Run, tmp_path: Path) -> None:
    settings = [
        "update.batch_size=3",
        "update.micro_batch_size=3",
        "max_steps=20",
        "evaluation.every=6",
        "checkpoints.save_every=5",
    ]
    evaluation = ["+examples@eval_examples=demonstrations", f"eval_examples.path={tmp_path}/train.jsonl"]
    found = explain("train", *settings, *evaluation)
    assert found["evaluations"] == {"evaluations": 4, "at_steps": [6, 12, 18, 20], "examples_each": 10}
    assert found["checkpoints"]["at_steps"] == [5, 10, 15]
    assert found["eval_examples"]["kept"] == 10
    assert explain("train", *settings)["evaluations"]["evaluations"] == 0


def test_what_is_left_out_is_told_with_its_reason(explain: Run) -> None:
    part = explain("train", "update.batch_size=3", "update.micro_batch_size=3")["examples"]
    assert part["kept"] == 9
    assert [(row["reason"], row["number"], row["total"]) for row in part["left_out"]] == [
        ("are longer than 60 tokens", 1, 10)
    ]
    found = explain("train", "update.batch_size=3", "update.micro_batch_size=3", "examples.min_completion_tokens=4")[
        "examples"
    ]
    assert found["left_out"][0]["reason"] == "are shorter than 4 tokens"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_and_padding_are_those_of_the_loaders_own_batches(
    num_ranks: int, explain: Run, tiny_policy: Path, tmp_path: Path
) -> None:
    settings = ["update.batch_size=4", "update.micro_batch_size=2", "num_epochs=2", "seed=3"]
    found = explain("train", *settings, num_ranks=num_ranks)["tokens"]
    node = {
        "_target_": "espalier.data.examples.token_examples.DemonstrationExamples",
        "path": f"{tmp_path}/train.jsonl",
        "max_length": 60,
    }
    examples: list[TokenExample] = build(node).load(load_tokenizer(str(tiny_policy)))
    tokens = padded = read = 0
    for step in range(5):
        batch = sorted(Loader(examples, 4, 4, 3).step_examples(step), key=example_length)
        tokens += sum(len(e.ids) for e in batch)
        padded += 2 * max(len(e.ids) for e in batch[:2]) + 2 * max(len(e.ids) for e in batch[2:])
        read += sum(len(e.ids) - e.prompt_length for e in batch)
    assert (found["tokens"], found["tokens_that_the_loss_reads"], found["counted_steps"]) == (tokens, read, 5)
    assert 0 < found["padding_share_of_padded_batches"] == round(1 - tokens / padded, 4)


def test_a_long_run_is_scaled_up_from_its_first_steps(explain: Run) -> None:
    settings = ["update.batch_size=9", "update.micro_batch_size=9", "max_steps=200"]
    found = explain("train", *settings, max_counted_steps=10)["tokens"]
    assert found["counted_steps"] == 10
    assert found["tokens"] == 200 * found["tokens_per_step"]["mean"] == explain("train", *settings)["tokens"]["tokens"]


def test_a_pair_is_two_rows_with_their_prompt(explain: Run) -> None:
    found = explain("exp/dpo/word_arithmetic", "update.batch_size=1", "update.micro_batch_size=1", data="pairs")
    part = found["examples"]
    assert (part["kind"], part["tokens"], part["tokens_that_the_loss_reads"]) == ("PairExample", 5 + 7, 2 + 4)
    assert found["tokens"]["padding_share_of_padded_batches"] == round(1 - 12 / 14, 4)


def test_the_rows_of_unpaired_preferences_are_two_as_well() -> None:
    assert rows_of(OutcomeExample("o", [5, 6, 7], 1, 1.0, mismatched_ids=[8])) == [[5, 6, 7], [5, 8]]
    assert rows_of(PairExample("p", [1], [2], [3, 4])) == [[1, 2], [1, 3, 4]]


def test_a_reader_sees_every_part(explain: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    explain("train", "update.batch_size=4", "update.micro_batch_size=2", num_ranks=2)
    for line in (
        "examples: 9 kept (TokenExample), ",
        "examples: left out: 1 of 10 are longer than 60 tokens",
        "batch: 4 examples a step = 2 ranks x 1 micro-batches x 2 examples",
        "steps: 3 (ceil(9 examples x 1 epochs / 4)), 12 examples, 1.3333 epochs",
        "evaluations: 0",
        "% padding, the largest micro-batch takes ",
    ):
        assert line in caplog.text, line


def test_the_memory_of_a_rank_is_planned_and_a_run_that_needs_more_is_refused(
    explain: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = ["update.batch_size=4", "update.micro_batch_size=4", "precision=fp32"]
    found = explain("train", *settings, memory_gib=1.0)["memory"]
    assert found["bytes_per_rank"] == sum(found["phases"][found["fullest"]].values())
    assert found["limit_bytes"] == 2**30
    assert "memory: at most 0.0" in caplog.text
    little = found["bytes_per_rank"] * 0.99 / 2**30
    with pytest.raises(BadInput, match=r"a rank needs .* GiB in the .* has .*: set "):
        explain("train", *settings, memory_gib=little)
    with pytest.raises(BadInput, match=r"stage\.memory_gib must be at least 0"):
        Explain("train", memory_gib=-1.0)


def test_a_training_that_does_not_fit_the_gpu_that_is_here_is_warned_of_before_it_begins(
    explain: Run, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["update.batch_size=4", "update.micro_batch_size=4", "precision=fp32"]
    needed = explain("train", *settings, memory_gib=1.0)["memory"]["bytes_per_rank"]
    files = [f"model.path={tiny_policy}", f"examples.path={tmp_path}/train.jsonl", "examples.max_length=60"]
    config = experiment_config("train", [*files, *settings])
    examples, _ = load_data(config, load_tokenizer(config.model["path"]))
    for size, is_warned in ((0, False), (2 * needed, False), (needed // 2, True)):
        caplog.clear()
        monkeypatch.setattr(memory_of_run, "device_bytes", lambda size=size: size)
        warn_of_training_memory(config, examples, 1)
        assert ("by its memory plan this run does not fit: a rank needs" in caplog.text) == is_warned
    monkeypatch.setattr(explain_module, "train_setup", lambda *_, **__: 1 / 0)
    warn_of_training_memory(config, examples, 1)
    assert "no memory plan of this run: ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    monkeypatch.setattr(memory_of_run, "device_bytes", lambda: 1)
    warn_of_training_memory(experiment_config("train", [*files, "update.batch_size=3"]), examples, 2)
    assert "does not fit" not in caplog.text, "of a batch that ranks cannot share another line tells"


def test_a_training_asks_its_memory_plan_before_it_loads_a_network(
    explain: Run, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stop(*given: Any) -> None:
        asked.append(given[2])
        raise KeyboardInterrupt

    monkeypatch.setattr(loop_from_config, "warn_of_training_memory", stop)
    monkeypatch.setattr(loop_from_config, "make_model", lambda *_: pytest.fail("loaded"))
    files = [f"model.path={tiny_policy}", f"examples.path={tmp_path}/train.jsonl", "update.batch_size=4"]
    config, tokenizer = experiment_config("train", files), load_tokenizer(str(tiny_policy))
    with pytest.raises(KeyboardInterrupt):
        make_loop(config, tokenizer, *load_data(config, tokenizer))
    assert asked == [1]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ["update.batch_size=6", "update.micro_batch_size=4"],
            BadInput,
            "batch_size 6 is not a multiple of update.micro_batch_",
        ),
        (["model.path=/nowhere"], ValueError, "/nowhere: no such model folder"),
        (
            ["update.schedule=cosin", "update.batch_size=2", "update.micro_batch_size=2"],
            BadInput,
            "schedule must be one of",
        ),
    ],
)
def test_an_experiment_that_cannot_run_is_refused_in_its_own_words(
    overrides: list[str], error: type[Exception], message: str, explain: Run
) -> None:
    with pytest.raises(error, match=message):
        explain("train", *overrides)


def test_missing_values_are_named_and_overrides_may_be_one_text(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"exp/sft/word_arithmetic has no value for examples.path: give them as"):
        _ = Explain("exp/sft/word_arithmetic", "model.path=somewhere seed=3").config
    config = Explain("exp/sft/word_arithmetic", "model.path=somewhere examples.path='a b.jsonl' seed=3").config
    assert (config.examples["path"], config.seed, config.output_dir) == ("a b.jsonl", 3, "")
    with pytest.raises(BadConfig, match="is no TrainConfig: name another config of conf/exp"):
        _ = Explain("exp/ppo/grpo_word_arithmetic").config
    with pytest.raises(BadInput, match="must be at least 1, got 0 and 1000"):
        Explain("train", num_ranks=0)


def test_the_stage_writes_one_document_and_its_provenance(tiny_policy: Path, tmp_path: Path) -> None:
    rows = [JudgedResponse(f"j{i}", f"q{i}", "2 + 2?", " 4" * (1 + i), i % 2 == 0) for i in range(4)]
    write_records(tmp_path / "judged.jsonl", rows)
    overrides = [f"model.path={tiny_policy}", f"examples.path={tmp_path}/judged.jsonl", "update.batch_size=2",
                 "update.micro_batch_size=2", "examples=judged_responses", "objective=kto",
                 "examples.has_mismatched=true"]  # fmt: skip
    config = StageConfig(output=str(tmp_path / "explain.json"), stage={"_target_": "espalier.training.explain.Explain"})
    assert run_stage(Explain("train", overrides), None, config) == 0
    assert (tmp_path / "explain.json").is_file()
    meta = (tmp_path / "explain.meta.json").read_text()
    assert "judged.jsonl" in meta
    assert '"steps": 2' in meta


def test_a_document_about_a_run_is_not_taken_for_that_of_a_config_or_model_that_has_changed(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage's own settings name the experiment, whatever its file says by now."""
    conf, model = tmp_path / "conf", tmp_path / "model"
    shutil.copytree(entrypoint.CONF, conf)
    shutil.copytree(tiny_policy, model)
    monkeypatch.setattr(entrypoint, "CONF", conf)
    mine = conf / "exp" / "mine.yaml"
    mine.write_text("# @package _global_\ndefaults: [/rl, _self_]\nseed: 1\n")
    config = StageConfig(output=str(tmp_path / "plan.json"), stage={"_target_": "espalier.checks.plan_gpu.PlanGpu"})

    def plan() -> int:
        return run_stage(PlanGpu("exp/mine", f"model.path={model}", gpu_gib=24), None, config)

    assert plan() == plan() == 0
    was = mine.read_text()
    mine.write_text(was.replace("seed: 1", "seed: 2"))
    with pytest.raises(BadInput, match=r"plan.json was made otherwise \(its input the run's config has changed\)"):
        plan()
    mine.write_text(was)
    with (model / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(BadInput, match=r"plan.json was made otherwise \(its input .*/model has changed\)"):
        plan()
