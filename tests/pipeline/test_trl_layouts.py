"""TRL's layouts of columns, those of every trainer (its page "Dataset formats"): each from rows to what is learnt.

| layout, plain and conversational | trainers |
|---|---|
| language modelling | SFT |
| prompt-completion | SFT, GKD |
| preference, also with an implicit prompt | DPO, CPO, ORPO, Reward |
| unpaired preference | KTO, BCO |
| prompt-only | GRPO, RLOO, OnlineDPO, NashMD, XPO |
| stepwise supervision | PRM |
"""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from espalier.data.examples.outcome_examples import JudgedResponse, JudgedResponseExamples
from espalier.data.examples.step_examples import AnnotatedSolutionExamples
from espalier.data.examples.token_examples import WeightedExamples
from espalier.data.jsonl import write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, PreferencePair, Problem
from espalier.data.sources import Row
from espalier.data.splits import passage_key
from espalier.data.tasks.problem_file import ProblemFile
from espalier.models.load import load_tokenizer
from espalier.pipeline.pairs.import_preferences import ImportPreferences
from espalier.pipeline.prm.import_steps import ImportSteps
from espalier.pipeline.problems.import_conversations import ImportConversations
from espalier.pipeline.problems.list_problems import ListProblems
from espalier.pipeline.stage import StageContext


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def model(chat_model: Path) -> str:
    return str(chat_model)


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return StageContext(None, tmp_path / "out.jsonl", 10.0)


def file_of(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def reasons(folder: Path) -> list[tuple[int, str]]:
    rows = map(json.loads, (folder / "out.rejected.jsonl").read_text().splitlines())
    return [(row["line"], row["reason"]) for row in rows]


# Each row, and what the loss reads of it (END: the end token). The first token of a text is predicted by nothing.
SFT: dict[str, tuple[dict[str, Any], str]] = {
    "language modelling, plain": ({"text": "2 + 3 = 5"}, " + 3 = 5END"),
    "language modelling, conversational": ({"messages": [*user("2 + 3?"), *assistant("5")]}, "5END"),
    "prompt-completion, plain": ({"prompt": "2 + 3 =", "completion": " 5"}, " 5END"),
    "prompt-completion, conversational": ({"prompt": user("2 + 3?"), "completion": assistant("5")}, "5END"),
}


@pytest.mark.parametrize("layout", SFT)
def test_the_layouts_of_sft(layout: str, model: str, tmp_path: Path, context: StageContext) -> None:
    fields, learnt = SFT[layout]
    write_records(context.output, list(ImportConversations(model).run(file_of(tmp_path, fields), context)))
    (example,) = WeightedExamples(str(context.output), 64).load(None)
    tokenizer = load_tokenizer(model)
    weights = zip(example.ids[example.prompt_length :], example.weights, strict=True)
    found = tokenizer.decode([token for token, weight in weights if weight])
    assert found == learnt.replace("END", str(tokenizer.eos_token))
    if "text" in fields:
        assert example.prompt_length == 1, "only the first token is not learnt"
        assert example.ids == [*tokenizer(fields["text"]).input_ids, tokenizer.eos_token_id]


PAIRS: dict[str, dict[str, Any]] = {
    "preference, plain": {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"},
    "preference, conversational": {"prompt": user("2 + 3?"), "chosen": assistant("5"), "rejected": assistant("6")},
    "implicit prompt, plain": {"chosen": "2 + 3 = 5", "rejected": "2 + 3 = 6"},
    "implicit prompt, conversational": {"chosen": [*user("2 + 3?"), *assistant("5")],
                                        "rejected": [*user("2 + 3?"), *assistant("6")]},
}  # fmt: skip


@pytest.mark.parametrize("layout", PAIRS)
def test_the_layouts_of_dpo_and_of_rewards(layout: str, model: str, tmp_path: Path, context: StageContext) -> None:
    (pair,) = ImportPreferences(model).run(file_of(tmp_path, PAIRS[layout]), context)
    assert isinstance(pair, PreferencePair)
    end = load_tokenizer(model).eos_token
    is_chat = "conversational" in layout
    asked = f"user: 2 + 3?{end}\nassistant: " if is_chat else "2 + 3 ="
    texts = [load_tokenizer(model).decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)]
    space = "" if is_chat else " "
    assert [texts[0].removeprefix("<s>"), *texts[1:]] == [asked, f"{space}5{end}", f"{space}6{end}"]


JUDGED: dict[str, tuple[Any, Any]] = {
    "plain": ("2 + 3 =", [" 5", " 6"]),
    "conversational": (user("2 + 3?"), [assistant("5"), assistant("6")]),
}


@pytest.mark.parametrize("layout", JUDGED)
def test_the_layouts_of_kto(layout: str, model: str, tmp_path: Path, context: StageContext) -> None:
    prompt, (good, bad) = JUDGED[layout]
    rows = [
        {"prompt": prompt, "completion": good, "label": True},
        {"prompt": prompt, "completion": bad, "label": False},
    ]
    records = list(ImportPreferences(model).run(file_of(tmp_path, *rows), context))
    assert [record.label for record in records] == [True, False]
    assert records[0].problem_id == records[1].problem_id
    write_records(context.output, records)
    examples = JudgedResponseExamples(str(context.output), 64).load(load_tokenizer(model))
    pair = {"prompt": prompt, "chosen": good, "rejected": bad}
    (same,) = ImportPreferences(model).run(file_of(tmp_path, pair), context)
    assert [(one.ids, one.prompt_length, one.value) for one in examples] == [
        ([*same.prompt_ids, *same.chosen_ids], len(same.prompt_ids), 1.0),
        ([*same.prompt_ids, *same.rejected_ids], len(same.prompt_ids), 0.0),
    ]


@pytest.mark.parametrize("label", [0, 1, 0.0, "false", True])
def test_a_completion_with_any_label_is_not_imitated(
    label: object, model: str, tmp_path: Path, context: StageContext
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "2 + 3 =", "completion": " 6", "label": label},
                                  {"prompt": "2 + 3 =", "completion": " 5", "label": None},
                                  {"text": "2 + 3 = 5", "label": 1}]  # fmt: skip
    assert len(list(ImportConversations(model).run(file_of(tmp_path, *rows), context))) == 2
    ((line, reason),) = reasons(tmp_path)
    assert (line, reason.partition(",")[0]) == (1, "its label judges the response")


