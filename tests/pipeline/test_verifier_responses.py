"""A generative verifier on benchmarks of reward models: p(Yes) of every response, and rows that it learned to judge."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.examples.token_examples import DemonstrationExamples
from espalier.data.examples.verifier_examples import VerifierExamples
from espalier.data.jsonl import read_records, write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import AnnotatedSolution, BadInput, Demonstration, Trajectory
from espalier.data.seen_responses import read_training_responses, response_hash
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.steps import StepTokens
from espalier.data.training_layout import FILE as LAYOUT_FILE
from espalier.data.training_layout import TrainingLayout, read_training_layout, write_training_layout
from espalier.data.training_problems import problem_hash, read_training_problems
from espalier.data.verification import VerifierFormat
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.pipeline.evaluation.response_scorers import VerifierScorer
from espalier.pipeline.evaluation.score_responses import ScoreResponses
from espalier.pipeline.prm.score_by_verifier import ScoreByVerifier
from espalier.pipeline.problems.verifier_demonstrations import MakeVerifierDemonstrations
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.schemas import StageConfig
from espalier.training.trained_on import check_benchmarks, write_trained_on
from tests.support.token_scorer import Engines

Q = "Is it right (Yes/No)?"
SOLUTION = VerifierFormat("solution", Q, "Check.")
STEP = VerifierFormat("step", "Right so far (Yes/No)?", "Check.")
ROWS = [
    RankedResponses("s/1", "s", "Mia has 3 apples.", ["3 apples", "three"], ["4 apples"]),
    RankedResponses("s/2", "s", "Mia has 4 pens.", ["4 "], ["5\n", "6"]),
    RankedResponses("t/1", "t", "So it is blu", ["eish."], ["est."], has_implicit_prompt=True),
]
TURNS = RankedResponses("u/1", "u", "user: 2?\n\nassistant: 3\n\nuser: Sure?", ["No"], ["Yes"], turns=[
    {"role": "user", "content": "2?"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"},
])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [f"Mia has 3 apples.\n4 pens\nCheck.\nFine.\n{Q} Yes", f"{Q} No", f"{STEP.question} Yes"] * 3
    size: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 330, "max_length": 128}
    return Path(build_tiny(tmp_path_factory.mktemp("m") / "model", texts, **size, seed=0))


CHAT = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip


@pytest.fixture(scope="module")
def chat(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Path(shutil.copytree(folder, tmp_path_factory.mktemp("c") / "chat"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    return model


def scored(
    folder: Path, model: Path, rows: Sequence[RankedResponses] = ROWS, name: str = "o", **settings: Any
) -> tuple[list[ResponseScores], dict[str, Any]]:
    path = folder / "rows.jsonl"
    write_records(path, rows)
    context = StageContext(None, folder / name, 10.0)
    found = ScoreResponses(str(model), **{"verifier": SOLUTION, **settings}).run(str(path), context)
    return list(found), context.counts


def by_hand(model: Path, text: str) -> tuple[float, float]:
    """Return (p(Yes) / (p(Yes) + p(No)), their sum) behind a text; each sums two spellings, token by token."""
    tokenizer, network = load_tokenizer(str(model)), load_policy(str(model))
    own = list(tokenizer(text).input_ids)

    def prob(word: str) -> float:
        total, ids = 0.0, list(own)
        for token in tokenizer(word, add_special_tokens=False).input_ids:
            with torch.inference_mode():
                logits = network(input_ids=torch.tensor([ids])).logits[0, -1].double()
            total += float(torch.log_softmax(logits, -1)[token])
            ids.append(token)
        return math.exp(total)

    yes, no = (prob(f" {word}") + prob(word) for word in ("Yes", "No"))
    return yes / (yes + no), yes + no


def test_every_response_is_asked_about_as_a_solution_is(folder: Path, tmp_path: Path) -> None:
    texts = [f"{row.prompt}\n{text.rstrip()}\n{Q}" for row in ROWS[:2] for text in (*row.chosen, *row.rejected)]
    texts += [f"So it is blueish.\n{Q}", f"So it is bluest.\n{Q}"]  # read whole, as the texts are
    wanted = [by_hand(folder, text) for text in texts]
    rows, counts = scored(tmp_path, folder)
    assert [(row.id, row.subset, len(row.chosen), len(row.rejected)) for row in rows] == [
        ("s/1", "s", 2, 1), ("s/2", "s", 1, 2), ("t/1", "t", 1, 1)]  # fmt: skip
    found = [value for row in rows for value in (*row.chosen, *row.rejected)]
    assert found == pytest.approx([share for share, _ in wanted], abs=2e-3)
    assert len({round(value, 3) for value in found}) > 4, "they differ by more than the tolerance"
    assert counts["verdict_mass"] == pytest.approx(sum(mass for _, mass in wanted) / len(wanted), abs=2e-3)
    assert counts["layout"] == "whole, as plain text"


def test_scores_are_those_of_the_stage_that_reads_solutions(folder: Path, tmp_path: Path) -> None:
    template = PromptTemplate("Question: {question}\n", before_response="A: ")
    solutions = [AnnotatedSolution(f"{row.id}/{text}", "p", row.prompt, [text], [1.0], -1, True)
                 for row in ROWS[:2] for text in (*row.chosen, *row.rejected)]  # fmt: skip
    write_records(tmp_path / "labelled.jsonl", solutions)
    stage = ScoreByVerifier(str(folder), SOLUTION, kind="labelled", template=template)
    other = list(stage.run(str(tmp_path / "labelled.jsonl"), StageContext(None, tmp_path / "x", 10.0)))
    rows, _ = scored(tmp_path, folder, ROWS[:2], template=template)
    plain, _ = scored(tmp_path, folder, ROWS[:2], name="plain")
    found = [value for row in rows for value in (*row.chosen, *row.rejected)]
    assert found == pytest.approx([row.score for row in other], abs=1e-6)
    assert rows != plain


def test_a_verifier_that_is_sure_still_says_which_response_is_better(folder: Path, tmp_path: Path) -> None:
    """Rounded to six digits its scores would be ties, and a tie counts as wrong."""
    network = load_policy(str(folder))
    with torch.no_grad():
        network.lm_head.weight.mul_(1000.0)
    network.save_pretrained(tmp_path / "sure")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "sure")
    no_for_yes = VerifierFormat("solution", Q, "Check.", yes=[" No", "No"], no=[" Yes", "Yes"])
    (row, *_), _ = scored(tmp_path, tmp_path / "sure", verifier=no_for_yes)
    values = [*row.chosen, *row.rejected]
    assert {round(value, 6) for value in values} == {0.0}
    assert len(set(values)) == 3


def test_a_prompt_is_turns_where_the_verifier_has_a_chat_template(folder: Path, chat: Path, tmp_path: Path) -> None:
    model = chat
    rows, counts = scored(tmp_path, model, [ROWS[0], TURNS])
    asked = f"user: Mia has 3 apples.\nassistant: 4 apples\n{Q}"
    assert rows[0].rejected == pytest.approx([by_hand(model, asked)[0]], abs=2e-3)
    asked = f"user: 2?\nassistant: 3\nuser: Sure?\nassistant: No\n{Q}"
    assert rows[1].chosen == pytest.approx([by_hand(model, asked)[0]], abs=2e-3)
    assert (counts["layout"], counts["layout_by"]) == ("whole, in its chat template", "by its tokenizer")
    plain, _ = scored(tmp_path, model, [ROWS[0]], name="plain", is_chat=False)
    assert plain[0].rejected == pytest.approx([by_hand(folder, f"Mia has 3 apples.\n4 apples\n{Q}")[0]], abs=2e-3)


@pytest.mark.parametrize("more", [
    {"system": "Be strict."}, {"instruction": "Solve it."}, {"template": "Q: {question}\n"},
    {"shots": [{"question": "1+1?", "response": "2"}]},
])  # fmt: skip
def test_a_template_that_says_more_than_the_question_is_for_rows_without_turns(
    more: dict[str, Any], chat: Path, tmp_path: Path
) -> None:
    template = PromptTemplate(**more)
    with pytest.raises(BadInput, match=r"row 'u/1' has turns .* stage\.template .*: leave the template out"):
        scored(tmp_path, chat, [ROWS[0], TURNS], template=template)
    assert len(scored(tmp_path, chat, [ROWS[0]], name="alone", template=template)[0]) == 1
    assert len(scored(tmp_path, chat, [TURNS], name="text", template=template, is_chat=False)[0]) == 1


def test_a_template_cannot_be_written_around_what_two_texts_begin_with(
    folder: Path, chat: Path, tmp_path: Path
) -> None:
    for model in (folder, chat):
        with pytest.raises(
            BadInput, match=r"row 't/1' has no prompt of its own, .* stage\.template .*: leave the template out"
        ):
            scored(tmp_path, model, template=PromptTemplate("Q: {question}\n"))
    assert len(scored(tmp_path, chat, template=PromptTemplate("Q: {question}\n"), name="turns", is_chat=True)[0]) == 3


def test_a_template_says_whether_its_prompts_are_turns(folder: Path, chat: Path, tmp_path: Path) -> None:
    rows, counts = scored(tmp_path, chat, [ROWS[0]], template=PromptTemplate(is_chat=False))
    assert rows[0].rejected == pytest.approx([by_hand(folder, f"Mia has 3 apples.\n4 apples\n{Q}")[0]], abs=2e-3)
    assert (counts["layout"], counts["layout_by"]) == ("whole, as plain text", "by the prompt's is_chat")
    write_training_layout(chat, TrainingLayout("responses", "text"))
    rows, counts = scored(tmp_path, chat, [ROWS[0]], name="turns", template=PromptTemplate(is_chat=True))
    (chat / LAYOUT_FILE).unlink()
    asked = f"user: Mia has 3 apples.\nassistant: 4 apples\n{Q}"
    assert rows[0].rejected == pytest.approx([by_hand(folder, asked)[0]], abs=2e-3)
    assert counts["layout_by"] == "by the prompt's is_chat"
    with pytest.raises(BadInput, match=r"needs? a chat template, .* choose a prompt with is_chat: false"):
        scored(tmp_path, folder, [ROWS[0]], template=PromptTemplate(is_chat=True))
    for asked_for in (True, False):
        with pytest.raises(
            BadInput, match=r"stage\.is_chat=.* and stage\.template\.is_chat=.*: set one of them to null"
        ):
            ScoreResponses("m", verifier=SOLUTION, is_chat=asked_for, template=PromptTemplate(is_chat=not asked_for))


def test_a_stopped_run_goes_on_to_the_same_bytes_and_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [RankedResponses(f"r{n}", "", "Mia has 3 apples. " * (n % 3 + 1), [f"{n}"], ["4", f"{n + 40}"])
            for n in range(8)]  # fmt: skip
    write_records(tmp_path / "rows.jsonl", rows)

    def run(name: str, verifier: VerifierFormat = SOLUTION) -> tuple[bytes, float]:
        stage = ScoreResponses(str(folder), verifier=verifier, batch_tokens=100)
        run_stage(stage, None, StageConfig(output=str(tmp_path / name), input=str(tmp_path / "rows.jsonl"), stage={}))
        return (tmp_path / name).read_bytes(), masses[-1]

    masses: list[float] = []
    monkeypatch.setattr("espalier.models.verdict_probs.warn_of_mass", lambda found, name: masses.extend(found))
    expected = run("whole.jsonl")
    unbroken, calls = VerifierScorer.__call__, [0]

    def stop(self: VerifierScorer, batch: Sequence[StepTokens]) -> list[float]:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return unbroken(self, batch)

    monkeypatch.setattr(VerifierScorer, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        run("out.jsonl")
    other = VerifierFormat("solution", Q, "Check.", yes=[" Yes"], no=[" No"])
    with pytest.raises(BadInput, match=r"\(score differs\): remove it"):
        run("out.jsonl", other)
    assert run("out.jsonl") == expected
    assert calls[0] > 4, "two batches were kept and the others scored"


def test_what_does_not_go_together_is_refused(folder: Path, tiny_prm: Path, tmp_path: Path) -> None:
    each_step = StepVerdictFormat("Let us check.", "Step {number}:", "{", "}", ["correct"], ["incorrect"])
    for settings, line in (
        ({"reference": "x"}, "leave out stage.reference"),
        ({"is_reference_free": True}, "leave out stage.is_reference_free"),
        ({"takes_last_step": True}, "leave out stage.takes_last_step"),
        ({"aggregate": "average"}, "leave out stage.aggregate"),
        ({"verifier": STEP}, "asked about whole responses here: choose verifier@stage.verifier=solution"),
        ({"verifier": each_step}, "asked about whole responses here"),
        ({"verifier": None, "template": PromptTemplate()}, "stage.template writes prompts for a verifier"),
    ):
        with pytest.raises(BadInput, match=line):
            scored(tmp_path, folder, **settings)
    with pytest.raises(BadInput, match=r"leave out stage\.judgements"):
        ScoreResponses(judgements="j.jsonl", verifier=SOLUTION)
    with pytest.raises(BadInput, match=r"is a reward model and answers no question: leave out stage\.verifier"):
        scored(tmp_path, tiny_prm)
    with pytest.raises(BadInput, match=r"row 'r9' has 264 tokens and the verifier takes 128 with its verdict"):
        scored(tmp_path, folder, [RankedResponses("r9", "", "apples " * 128, ["4"], ["5"])])
    context = StageContext(None, tmp_path / "e", 10.0, engines=Engines())
    with pytest.raises(BadInput, match="read by transformers in this process: leave client out"):
        ScoreResponses(str(folder), verifier=SOLUTION).run(str(tmp_path / "rows.jsonl"), context)


LONG = "Mia has three apples and four pens, which are seven things in all, of which she may give you every single one"
JUDGED = RankedResponses("b/1", "b", "Q", [f"{LONG}.\nSo 7."], [f"{LONG}.\nSo 8."])


def made(folder: Path, verifier: VerifierFormat = SOLUTION) -> list[Demonstration]:
    """Demonstrations about the benchmark row's two responses, as trajectories of two steps."""
    rows = []
    for number, (text, is_right) in enumerate(((JUDGED.chosen[0], True), (JUDGED.rejected[0], False))):
        steps = text.splitlines(keepends=True)
        rows.append(Trajectory(f"p/{number}", "p", "Q\n", text, steps, [1], [2], [1], "stop", "7", "7", is_right))
    write_records(folder / "t.jsonl", rows)
    stage = MakeVerifierDemonstrations(verifier=verifier)
    return list(stage.run(str(folder / "t.jsonl"), StageContext(None, folder / "o", 10.0)))


