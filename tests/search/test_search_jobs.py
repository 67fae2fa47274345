"""Searches as sampling jobs: killed and gone on with, their two files, what they refuse; and with a real engine."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes.forked import exit_code, start_program
from benchmarks.sampling.prefill import computed_tokens, engine_options
from espalier.data.jsonl import iter_rows, read_records, write_records
from espalier.data.prefix_tree import num_distinct_tokens
from espalier.data.records import BadInput, Trajectory
from espalier.data.search_tree import SearchTree
from espalier.data.training_layout import TrainingLayout, write_training_layout
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.models.tiny import build_tokenizer
from espalier.runtime.entrypoint import CONF, build, compose_config
from espalier.runtime.errors import exit_code_of
from espalier.runtime.process_lifetime import is_running
from espalier.runtime.schemas import SampleConfig
from espalier.sampling import job
from espalier.sampling.server import VLLMServer
from espalier.search.client import Search, keep_trees, trees_path
from espalier.search.scorers.held_networks import check_networks
from espalier.search.scorers.process_scorer import ProcessScorer
from tests.support import search_job
from tests.support.search_job import NUM_PROBLEMS

ROOT = Path(__file__).resolve().parent.parent.parent
METHODS = sorted(path.stem for path in (CONF / "search").glob("*.yaml") if path.stem not in ("base", "none"))


SearchHere = Callable[..., int]


@pytest.fixture
def search_here(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> SearchHere:
    """`search_here(output, *overrides)` runs a job in this process; its exit code."""
    monkeypatch.setattr(job, "build", job.build)  # `search_job` replaces it

    def run(output: Path, *overrides: str) -> int:
        with monkeypatch.context() as again:
            again.setattr(job, "build", job.build)
            return search_job.main(str(tiny_policy), str(output), "0.0", *overrides)

    return run


def check_files(output: Path) -> tuple[list[Trajectory], list[SearchTree]]:
    """Every problem once in both files, and the tree's chosen node is the solution."""
    rows, trees = read_records(Trajectory, output), read_records(SearchTree, trees_path(output))
    assert sorted(row.id for row in rows) == sorted(f"p{k}/0" for k in range(NUM_PROBLEMS))
    by_id = {tree.id: tree for tree in trees}
    assert len(by_id) == len(trees) == len(rows)
    for row in rows:
        tree = by_id[row.id]
        assert [token for node in tree.way(tree.chosen) for token in tree.step_ids[node]] == row.response_ids
        assert (tree.answers[tree.chosen], bool(tree.is_correct[tree.chosen])) == (row.answer, row.is_correct)
    return rows, trees


def test_searches_that_are_killed_at_random_moments_hold_every_problem_once(tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    draw = random.Random(0)
    log = tmp_path / "log"

    def started() -> int:
        settings = [str(tiny_policy), str(output), "0.15", "engine.concurrency=4"]
        return start_program("tests/support/search_job.py", settings, log)

    num_killed = 0
    for _ in range(12):
        pid = started()
        began = time.monotonic()
        while not output.exists() and is_running(pid) and time.monotonic() - began < 60:
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 1.0) if num_killed else 0.8)
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
        num_killed += exit_code(pid) == -signal.SIGKILL
        if num_killed == 3:
            break
    assert num_killed == 3
    assert exit_code(started()) == 0, log.read_text()
    check_files(output)
    before = output.read_bytes(), trees_path(output).read_bytes()
    assert exit_code(started()) == 0  # finished: nothing is asked
    assert (output.read_bytes(), trees_path(output).read_bytes()) == before