@pytest.mark.parametrize("text", ["2 + 3", "2 + 3END"])
def test_a_text_has_one_end_token_where_the_tokenizer_adds_one_too(text: str, model: str) -> None:
    tokenizer = load_tokenizer(model)
    end = tokenizer.eos_token_id
    ids = [*tokenizer("2 + 3").input_ids, end]
    tokenizer._tokenizer.post_processor = TemplateProcessing("$A </e>", special_tokens=[("</e>", end)])
    row = Row("f", 1, {"text": text.replace("END", tokenizer.eos_token)})
    assert tokenizer(row.fields["text"]).input_ids[-1] == end
    record = ImportConversations(model).read(row, tokenizer)
    found = [*record.prompt_ids, *record.response_ids]
    assert found[-3:] == ids[-3:]
    assert found.count(end) == 1


def prompts(folder: Path, *rows: dict[str, Any], kind: str = "short_answer") -> list[Problem]:
    return ProblemFile(file_of(folder, *rows), kind=kind).problems("train")


def test_a_row_of_prompts_asks_its_prompt_and_keeps_what_a_problem_has(tmp_path: Path) -> None:
    more: dict[str, Any] = {"options": ["4", "5"], "context": "Sums.", "info": {"subject": "sums"}}
    row = {"prompt": "What is 2+3?", "problem": "arithmetic", "messages": user("?"), "answer": "B", "id": "a", **more}
    assert prompts(tmp_path, row, kind="choice") == [
        Problem("a", "What is 2+3?", "B", **more, passage_id=passage_key("Sums."))
    ]


def test_a_plain_prompt_is_put_to_the_model_as_it_stands(model: str, tmp_path: Path) -> None:
    """White space at its end too: a base model goes on from there."""
    text = "  Mia has 3 apples.\nHow many?\n"
    (problem,) = prompts(tmp_path, {"prompt": text})
    tokenizer = load_tokenizer(model)
    encoded = PromptTemplate("{question}", is_chat=False).encode(tokenizer, problem)
    assert (encoded.text, encoded.ids) == (text, tokenizer(text).input_ids)


