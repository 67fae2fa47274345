"""The training benchmark: sides get the same data, ratios and peaks are what they say; TRL itself only if installed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.processes.sides import Side
from benchmarks.training import logprob_memory, score_passes, training
from benchmarks.training.corpus import Sizes, build, read_ids, tokens_of
from benchmarks.training.plain_loop import collate
from espalier.data.examples.step_examples import StepValueExamples
from espalier.data.examples.token_examples import DemonstrationExamples, PreferenceExamples
from espalier.models.load import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one."""
    folder = tmp_path_factory.mktemp("corpus")
    build(folder, Sizes(200, 20, 20))
    return folder


def test_demonstrations_have_8_to_512_tokens_about_200_on_average(corpus: Path) -> None:
    lengths = [tokens_of(row) for row in read_ids(corpus, "sft")]
    assert min(lengths) >= 8
    assert max(lengths) <= 512
    assert 180 < sum(lengths) / len(lengths) < 220


def test_a_shared_prefix_is_three_times_as_long_as_each_side(corpus: Path) -> None:
    for row in read_ids(corpus, "dpo"):
        length = len(row["chosen_ids"])
        assert len(row["rejected_ids"]) == length
        assert len(row["prompt_ids"]) == 3 * length


def test_trajectories_have_3_to_12_judged_steps(corpus: Path) -> None:
    for row in read_ids(corpus, "prm"):
        assert 3 <= sum(label >= 0 for label in row["labels"]) <= 12


def test_every_side_reads_the_same_ids_and_the_same_targets(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "policy"))
    rows = {kind: read_ids(corpus, kind) for kind in ("sft", "dpo", "prm")}
    for row, example in zip(
        rows["sft"], DemonstrationExamples(f"{corpus}/sft.jsonl", 1024).load(tokenizer), strict=True
    ):
        masked = [-100] * example.prompt_length + example.ids[example.prompt_length :]
        assert (row["input_ids"], row["labels"]) == (example.ids, masked)
    for row, pair in zip(rows["dpo"], PreferenceExamples(f"{corpus}/dpo.jsonl", 1024).load(tokenizer), strict=True):
        sides = (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
        assert (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) == sides
        assert tokenizer(row["prompt"] + row["chosen"]).input_ids == (pair.prompt_ids + pair.chosen_ids)[:-1]
    for row, steps in zip(rows["prm"], StepValueExamples(f"{corpus}/prm.jsonl", 1024).load(tokenizer), strict=True):
        judged = {place: float(label) for place, label in enumerate(row["labels"]) if label >= 0}
        assert row["input_ids"] == steps.ids
        assert judged == dict(zip(steps.positions, steps.values, strict=True))


def test_the_plain_loop_masks_prompts_and_padding() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    ids, labels, mask = collate(rows, pad_id=0)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert labels.tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_block_is_one_run_of_transformers_length_sorted_batches() -> None:
    lengths = torch.randint(8, 512, (3200,), generator=torch.Generator().manual_seed(0)).tolist()
    order = get_length_grouped_indices(lengths, batch_size=32, generator=torch.Generator().manual_seed(0))
    block = training.block_steps("sft", training.FULL) * 32
    assert block == 25 * 32
    sorted_ones = [lengths[index] for index in order[1:block]]  # the first place is the longest of all, swapped in
    falls = [place for place in range(len(sorted_ones) - 1) if sorted_ones[place] < sorted_ones[place + 1]]
    assert len(falls) <= 1
    assert lengths[order[block]] > sorted_ones[-1]


def test_a_ratio_is_of_tokens_per_second_and_dpo_as_it_comes_is_met_with_the_preparation_counted() -> None:
    rounds = [{"product": {"tokens": 100, "seconds": 1.0, "prepare_seconds": 1.0},
               "default": {"tokens": 100, "seconds": 4.0}, "best": {"tokens": 50, "seconds": 1.0}}]  # fmt: skip
    assert training.ratios("dpo", rounds, "best") == [2.0]
    assert training.ratios("dpo", rounds, "default") == [2.0]
    assert training.ratios("sft", rounds, "default") == [4.0]


def test_the_peak_of_an_allocator_is_the_most_bytes_out_at_once() -> None:
    events = [SimpleNamespace(start_ns=lambda at=at: at, nbytes=lambda size=size: size)
              for at, size in ((3, -100), (1, 100), (2, 50), (4, 60))]  # fmt: skip
    assert logprob_memory.allocator_peak(events, 10) == 160


def test_full_logits_take_what_their_shapes_say() -> None:
    """Forward keeps logits and log-probs [T, V], backward makes a gradient of the log-probs and one of the logits
    while both, or one of them, are still there: between two and four of them at once."""
    found = logprob_memory.measure("full_logits", 4_000, tokens=512, hidden_size=16)
    one = 512 * 4_000 * 4
    assert 2 * one <= found["peak"] <= 4.2 * one


def test_scoring_all_steps_of_a_trajectory_takes_one_pass(corpus: Path) -> None:
    found = score_passes.measure(corpus, 2)
    for num_steps, at_once, one_by_one in found["passes"]:
        assert (at_once, one_by_one) == (1, num_steps)
    assert found["score_difference"] < 0.01  # bf16


def test_a_side_answers_until_it_ends() -> None:
    code = ("import sys; from benchmarks.processes.sides import serve\n"
            "serve(lambda row: {'twice': 2 * row['x']} if row['x'] else sys.exit(3))")  # fmt: skip
    side = Side([sys.executable, "-c", code], {"PYTHONPATH": str(ROOT)})
    try:
        assert side.ask({"x": 4}) == {"twice": 8}
        with pytest.raises(RuntimeError, match="exit code 3"):
            side.ask({"x": 0})
    finally:
        side.stop()


@pytest.mark.slow
def test_all_sides_run_and_their_losses_agree() -> None:
    if not (ROOT / ".venv-bench" / "installed").is_file():
        pytest.skip("no TRL: bash scripts/install_bench.sh")
    command = [sys.executable, "-m", "benchmarks.training.training", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout[done.stdout.index("{\n") :])["figures"]
    assert set(figures) >= {*training.GOALS, "score_passes_per_trajectory", "logprob_memory_150k_over_1k"}
