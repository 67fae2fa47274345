"""Searches over several engines and servers, and greedy ones beside greedy decoding of a real engine."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sampling.prefill import computed_tokens, engine_options
from espalier.data.jsonl import read_records
from espalier.data.records import Problem, Trajectory
from espalier.data.search_tree import SearchTree
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tokenizer import load_tokenizer
from espalier.sampling.client import Client, SampleRequest, SamplingParams
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.ray_engines import RayEngines
from espalier.sampling.server import VLLMServer
from espalier.search.budget import Budget
from espalier.search.client import Search, trees_path
from espalier.search.expander import StepCuts
from espalier.search.methods.step_beam import StepBeam
from espalier.search.scorers.random_scorer import RandomScorer
from tests.support.search_cases import SOLUTIONS, LastNumber

ROOT = Path(__file__).resolve().parent.parent.parent


class Alone(DataParallelEngines):
    program = "tests.support.table_engine"


class OnRay(RayEngines):
    program = "tests.support.table_engine"


class ShortSteps(WordArithmetic):
    """A step per 9 characters, of whatever a policy of random weights writes."""

    def split_steps(self, response: str) -> list[str]:
        return re.findall(r"(?s).{1,9}", response)


def trees_of(client: Client, policy: Path, output: Path, number: int = 12) -> list[SearchTree]:
    """Search so many problems of the table at once."""
    tokenizer = load_tokenizer(str(policy))
    prompt = list(tokenizer("abcabc", add_special_tokens=False).input_ids)[:3]
    problems = {f"p{k}": Problem(f"p{k}", "a a a", "1") for k in range(number)}
    params = SamplingParams(1, 1.0, 64, return_logprobs=True)
    search = Search(StepBeam(2, 3), RandomScorer(), Budget(), StepCuts())
    search.prepare(LastNumber(), tokenizer, problems, params, output, set())
    search.by(client)

    async def run() -> None:
        await search.open()
        try:
            requests = [SampleRequest(name, tokenizer.decode(prompt), prompt, problem_id=name) for name in problems]
            await asyncio.gather(*(search.sample(request, params) for request in requests))
        finally:
            await search.close()

    asyncio.run(run())
    return read_records(SearchTree, trees_path(output))


def check_engines(trees: list[SearchTree], number: int = 12) -> None:
    """Every problem is searched by one engine, both have some, and what they drew is the table's."""
    assert sorted(tree.problem_id for tree in trees) == sorted(f"p{k}" for k in range(number))
    engines = [{value for node in tree.logprobs for value in node} for tree in trees]
    assert all(len(of_tree) == 1 for of_tree in engines)
    assert set.union(*engines) == {-1.0, -2.0}
    for tree in trees:
        assert "".join(tree.steps[node] for node in tree.way(tree.chosen)) in SOLUTIONS


def test_a_problem_is_searched_by_one_of_several_engines(tiny_policy: Path, tmp_path: Path) -> None:
    engines = Alone(str(tiny_policy), str(tmp_path / "engine.log"), num_engines=2)
    check_engines(trees_of(engines, tiny_policy, tmp_path / "found.jsonl"))


@pytest.mark.slow
def test_a_problem_is_searched_by_one_of_several_engines_on_ray(tiny_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from espalier.runtime.ray_cluster import join_cluster, leave_cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    joined = join_cluster(made.address)
    try:
        engines = OnRay(str(tiny_policy), str(tmp_path / "engine.log"), num_engines=2)
        check_engines(trees_of(engines, tiny_policy, tmp_path / "found.jsonl"))
    finally:
        if joined:
            leave_cluster()
        made.shutdown()


@pytest.fixture(scope="module")
def servers(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServer]]:
    """Two real servers of the tiny policy."""
    folder, options = tmp_path_factory.mktemp("servers"), engine_options("partial_block_cache")
    with (
        VLLMServer(str(tiny_policy), str(folder / "one"), max_model_len=512, options=options) as one,
        VLLMServer(str(tiny_policy), str(folder / "two"), max_model_len=512, options=options) as two,
    ):
        yield [one, two]


def searched(policy: Path, output: Path, *settings: str) -> tuple[list[Trajectory], list[SearchTree]]:
    """Run the program with servers; its solutions and trees in the order of their problems."""
    asked = ["service_api_caller_v1.py", "-cn", "api/vllm/search", f"policy={policy}", f"output={output}",
             "client=vllm", "server=none", "scorer@search.scorer=random", "params.max_tokens=60",
             *settings]  # fmt: skip
    subprocess.run([sys.executable, *asked], cwd=ROOT, timeout=400, check=True)
    found = read_records(Trajectory, output), read_records(SearchTree, trees_path(output))
    rows, trees = (sorted(one, key=lambda row: row.problem_id) for one in found)  # type: ignore[attr-defined]
    return rows, trees


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
def test_greedy_search_of_width_one_is_a_real_engines_greedy_decoding_token_for_token(
    tiny_policy: Path, tmp_path: Path
) -> None:
    task, tokenizer = ShortSteps(), load_tokenizer(str(tiny_policy))
    problems = {problem.id: problem for problem in task.problems("test")[:10]}
    params = SamplingParams(1, 0.0, 60)
    engine = DataParallelEngines(str(tiny_policy), str(tmp_path / "engine.log"), num_engines=1,
                                 options={"enforce_eager": True})  # fmt: skip

    async def run() -> None:
        await engine.open()
        try:
            for cuts in (StepCuts(), StepCuts("\n", 7)):
                search = Search(StepBeam(1, 1), RandomScorer(), Budget(), cuts)
                search.prepare(task, tokenizer, problems, params, tmp_path / "found.jsonl", set())
                search.by(engine)
                for problem in problems.values():
                    prompt = task.prompt(problem)
                    asked = SampleRequest(problem.id, prompt, list(tokenizer(prompt).input_ids), problem_id=problem.id)
                    (whole,) = await engine.sample(asked, params)
                    (found,) = await search.sample(asked, params)
                    assert (found.token_ids, found.finish_reason) == (whole.token_ids, whole.finish_reason)
                trees = read_records(SearchTree, trees_path(tmp_path / "found.jsonl"))
                assert any(len(tree.parents) > 3 for tree in trees)  # in several steps
                assert all(tree.num_tokens == sum(map(len, tree.step_ids)) for tree in trees)  # each drawn once
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
def test_both_of_two_servers_are_asked_and_every_problem_is_searched_once(
    servers: list[VLLMServer], tiny_policy: Path, tmp_path: Path
) -> None:
    urls = [server.base_url for server in servers]
    before = [computed_tokens(url) for url in urls]
    rows, trees = searched(tiny_policy, tmp_path / "found.jsonl", f"client.base_url=[{','.join(urls)}]",
                           "requests.limit=20", "search.cuts.step_tokens=12")  # fmt: skip
    wanted = sorted(problem.id for problem in WordArithmetic().problems("test")[:20])
    assert [row.problem_id for row in rows] == [tree.problem_id for tree in trees] == wanted
    computed = [computed_tokens(url) - old for url, old in zip(urls, before, strict=True)]
    assert min(computed) > 0.2 * sum(computed)
