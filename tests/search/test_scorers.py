"""Scorers against other ways to the same numbers."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from espalier import load_prm
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem
from espalier.data.search_tree import SearchTree
from espalier.data.steps import Decoder, StepTokens
from espalier.data.verification import VerifierFormat
from espalier.models.load import load_tokenizer
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.generative_verifier import GenerativeVerifierReward
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rewards.process import ProcessReward, score_step_tokens
from espalier.rl.advantages.process_values import ProcessValueAdvantage
from espalier.sampling.client import Refused, SampleRequest, SamplingParams
from espalier.search.budget import Budget
from espalier.search.client import Search, trees_path
from espalier.search.expander import Expander, StepCuts
from espalier.search.methods.samples import Samples
from espalier.search.methods.step_beam import StepBeam
from espalier.search.methods.tree_inference import TreeInference
from espalier.search.scorers.cached_model import CachedScoredModel
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.exact_scorer import ExactScorer
from espalier.search.scorers.majority_scorer import MajorityScorer
from espalier.search.scorers.process_scorer import ProcessScorer, rows_of
from espalier.search.scorers.random_scorer import RandomScorer
from espalier.search.scorers.reward_scorer import RewardScorer
from espalier.search.scorers.scorer import Batches, HoldsNetworks
from espalier.search.tree import Node, Tree
from tests.support.exact_cases import HoldsLetter, sharp_network
from tests.support.search_cases import LastNumber, TableSampler, TableScorer, searched
from tests.support.token_scorer import Engines

Make = Callable[..., TableSampler]


def whole_scores(path: Path, tree: Tree) -> dict[int, float]:
    """The score of every scored node, each of a text of its own, computed whole."""
    scored = [node for node in tree.nodes if node.score is not None]
    rows = [StepTokens(tree.prompt_ids, node.response_ids(), [node.num_tokens]) for node in scored]
    found = score_step_tokens(load_process_reward(str(path)), rows, pad_id=0)
    return {node.number: row[0] for node, row in zip(scored, found, strict=True)}


@pytest.mark.parametrize("aggregate", ["last", "minimum", "product"])
@pytest.mark.parametrize("method", [StepBeam(2, 8), Samples(20)], ids=str)
def test_incremental_scores_are_those_of_whole_texts_and_read_every_token_once(
    aggregate: str, method: Any, sampler: Make, tiny_prm: Path
) -> None:
    scorer = ProcessScorer(str(tiny_prm), aggregate)
    asyncio.run(scorer.open())
    tree, _, _ = searched(sampler(), method, scorer)
    wanted = whole_scores(tiny_prm, tree)
    assert len(wanted) >= 3
    for number, score in wanted.items():
        assert tree.nodes[number].score == pytest.approx(score, abs=0.02)
    if aggregate == "minimum":
        leaf = tree.finished()[0]
        assert leaf.rank() == min(node.score or 0.0 for node in leaf.way())
    if isinstance(method, StepBeam):  # every state was scored behind its parent
        assert scorer.model.is_exact
        distinct = len(tree.prompt_ids) + sum(len(node.token_ids) for node in tree.nodes if node.score is not None)
        assert tree.num_scored_tokens == distinct
        assert scorer.model.num_computed == distinct


def test_engines_are_asked_at_the_last_token_of_a_state_alone(sampler: Make, tiny_prm: Path) -> None:
    engines = Engines()
    scorer = ProcessScorer(str(tiny_prm), engines=engines)
    asyncio.run(scorer.open())
    tree, _, _ = searched(sampler(), StepBeam(2, 8), scorer)
    for number, score in whole_scores(tiny_prm, tree).items():
        assert tree.nodes[number].score == pytest.approx(score, abs=0.02)
    asyncio.run(scorer.close())
    assert not engines.is_open


def test_rows_hold_every_node_once_in_the_longest_ways(sampler: Make) -> None:
    tree, _, _ = searched(sampler(), Samples(40), RandomScorer())
    rows = rows_of(tree.nodes[1:])
    assert sorted(node.number for _, asked in rows for node in asked) == list(range(1, len(tree.nodes)))
    assert len(rows) == len(tree.finished())
    for row, asked in rows:
        assert row.step_ends == [node.num_tokens for node in asked]
        assert row.response_ids == asked[-1].response_ids()


def test_states_that_are_forgotten_are_computed_anew(tiny_prm: Path) -> None:
    model = CachedScoredModel(load_process_reward(str(tiny_prm)))
    prompt, first, second = [5, 6, 7, 8], [9, 10, 11], [9, 10, 11, 12, 13]
    model.scores([StepTokens(prompt, first, [3])], 1000)
    before = model.num_computed
    model.scores([StepTokens(prompt, second, [5])], 1000)
    assert model.num_computed == before + 2
    model.forget(prompt)
    model.scores([StepTokens(prompt, second, [5])], 1000)
    assert model.num_computed == before + 2 + 9


def test_a_network_whose_cache_is_not_exact_scores_whole_texts(tiny_prm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedScoredModel(load_process_reward(str(tiny_prm)))
    monkeypatch.setattr(CachedScoredModel, "_check", lambda self, row: False)
    row = StepTokens([5, 6, 7, 8], [9, 10, 11], [2, 3])
    assert model.scores([row], 1000) == score_step_tokens(load_process_reward(str(tiny_prm)), [row], pad_id=0)


def test_a_network_with_a_sliding_window_scores_a_state_alike_whatever_problem_stands_beside_it(tmp_path: Path) -> None:
    """Kept keys stand where the longest row of a batch puts them: a window over places would lose the short row's."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                                  num_labels=1, sliding_window=16)  # fmt: skip
    network = AutoModelForTokenClassification.from_config(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    model, ids = CachedScoredModel(load_process_reward(str(tmp_path))), list(range(5, 95))
    model.scores([StepTokens(ids[:4], ids[4:8], [2, 4])], 1000)
    for number in (2, 4):
        rows = [StepTokens(ids[20:80], ids[:number], [number]), StepTokens(ids[4:8], ids[8 : 8 + number], [number])]
        whole = score_step_tokens(load_process_reward(str(tmp_path)), rows, pad_id=0)
        assert [row[0] for row in model.scores(rows, 1000)] == pytest.approx([row[0] for row in whole], abs=0.01)


def test_a_state_longer_than_the_reward_model_takes_is_refused(sampler: Make, tiny_prm: Path, tmp_path: Path) -> None:
    network = load_process_reward(str(tiny_prm))
    network.config.max_position_embeddings = 5
    network.save_pretrained(tmp_path)
    scorer = ProcessScorer(str(tmp_path))
    asyncio.run(scorer.open())
    with pytest.raises(BadInput, match=r"has \d+ tokens, and the reward model .* takes 5: set params.max_tokens"):
        searched(sampler(), StepBeam(2, 8), scorer)


def test_responses_end_where_the_scorers_model_has_no_more_room(
    sampler: Make, tokenizer: Any, tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = load_process_reward(str(tiny_prm))
    network.config.max_position_embeddings = 8
    network.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    names, prompt = ("p0", "p1"), [5, 6, 7]
    scorer, params = ProcessScorer(str(tmp_path / "short")), SamplingParams(1, 1.0, 64)
    search = Search(StepBeam(2, 8), scorer, Budget(), StepCuts())
    problems = {name: Problem(name, "a a a", "1") for name in names}
    search.prepare(LastNumber(), tokenizer, problems, params, tmp_path / "found.jsonl", set())

    async def run() -> None:
        await search.by(sampler()).open()
        for name in names:
            await search.sample(SampleRequest(name, "abc", prompt, problem_id=name), params)
        with pytest.raises(Refused, match="prompt of 8 tokens leaves no room in the scorer's model, which takes 8"):
            await search.sample(SampleRequest("p0", "abc", [*range(5, 13)], problem_id="p0"), params)
        await search.close()

    asyncio.run(run())
    ways = [(tree, tree.way(node)) for tree in read_records(SearchTree, trees_path(tmp_path / "found.jsonl"))
            for node in range(1, len(tree.parents))]  # fmt: skip
    assert max(sum(len(tree.step_ids[node]) for node in way) for tree, way in ways) == 5
    assert any(tree.endings[way[-1]] == "length" for tree, way in ways)
    assert caplog.text.count("the scorer's model takes 8 tokens of prompt and response") == 1


@pytest.mark.parametrize(
    ("scorer", "reads"),
    [
        (RewardScorer(OutcomeReward()), True),
        (CompletionsScorer(), True),
        (CompletionsScorer(4, True), False),
        (RandomScorer(), False),
    ],
)
def test_a_scorer_that_reads_the_gold_answer_is_refused_where_a_problem_has_none(
    scorer: Any, reads: bool, tokenizer: Any, tmp_path: Path
) -> None:
    problems = {name: Problem(name, "a a a", gold) for name, gold in (("p0", "1"), ("p1", ""), ("p2", ""))}
    search = Search(StepBeam(2, 8), scorer, Budget(), StepCuts())
    refused = pytest.raises(BadInput, match="2 of 3 problems, the first is p1, have no gold answer")
    with refused if reads else nullcontext():
        search.prepare(LastNumber(), tokenizer, problems, SamplingParams(1, 1.0, 64), tmp_path / "x.jsonl", set())


def test_every_scorer_that_names_networks_is_asked_for_their_tokenizers() -> None:
    found = [scorer for scorer in (ProcessScorer, RewardScorer, ExactScorer) if hasattr(scorer, "models")]
    assert len(found) == 3
    assert all(issubclass(scorer, HoldsNetworks) for scorer in found)


def test_a_model_that_looks_published_is_warned_of(
    tiny_policy: Path, tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it is read as one that was trained here: by a search, by rewards, by `load_prm`."""
    load_prm(tiny_prm)
    assert "looks like" not in caplog.text
    load_process_reward(str(tiny_policy), 2).save_pretrained(tmp_path)
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path)
    for read in (load_prm, ProcessReward, ProcessValueAdvantage):
        caplog.clear()
        read(str(tmp_path))
        assert "looks like one of layout trl" in caplog.text
        assert "prm/score_steps stage.layout=trl" in caplog.text
    caplog.clear()
    (tmp_path / "training_problems.json").write_text('{"problems": []}')
    load_prm(tmp_path)
    assert "looks like" not in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
def test_a_network_that_scores_on_the_cpu_beside_a_gpu_is_warned_of(
    is_there: bool, tiny_prm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("espalier.search.scorers.held_networks.has_gpu", lambda: is_there)
    asyncio.run(ProcessScorer(str(tiny_prm)).open())
    assert (f"{tiny_prm} scores in this process, on the CPU" in caplog.text) == is_there
    assert ("process_by_engines" in caplog.text) == is_there
    caplog.clear()
    network = load_process_reward(str(tiny_prm))
    monkeypatch.setattr(RewardScorer, "_networks", lambda scorer: [network])
    asyncio.run(RewardScorer(OutcomeReward()).open())
    assert (f"{network.config.name_or_path} scores in this process, on the CPU" in caplog.text) == is_there
    caplog.clear()
    monkeypatch.setattr(RewardScorer, "_networks", lambda scorer: [])
    asyncio.run(RewardScorer(OutcomeReward()).open())
    asyncio.run(ProcessScorer(str(tiny_prm), engines=Engines()).open())
    assert caplog.text == ""


@pytest.mark.parametrize("is_there", [True, False])
def test_scores_are_computed_on_half_of_the_cores_beside_an_engine_on_the_others(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.search.scorers.scorer.has_gpu", lambda: is_there)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    before = torch.get_num_threads()

    async def asked() -> list[int]:
        torch.set_num_threads(6)
        batches = Batches[int, int](lambda items: [torch.get_num_threads() for _ in items])
        found = await batches.ask([0])
        batches.close()
        return found

    try:
        assert asyncio.run(asked()) == [6 if is_there else 4]
    finally:
        torch.set_num_threads(before)


def test_questions_of_several_problems_are_answered_by_one_call() -> None:
    calls: list[list[int]] = []

    def compute(items: list[int]) -> list[int]:
        calls.append(items)
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]

    async def ask() -> Sequence[Any]:
        batches = Batches[int, int](compute)
        found = await asyncio.gather(*(batches.ask([k, k + 10]) for k in range(3)))
        with pytest.raises(ValueError, match="13"):
            await batches.ask([13])
        again = await batches.ask([4])
        batches.close()
        return [*found, again]

    assert asyncio.run(ask()) == [[0, 20], [2, 22], [4, 24], [8]]
    assert calls == [[0, 10, 1, 11, 2, 12], [13], [4]]


def test_completions_give_the_share_of_right_answers_and_stay_in_the_tree(sampler: Make) -> None:
    table = sampler(seed=9)
    tree, found, _ = searched(table, StepBeam(1, 40), CompletionsScorer(300))
    for node in tree.nodes[1:]:
        if node.score is not None and not node.is_finished:
            truth = table.value(tuple(node.response_ids()), "1")
            assert node.score == pytest.approx(truth, abs=4 * math.sqrt(truth * (1 - truth) / 300) + 1e-9)
    assert found.chosen.answered().is_correct
    assert sum(node.draws for node in tree.finished()) > 300
    assert {node.visits for node in tree.finished() if node.score is None} == {0}


def test_completions_without_gold_agree_with_the_most_frequent_answer(sampler: Make) -> None:
    table = sampler({"a\n# 5": 0.6, "b\n# 7": 0.2, "b\n# 5": 0.2})  # the gold answer is not among them
    tree, _, _ = searched(table, StepBeam(1, 40), CompletionsScorer(100, agrees=True))
    scores = {node.response(): node.score for node in tree.root.children}
    assert scores["a\n"] == 1.0
    assert scores["b\n"] == pytest.approx(0.5, abs=0.2)


def test_the_majority_scores_a_state_by_the_samples_that_agree(sampler: Make) -> None:
    table = sampler()
    tree, _, _ = searched(table, Samples(50, "weighted_vote"), MajorityScorer())
    counts: dict[str | None, int] = {}
    for leaf in tree.finished():
        counts[leaf.answered().answer] = counts.get(leaf.answered().answer, 0) + leaf.draws
    for leaf in tree.finished():
        assert leaf.score == counts[leaf.answered().answer] / 50


def test_a_reward_scores_the_solution_so_far(sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, Samples(30), RewardScorer(OutcomeReward()))
    assert found.chosen.answered().is_correct
    assert {leaf.score for leaf in tree.finished()} == {0.0, 1.0}


def test_a_random_score_is_the_same_for_the_same_state(sampler: Make) -> None:
    one = searched(sampler(seed=1), TreeInference([[0, 9]]), RandomScorer(3))[0]
    scorer = RandomScorer(3)
    again = asyncio.run(scorer.score(one.nodes[1:], None))  # type: ignore[arg-type]
    assert again == asyncio.run(RandomScorer(3).score(one.nodes[1:], None))  # type: ignore[arg-type]
    assert len(set(again)) == len(again)
    assert again != asyncio.run(RandomScorer(4).score(one.nodes[1:], None))  # type: ignore[arg-type]


def test_the_exact_scorer_is_the_value_that_sampling_converges_to(tmp_path: Path) -> None:
    """A network of random weights and 21 probable tokens; responses of three tokens at most."""
    network, tokenizer = sharp_network(tmp_path / "policy")
    network.save_pretrained(tmp_path / "policy")
    prompt = list(tokenizer("Mia", add_special_tokens=False).input_ids)

    scorer = ExactScorer(str(tmp_path / "policy"), line_mass=1e-6, state_mass=0.0, max_width=100_000, merges=False)
    asyncio.run(scorer.open())
    task, decode = HoldsLetter(), Decoder(tokenizer)
    tree = Tree(Problem("p", "Mia", ""), "Mia", prompt, lambda text: task.grade("", text))
    newline = int(tokenizer("\n").input_ids[0])
    first = tree.add(tree.root, [newline], "\n", "", "", [])
    expander = Expander(
        None, SampleRequest("p", "Mia", prompt), SamplingParams(1, 1.0, 3), task, decode, StepCuts(), None
    )  # type: ignore[arg-type]
    (found,) = asyncio.run(scorer.score([first], expander))

    def value(ids: list[int]) -> float:
        """The brute force: every response of two more tokens, token by token, without a cache."""
        if len(ids) - len(prompt) == 3:
            return 0.0  # it has no room for an end token
        probs = torch.softmax(network(torch.tensor([ids])).logits[0, -1].double(), -1)
        text = tokenizer.decode(ids[len(prompt) :])
        total = float(probs[1]) * task.holds(text)
        likely = [token for token in (probs > 1e-6).nonzero().flatten().tolist() if token != 1]
        return total + sum(float(probs[token]) * value([*ids, token]) for token in likely)

    with torch.no_grad():
        truth = value([*prompt, newline])
    assert found == pytest.approx(truth, abs=2e-3)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("temperature", 0.0)])
def test_the_exact_scorer_refuses_sampling_whose_values_it_does_not_compute(
    name: str, value: float, sampler: Make
) -> None:
    with pytest.raises(BadInput, match=rf"params\.{name}={value:g} .* exact values are of"):
        searched(sampler(), StepBeam(1, 2), ExactScorer("policy"), **{name: value})


def test_scores_of_the_table_rank_as_the_table_does(sampler: Make) -> None:
    table = sampler()
    tree, _, _ = searched(table, StepBeam(3, 60), TableScorer(table, "1"))
    for node in tree.nodes[1:]:
        if node.score is not None:
            assert node.score == table.value(tuple(node.response_ids()), "1")


def whole_responses(tree: Tree) -> list[Node]:
    """The scored ends of responses."""
    return [node for node in tree.finished() if node.score is not None]


def test_best_of_n_by_an_outcome_reward_model_is_the_solution_of_the_highest_logit(
    sampler: Make, tiny_prm: Path
) -> None:
    network = AutoModelForTokenClassification.from_pretrained(tiny_prm, dtype=torch.float32).eval()
    tree, found, _ = searched(sampler(), Samples(60), RewardScorer(OutcomeModelReward(str(tiny_prm), "probability")))
    logits = {}
    for node in whole_responses(tree):
        with torch.no_grad():
            ids = torch.tensor([[*tree.prompt_ids, *node.response_ids()]])
            logits[node] = float(network(input_ids=ids).logits[0, -1, 0])
        assert node.score == pytest.approx(1 / (1 + math.exp(-logits[node])), abs=0.02)
    assert len(logits) > 3
    assert logits[found.chosen] == pytest.approx(max(logits.values()), abs=0.05)


def test_a_beam_by_an_outcome_reward_model_keeps_the_states_of_the_highest_logit(sampler: Make, tiny_prm: Path) -> None:
    reward = OutcomeModelReward(str(tiny_prm))  # logits, which are no shares
    tree, _, _ = searched(sampler(), StepBeam(1, 40), RewardScorer(reward))
    first = {node: node.score or 0.0 for node in tree.root.children}
    assert len(first) == 3
    assert [node for node in first if node.visits] == [max(first, key=lambda node: first[node])]


def test_a_generative_verifier_says_which_solution_is_the_answer(sampler: Make, tiny_policy: Path) -> None:
    form = VerifierFormat("solution", "Is it right (Yes/No)?", "Check.")
    scorer = RewardScorer(GenerativeVerifierReward(str(tiny_policy), form))
    assert scorer.models() == {str(tiny_policy): ""}
    table = sampler()
    tree, found, _ = searched(table, Samples(60), scorer)
    network = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()

    def probability(text: str, word: str) -> float:
        """Of the word behind a text, token by token."""
        before, ids = table.encode(text), table.encode(text + word)
        assert ids[: len(before)] == before
        with torch.no_grad():
            logprobs = torch.log_softmax(network(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        return math.exp(sum(float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids))))

    scores = {}
    for node in whole_responses(tree):
        text = f"{tree.prompt}{node.response()}\nIs it right (Yes/No)?"
        yes, no = (sum(probability(text, word) for word in words) for words in ((" Yes", "Yes"), (" No", "No")))
        scores[node] = yes / (yes + no)
        assert node.score == pytest.approx(scores[node], abs=0.02)
    assert len(scores) > 3
    assert scores[found.chosen] == pytest.approx(max(scores.values()), abs=0.02)


@pytest.mark.parametrize("method", [StepBeam(2, 8), Samples(20)], ids=str)
def test_an_implicit_reward_model_scores_states_by_the_log_ratio_of_its_policies(
    method: Any, sampler: Make, tiny_policy: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    other.save_pretrained(tmp_path / "reference")
    folder = tmp_path / "implicit"
    write_log_ratio_reward(folder, str(tiny_policy), str(tmp_path / "reference"), Scale("sum", 2.0, 0.1))
    scorer = ProcessScorer(str(folder))
    asyncio.run(scorer.open())
    tree, found, _ = searched(sampler(), method, scorer)
    policy = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)

    def logprob(network: Any, node: Node) -> float:
        ids = [*tree.prompt_ids, *node.response_ids()]
        with torch.no_grad():
            logprobs = torch.log_softmax(network(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        return sum(float(logprobs[place - 1, ids[place]]) for place in range(len(tree.prompt_ids), len(ids)))

    rows = [node for node in tree.nodes if node.score is not None]
    assert len(rows) > 3
    scores = {}
    for node in rows:
        scores[node] = 1 / (1 + math.exp(-(2 * (logprob(policy, node) - logprob(other, node)) + 0.1)))
        assert node.score == pytest.approx(scores[node], abs=0.03)
    assert max(scores.values()) - min(scores.values()) > 0.1
    ends = [node for node in rows if node.is_finished]
    assert scores[found.chosen] == pytest.approx(max(scores[node] for node in ends), abs=0.03)