@pytest.mark.parametrize(("more", "message"), [
    ({"prompt": [*user("2 + 3?"), *assistant("So")]}, "prompt has the turns user, assistant: one of the user is read"),
    ({"options": {"A": "4"}}, "options must be list.*: give the column another name"),
    ({"info": {"option_order": [1]}}, "info.option_order must hold the place of every option once"),
    ({"answer": "2 + 3 = 5\n#### "}, "the answer has nothing behind its last ####"),
])  # fmt: skip
def test_a_row_of_prompts_that_would_lose_something_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        prompts(tmp_path, {"prompt": "2 + 3?", **more})


@pytest.mark.parametrize(("answer", "kind", "gold"), [
    ("48/2 = 24\n#### 24", "marked_number", "24"),
    ("So\n#### 12\nor rather\n#### $1,200\n", "marked_number", "1200"),
    ("48/2 = 24%\n#### 24%", "number", "24%"),
    ("It is\n#### Paris", "short_answer", "Paris"),
    ("no #### marker", "short_answer", "no #### marker"),
])  # fmt: skip
def test_the_gold_of_a_worked_solution_stands_behind_its_marker(
    answer: str, kind: str, gold: str, tmp_path: Path
) -> None:
    (problem,) = prompts(tmp_path, {"prompt": "?", "answer": answer}, kind=kind)
    assert problem.gold == gold
    assert ProblemFile(kind=kind).grade(problem.gold, f"#### {gold}").is_correct


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_layouts_of_reinforcement_learning(kind: str, model: str, tmp_path: Path) -> None:
    """A turn of the system is read where it is the prompt's own; other columns but the answer are not read."""
    system = {"role": "system", "content": "Be brief."}
    rows: list[dict[str, Any]] = [
        {"prompt": [*user("2 + 3?")], "ground_truth": "5"},
        {"prompt": [system, *user("4 + 3?")], "ground_truth": None},
    ]
    folder = tmp_path / "problems"
    folder.mkdir()
    if kind == "jsonl":
        rows += [{"prompt": "The sky is"}, {"prompt": "9 - 2 =", "answer": 7, "id": "mine"}]
        rows.append({"prompt": [{"role": "system", "content": "Be rude."}, *user("1 + 1?")]})
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    template = PromptTemplate("{question}", system="Be brief.")
    task = ProblemFile(str(folder), template, kind="number")
    context = StageContext(task, tmp_path / "out.jsonl", 10.0)
    problems = list(ListProblems("train").run("", context))
    asked = [(problem.id, problem.question, problem.gold) for problem in problems]
    expected = [("problem_file-train-0", "2 + 3?", "5"), ("problem_file-train-1", "4 + 3?", "")]
    more = [("problem_file-train-2", "The sky is", ""), ("mine", "9 - 2 =", "7")]
    assert asked == expected + (more if kind == "jsonl" else [])
    end = load_tokenizer(model).eos_token
    text = template.encode(load_tokenizer(model), problems[1]).text
    assert text == f"system: Be brief.{end}\nuser: 4 + 3?{end}\nassistant: "
    if kind == "jsonl":
        ((line, reason),) = reasons(tmp_path)
        assert (line, reason.endswith("where task.template.system is the same text")) == (5, True)


def test_the_layout_of_prm(model: str, tmp_path: Path, context: StageContext) -> None:
    row = {"prompt": "2 + 3 + 1?", "completions": ["2 + 3 = 5", "5 + 1 = 7"], "labels": [True, False]}
    write_records(context.output, list(ImportSteps("trl").run(file_of(tmp_path, row), context)))
    (example,) = AnnotatedSolutionExamples(str(context.output), 64).load(load_tokenizer(model))
    assert example.values == [1.0, 0.0]