def test_a_tree_names_the_reward_that_it_was_scored_by(search_here: SearchHere, tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    assert search_here(output, "scorer@search.scorer=outcome") == 0
    assert {tree.scorer for tree in check_files(output)[1]} == {"OutcomeReward"}


def test_a_budget_of_seconds_cuts_searches_and_another_one_is_refused_for_a_file_that_was_begun(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "build", job.build)  # `search_job` replaces it
    output = tmp_path / "found.jsonl"
    asked = [str(tiny_policy), str(output), "0.3", "search.method.width=2", "search.method.siblings=2"]
    assert search_job.main(*asked, "search.budget.seconds=0.15") == 0
    rows, trees = check_files(output)
    cut = {tree.id for tree in trees if tree.is_cut}
    assert cut
    assert all(len(tree.parents) > 1 for tree in trees)
    assert not any(row.is_correct for row in rows if row.id in cut and row.finish_reason == "length")
    meta = tmp_path / "found.meta.json"
    meta.write_text(meta.read_text().replace('"is_complete": true', '"is_complete": false'))
    with pytest.raises(BadInput, match="made otherwise"):
        search_job.main(*asked, "search.budget.seconds=5")


def test_a_pilot_says_what_searching_all_problems_costs(
    search_here: SearchHere, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not what the solutions are long: a beam of four times four draws a dozen others for each."""
    output = tmp_path / "found.jsonl"
    with caplog.at_level("INFO"):
        assert search_here(output, "pilot=5") == 0
    spent = sum(tree.num_tokens for tree in read_records(SearchTree, trees_path(output)))
    assert f"about {spent / 5 * NUM_PROBLEMS:,.0f} tokens for all {NUM_PROBLEMS}" in caplog.text


def test_solutions_that_the_budget_cut_are_not_said_to_want_more_room(
    search_here: SearchHere, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert search_here(tmp_path / "found.jsonl", "search.budget.tokens=1") == 0
    assert "cut at params.max_tokens or by search.budget" in caplog.text
    assert "are wrong: raise params.max_tokens or search.budget" in caplog.text


def test_another_method_is_refused_for_a_file_that_was_begun(search_here: SearchHere, tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    assert search_here(output) == 0
    (tmp_path / "found.meta.json").write_text(
        (tmp_path / "found.meta.json").read_text().replace('"is_complete": true', '"is_complete": false')
    )
    with pytest.raises(BadInput, match="made otherwise"):
        search_here(output, "search=dvts")


def test_a_reward_model_that_was_trained_again_is_refused_for_a_file_that_was_begun(
    search_here: SearchHere, tiny_prm: Path, tmp_path: Path
) -> None:
    output, prm = tmp_path / "found.jsonl", tmp_path / "prm"
    shutil.copytree(tiny_prm, prm)
    asked = ("scorer@search.scorer=process", f"search.scorer.path={prm}")
    assert search_here(output, *asked) == 0
    model = load_process_reward(str(prm))
    torch.nn.init.constant_(model.get_parameter("score.bias"), 1.0)
    model.save_pretrained(prm)
    with pytest.raises(BadInput, match=re.escape(f"its input {prm} has changed")):
        search_here(output, *asked)


def test_a_reward_model_of_another_tokenizer_is_refused(
    search_here: SearchHere, tiny_prm: Path, tmp_path: Path
) -> None:
    output, prm = tmp_path / "found.jsonl", tmp_path / "prm"
    shutil.copytree(tiny_prm, prm)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (prm / file).unlink()
    build_tokenizer(["quite other words"], 300).save_pretrained(prm)
    for scorer, key in (("process", "path"), ("outcome_model", "reward.path")):
        with pytest.raises(Exception, match="has another tokenizer than the policy") as caught:
            search_here(output, f"scorer@search.scorer={scorer}", f"search.scorer.{key}={prm}")
        assert exit_code_of(caught.value) == 2


def folder_trained_on(scores: str, prompts: str, tiny_prm: Path, folder: Path) -> Path:
    """A reward model whose folder says what it was trained on."""
    shutil.copytree(tiny_prm, folder)
    if scores:
        write_training_layout(folder, TrainingLayout(scores, prompts))
    return folder


@pytest.mark.parametrize(
    ("scorer", "key", "own", "other"),
    [("process", "path", "steps", "responses"), ("outcome_model", "reward.path", "responses", "steps")],
)
def test_a_reward_model_is_read_where_it_was_trained_or_refused(
    scorer: str, key: str, own: str, other: str, search_here: SearchHere, tiny_prm: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    for scores in (own, "", other):
        folder = folder_trained_on(scores, "text", tiny_prm, tmp_path / f"model-{scores}")
        asked = (tmp_path / f"{scores}.jsonl", f"scorer@search.scorer={scorer}", f"search.scorer.{key}={folder}")
        caplog.clear()
        if scores == other:
            remedy = {"process": f"scorer@search.scorer=outcome_model search.scorer.reward.path={folder}",
                      "outcome_model": "scorer@search.scorer=process"}[scorer]  # fmt: skip
            with pytest.raises(BadInput, match=f"trained on {other} and not on {own} .*{re.escape(remedy)}"):
                search_here(*asked)
            assert not list(tmp_path.glob(f"{scores}.*"))  # nothing is drawn or written
            continue
        assert search_here(*asked) == 0
        check_files(asked[0])
        is_assumed = f"is read at the ends of {own}, which is an assumption" in caplog.text
        assert is_assumed == (scores == "")


@pytest.mark.parametrize(("scorer", "key", "scores"),
                         [("process", "path", "steps"), ("outcome_model", "reward.path", "responses")])  # fmt: skip
def test_a_reward_model_that_was_trained_on_other_prompts_is_warned_of(
    scorer: str, key: str, scores: str, search_here: SearchHere, tiny_prm: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    for prompts in ("text", "both", "chat"):
        folder = folder_trained_on(scores, prompts, tiny_prm, tmp_path / prompts)
        caplog.clear()
        asked = (f"scorer@search.scorer={scorer}", f"search.scorer.{key}={folder}")
        assert search_here(tmp_path / f"{prompts}.jsonl", *asked) == 0
        number = caplog.text.count("was trained on prompts that are turns of a chat template, and th")
        assert number == (prompts == "chat")


def test_what_a_model_was_trained_on_is_known_by_its_hub_name_too(
    tiny_prm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a hub, as its client writes it, without a network."""
    model = tmp_path / "hub" / "models--org--scorer"
    (model / "snapshots").mkdir(parents=True)
    folder_trained_on("responses", "text", tiny_prm, model / "snapshots" / ("a" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(BadInput, match="org/scorer was trained on responses and not on steps"):
        check_networks(ProcessScorer("org/scorer"), load_tokenizer(str(tiny_prm)), lambda: [5, 6])


def test_a_search_whose_scores_take_longer_than_a_stall_is_waited_for(
    search_here: SearchHere, tiny_prm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sampled meanwhile: engines have nothing to do, and say so."""
    compute = ProcessScorer._compute

    def slowly(self: ProcessScorer, rows: list[Any]) -> list[list[float]]:
        time.sleep(1.0)
        return compute(self, rows)

    monkeypatch.setattr(ProcessScorer, "_compute", slowly)
    asked = ("scorer@search.scorer=process", f"search.scorer.path={tiny_prm}", "engine.stall_seconds=0.5")
    assert search_here(tmp_path / "found.jsonl", *asked) == 0
    check_files(tmp_path / "found.jsonl")


def test_what_was_generated_before_a_kill_is_counted_by_the_trees(search_here: SearchHere, tmp_path: Path) -> None:
    """A killed part wrote down nothing of what it spent, and a solution is a small part of it."""
    output, meta = tmp_path / "found.jsonl", tmp_path / "found.meta.json"
    assert search_here(output) == 0
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-1]))
    written = json.loads(meta.read_text())
    meta.write_text(json.dumps(written | {"is_complete": False, "sampling_tokens": 0, "sampling_seconds": 0}))
    assert search_here(output) == 0
    spent = sum(tree.num_tokens for tree in check_files(output)[1])
    assert json.loads(meta.read_text())["counts"]["generated_tokens"] == spent


def test_trees_without_their_solution_are_taken_off_and_a_lost_tree_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.trees.jsonl"
    rows = [{"id": f"p{k}/0", "problem_id": f"p{k}", "num_tokens": 10 * k} for k in range(3)]
    write_records(path, rows)
    with path.open("a") as file:
        file.write('{"id": "p3/0", "pro')
    assert keep_trees(path, {"p0", "p2"}) == 20
    assert [row["id"] for _, row in iter_rows(path)] == ["p0/0", "p2/0"]
    with pytest.raises(BadInput, match="2 trees of 3 finished"):
        keep_trees(path, {"p0", "p1", "p2"})
    path.unlink()
    keep_trees(path, set())
    with pytest.raises(BadInput, match="is missing, and 1 solutions"):
        keep_trees(path, {"p0"})


def test_outputs_whose_names_end_in_a_number_have_trees_of_their_own() -> None:
    assert trees_path(Path("a/found.jsonl")) == Path("a/found.trees.jsonl")
    assert trees_path(Path("a/beam0.5")) != trees_path(Path("a/beam0.7"))


@pytest.mark.parametrize("method", METHODS)
def test_every_config_of_a_method_is_built(method: str) -> None:
    settings = ["policy=p", "output=o", f"search={method}", "scorer@search.scorer=random"]
    search = build(compose_config(SampleConfig, "api/vllm/search", settings).search)
    assert isinstance(search, Search)


@pytest.mark.parametrize("scorer", sorted(path.stem for path in (CONF / "scorer").glob("*.yaml")))
def test_every_config_of_a_scorer_is_composed(scorer: str) -> None:
    settings = ["policy=p", "output=o", f"scorer@search.scorer={scorer}"]
    named = {"process": "path", "process_by_engines": "path", "outcome_model": "reward.path",
             "generative_verifier": "reward.path"}  # fmt: skip
    settings += [f"search.scorer.{named[scorer]}=m"] if scorer in named else []
    config = compose_config(SampleConfig, "api/vllm/search", settings)
    assert config.search["scorer"]["_target_"].startswith("espalier.search.scorers.")


def test_several_solutions_per_problem_are_refused_before_anything_is_drawn_or_written(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "build", job.build)  # `search_job` replaces it
    with pytest.raises(BadInput, match=r"params\.n=2: a search draws as many samples as search\.method says"):
        search_job.main(str(tiny_policy), str(tmp_path / "found.jsonl"), "0", "params.n=2")
    assert not list(tmp_path.glob("found*"))


@pytest.mark.slow
@pytest.mark.server
def test_a_real_engine_computes_prompts_of_few_more_than_the_distinct_tokens_of_the_trees(
    tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    output = tmp_path / "found.jsonl"
    options = engine_options("partial_block_cache")
    with VLLMServer(str(tiny_policy), str(tmp_path / "log"), max_model_len=512, options=options) as server:
        asked = ["service_api_caller_v1.py", "-cn", "api/vllm/search", f"policy={tiny_policy}", f"output={output}",
                 "client=vllm", "server=none", f"client.base_url={server.base_url}", "requests.limit=20",
                 f"search.scorer.path={tiny_prm}", "params.max_tokens=60", "search.cuts.step_tokens=12"]  # fmt: skip
        before = computed_tokens(server.base_url)
        subprocess.run([sys.executable, *asked], cwd=ROOT, timeout=400, check=True)
        computed = computed_tokens(server.base_url) - before
    trees = read_records(SearchTree, trees_path(output))
    assert len(trees) == len(read_records(Trajectory, output)) == 20
    ways = [[[*tree.prompt_ids, *_ids(tree, node)] for node in range(len(tree.parents))] for tree in trees]
    counts = json.loads(output.with_suffix(".meta.json").read_text())["engine"]
    assert computed <= 1.1 * sum(map(num_distinct_tokens, ways))
    assert counts["search_generated_tokens"] == counts["generated_tokens"] == sum(tree.num_tokens for tree in trees)
    assert counts["search_scored_tokens"] == sum(tree.num_scored_tokens for tree in trees)


def _ids(tree: SearchTree, node: int) -> list[int]:
    return [token for one in tree.way(node) for token in tree.step_ids[one]]