def test_what_a_verifier_learned_to_judge_is_refused_on_both_sides(folder: Path, tmp_path: Path) -> None:
    """Before it is trained, by held_out_benchmarks, and after, by what its folder says."""
    model, tokenizer = Path(shutil.copytree(folder, tmp_path / "model")), load_tokenizer(str(folder))
    demonstrations = made(tmp_path)
    assert [row.judged for row in demonstrations] == [*JUDGED.chosen, *JUDGED.rejected]
    write_records(tmp_path / "verify.jsonl", demonstrations)
    write_records(tmp_path / "generate.jsonl", [Demonstration("g", "Q\n", "Seven, of course.")])
    parts = [DemonstrationExamples(str(tmp_path / f"{name}.jsonl"), 512) for name in ("verify", "generate")]
    examples = VerifierExamples(parts[0], parts[1], 0.25, "token").load(tokenizer)
    write_records(tmp_path / "rows.jsonl", [JUDGED, ROWS[0]])
    with pytest.raises(BadInput, match=r"demos\.jsonl holds 1 of 2 rows of .*\('b/1' is the first\)"):
        check_benchmarks(examples, [str(tmp_path / "rows.jsonl")], tokenizer, "demos.jsonl")
    write_records(tmp_path / "rows.jsonl", ROWS)
    check_benchmarks(examples, [str(tmp_path / "rows.jsonl")], tokenizer, "demos.jsonl")

    write_trained_on(model, examples, tokenizer, {"path": str(folder)})
    learned = {response_hash(text) for text in (*JUDGED.chosen, *JUDGED.rejected, "Seven, of course.")}
    assert set(read_training_responses(str(model)) or ()) == learned, "its own verdicts are no responses of a benchmark"
    assert read_training_layout(str(model)) == TrainingLayout("responses", "text")
    with pytest.raises(BadInput, match=r"was trained on 1 of 2 rows of .* \('b/1' is the first\)"):
        scored(tmp_path, model, [JUDGED, ROWS[0]])
    _, counts = scored(tmp_path, model)
    assert counts["seen_rows"] == 0