def test_judged_steps_of_a_parquet_file_and_of_a_data_set_are_those_of_json_lines(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"{n} + 1 + 1?", "completions": [f"{n + 1}", f"{n + 2}"], "labels": [True, n > 1]}
            for n in range(3)]  # fmt: skip
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "test.parquet")
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    expected = list(ImportSteps("trl").run(file_of(tmp_path, *rows), context))
    assert [row.labels for row in expected] == [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    assert list(ImportSteps("trl").run(str(folder / "test.parquet"), context)) == expected
    assert list(ImportSteps("trl", hub=str(folder), split="test").run("", context)) == expected
    with pytest.raises(BadInput, match=r"no split|Unknown split|check its name, split and revision"):
        list(ImportSteps("trl", hub=str(folder), split="train").run("", context))
    with pytest.raises(BadInput, match="name one of the two"):
        list(ImportSteps("trl").run("", context))


@pytest.mark.parametrize("kind", ["folder of Parquet", "saved data set"])
def test_rows_of_a_data_set_are_those_of_its_file(kind: str, model: str, tmp_path: Path) -> None:
    """The hub's own name is read the same way, through the library `datasets`."""
    import datasets

    rows = [{"prompt": user(f"{n} + 1?"), "completion": assistant(str(n + 1)), "label": n % 2 == 0} for n in range(3)]
    table = datasets.Dataset.from_list(rows)
    hub = tmp_path / "set"
    if kind == "saved data set":
        table.save_to_disk(hub)
    else:
        hub.mkdir()
        table.to_parquet(hub / "train.parquet")
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    found = list(ImportPreferences(model, hub=str(hub)).run("", context))
    assert found == list(ImportPreferences(model).run(file_of(tmp_path, *rows), context))
    assert [type(record) for record in found] == [JudgedResponse] * 3


def test_a_judged_response_is_not_imitated_and_a_label_that_is_none_is_no_judgement(
    model: str, tmp_path: Path, context: StageContext, caplog: pytest.LogCaptureFixture
) -> None:
    """-100, which marks what no loss reads, is true as a bool."""
    row = {"prompt": "2 + 3 =", "completion": " 6", "label": False}
    path = file_of(tmp_path, row, {"text": ""}, {"text": "2"})
    assert len(list(ImportConversations(model).run(path, context))) == 1
    assert [line for line, _ in reasons(tmp_path)] == [1, 2]
    assert f"{path}:1: its label judges the response, and wrong ones would be learnt: read it by pairs/" in caplog.text
    rows = [{**row, "label": label} for label in (-100, None, "good", 2)]
    path = file_of(tmp_path, row, *rows, {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"},
                   {"prompt": user("2 + 3?"), "completion": user("6"), "label": True},
                   {"prompt": user("2 + 3?"), "completion": " 6", "label": True})  # fmt: skip
    assert len(list(ImportPreferences(model).run(path, context))) == 1
    found = reasons(tmp_path)
    assert [line for line, _ in found] == [2, 3, 4, 5, 6, 7, 8]
    assert found[0][1].startswith("label must be true, false or a probability in [0, 1], got -100")
    assert found[4][1] == ("its columns are those of a PreferencePair, and the rows above are JudgedResponse: put it "
                           "into a file of its own")  # fmt: skip
    assert found[5][1] == "completion holds a turn that is not the assistant's: move it into prompt"
    assert found[6][1] == "completion must be a list of turns"


def test_a_file_that_is_written_to_while_it_is_read_ends_the_import(
    model: str, tmp_path: Path, context: StageContext
) -> None:
    path = file_of(tmp_path, {"text": "2"}, {"text": "3"})
    records = ImportConversations(model).run(path, context)
    next(records)
    with Path(path).open("a") as file:
        file.write('{"text": "4"}\n')
    with pytest.raises(BadInput, match="was written over while it was read: run the command again"):
        list(records)


def test_ids_of_a_prompt_alone_are_refused(model: str, tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [JudgedResponse("a", "p", "2 + 3 =", " 5", True, [5, 6])])
    with pytest.raises(BadInput, match=r"rows\.jsonl: 'a' has ids of its prompt or of its completion alone: give both"):
        JudgedResponseExamples(str(tmp_path / "rows.jsonl"), 64).load(load_tokenizer(model))