def test_a_question_about_the_first_steps_judges_the_whole_solution(tmp_path: Path) -> None:
    asked = [row for row in made(tmp_path) if row.judged]
    row = AnnotatedSolution("p/0", "p", "Q", ["So 7.", "So 8.", "Done."], [1.0, 0.0, None], 1, False)
    write_records(tmp_path / "l.jsonl", [row])
    stage = MakeVerifierDemonstrations(verifier=STEP, kind="labelled")
    found = list(stage.run(str(tmp_path / "l.jsonl"), StageContext(None, tmp_path / "o", 10.0)))
    assert len(found) == 2
    assert {"".join(one.judged.split()) for one in found} == {"So7.So8.Done."}
    assert len(asked) == 2


def test_demonstrations_that_do_not_hold_what_they_judge_are_not_passed_over(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, model = load_tokenizer(str(folder)), Path(shutil.copytree(folder, tmp_path / "model"))
    whole = made(tmp_path)
    old = Demonstration("old", "Q\n7\n" + Q, " Yes", "p")
    write_records(tmp_path / "d.jsonl", [whole[0], old])
    write_records(tmp_path / "rows.jsonl", ROWS)
    examples = DemonstrationExamples(str(tmp_path / "d.jsonl"), 512).load(tokenizer)
    with pytest.raises(BadInput, match=r"and 1 demonstrations of d\.jsonl do not hold theirs: make them again"):
        check_benchmarks(examples, [str(tmp_path / "rows.jsonl")], tokenizer, "d.jsonl")
    write_trained_on(model, examples, tokenizer, {"path": str(folder)})
    assert read_training_responses(str(model)) is None, "a list of some would call the others unseen"
    assert "some demonstrations do not say which solutions they judge" in caplog.text
    assert read_records(Demonstration, str(tmp_path / "d.jsonl"))[1].judged == ""


def test_older_demonstrations_among_rows_that_name_no_problem_are_not_passed_over(folder: Path, tmp_path: Path) -> None:
    tokenizer, model = load_tokenizer(str(folder)), Path(shutil.copytree(folder, tmp_path / "model"))
    old, plain = Demonstration("old", "Q\n7\n" + Q, " Yes", "p"), Demonstration("plain", "Q\n", "Seven.")
    write_records(tmp_path / "d.jsonl", [old, plain])
    write_records(tmp_path / "rows.jsonl", ROWS)
    examples = DemonstrationExamples(str(tmp_path / "d.jsonl"), 512).load(tokenizer)
    with pytest.raises(BadInput, match=r"and 1 demonstrations of d\.jsonl do not hold theirs: make them again"):
        check_benchmarks(examples, [str(tmp_path / "rows.jsonl")], tokenizer, "d.jsonl")
    write_trained_on(model, examples, tokenizer, {"path": str(folder)})
    assert read_training_problems(str(model)) is None
    assert read_training_responses(str(model)) is None
    write_records(tmp_path / "d.jsonl", [plain])
    examples = DemonstrationExamples(str(tmp_path / "d.jsonl"), 512).load(tokenizer)
    check_benchmarks(examples, [str(tmp_path / "rows.jsonl")], tokenizer, "d.jsonl")


@pytest.mark.parametrize("names_problems", [True, False])
def test_a_verifier_lists_its_responses_only_where_the_verifier_it_started_from_does(
    names_problems: bool, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, whole = load_tokenizer(str(folder)), made(tmp_path)
    judged = {response_hash(text) for text in (*JUDGED.chosen, *JUDGED.rejected)}
    silent = [Demonstration("old", "Q\n7\n" + Q, " Yes", "earlier")]
    silent += [] if names_problems else [Demonstration("plain", "Q\n", "Seven.")]

    def trained(name: str, rows: Sequence[Demonstration], start: Path) -> Path:
        model = Path(shutil.copytree(folder, tmp_path / name))
        write_records(tmp_path / "d.jsonl", rows)
        examples = DemonstrationExamples(str(tmp_path / "d.jsonl"), 512).load(tokenizer)
        write_trained_on(model, examples, tokenizer, {"path": str(start)})
        return model

    first = trained("first", whole, folder)
    again = trained("again", whole, first)
    assert set(read_training_responses(str(again)) or ()) == judged, "its start says what it learned"
    start = trained("silent", silent, folder)
    assert read_training_responses(str(start)) is None
    caplog.clear()
    model = trained("model", whole, start)
    assert read_training_responses(str(model)) is None, "a list of its own rows alone would call the others unseen"
    assert (
        f"{start}: a reward model or verifier that does not say what it was trained on, so neither does {model}"
        in caplog.text
    )
    problems = {problem_hash("p"), problem_hash("earlier")} if names_problems else None
    found = read_training_problems(str(model))
    assert (None if found is None else set(found)) == problems
    assert read_training_responses(str(trained("third", whole, model))) is None
