"""Published pairs and conversations, from their files to the examples of a training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from espalier.data.examples.token_examples import PreferenceExamples, WeightedExamples
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, PreferencePair
from espalier.models.load import load_tokenizer
from espalier.pipeline.pairs.import_preferences import ImportPreferences
from espalier.pipeline.problems.import_conversations import ImportConversations
from espalier.pipeline.stage import StageContext

PAIRS: list[dict[str, Any]] = [
    {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6", "score_chosen": 9.5, "score_rejected": 2.0, "id": None},
    {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 7", "id": "mine"},
    {"prompt": "4 + 3 =", "chosen": " 7", "rejected": " 8", "id": "mine"},
    {"prompt": "4 + 3 =", "chosen": " 7", "rejected": " 7"},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pairs_become_examples_and_what_is_no_pair_is_listed(kind: str, tiny_policy: Path, tmp_path: Path) -> None:
    if kind == "jsonl":
        path = lines(tmp_path / "pairs.jsonl", PAIRS)
    else:
        path = str(tmp_path / "pairs.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(PAIRS), path)
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    pairs = list(ImportPreferences(str(tiny_policy)).run(path, context))
    assert [pair.id for pair in pairs] == ["row-1", "mine", "mine~2"]
    assert [(pair.chosen_score, pair.rejected_score) for pair in pairs] == [(9.5, 2.0), (1.0, 0.0), (1.0, 0.0)]
    assert pairs[0].problem_id == pairs[1].problem_id != pairs[2].problem_id
    assert context.counts["rejected"] == 1
    (rejected,) = map(json.loads, (tmp_path / "out.rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], rejected["reason"]) == (4, "chosen and rejected are the same")
    write_records(tmp_path / "out.jsonl", pairs)
    assert read_records(PreferencePair, tmp_path / "out.jsonl") == pairs
    examples = PreferenceExamples(str(tmp_path / "out.jsonl"), 64, has_score_margin=True).load(None)
    assert [example.margin for example in examples] == [7.5, 1.0, 1.0]
    tokenizer = load_tokenizer(str(tiny_policy))
    assert examples[0].chosen_ids[-1] == tokenizer.eos_token_id


def test_pairs_without_a_prompt_get_that_of_their_id_and_partial_sides_no_end_token(
    tiny_policy: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"chosen": " 5", "reject": " 6", "id": 0, "is_full": True, "chosen_reward": 0.9, "reject_reward": 0.2},
        {"chosen": " 5", "reject": " 6", "id": 0, "is_full": False},
        {"chosen": " 7", "reject": " 8", "id": "q1", "chosen_full": True, "reject_full": False},
        {"chosen": " 7", "reject": " 8", "id": "q1"},
        {"chosen": " 7", "reject": " 8", "id": "q2"},
        {"chosen": " 7", "reject": " 8", "id": "q1", "chosen_prefix": "a", "reject_prefix": "b"},
        {"prompt": "4 + 3 =", "chosen": " 7", "rejected": " 8"},
    ]
    samples = [
        {"text": "2 + 3 =", "label": 0, "response": [" 5"], "pred": ["A"], "id": 0},
        {"text": "4 + 3 =", "id": "q1"},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    stage = ImportPreferences(str(tiny_policy), prompts=str(tmp_path / "samples.json"))
    pairs = list(stage.run(str(tmp_path / "pairs.json"), context))
    end = load_tokenizer(str(tiny_policy)).eos_token_id
    assert [(pair.chosen_ids[-1] == end, pair.rejected_ids[-1] == end) for pair in pairs] == [
        (True, True), (False, False), (True, False), (True, True),
    ]  # fmt: skip
    assert [pair.prompt for pair in pairs] == ["2 + 3 =", "2 + 3 =", "4 + 3 =", "4 + 3 ="]
    assert [pair.id for pair in pairs] == ["0", "0~2", "q1", "q1~2"]
    assert (pairs[0].chosen_score, pairs[0].rejected_score, pairs[2].chosen_score) == (0.9, 0.2, 1.0)
    assert pairs[0].rejected_ids == [*pairs[1].rejected_ids, end]
    rejected = [json.loads(line)["reason"] for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    assert [reason.partition(":")[0].partition(" (")[0] for reason in rejected] == [
        "no prompt of id 'q2'", "its sides go on from different beginnings", "no column reject",
    ]  # fmt: skip


def test_pairs_without_a_prompt_are_refused_without_a_file_of_prompts_or_with_two_of_one_id(
    tiny_policy: Path, tmp_path: Path
) -> None:
    path = lines(tmp_path / "pairs.jsonl", [{"chosen": "a", "reject": "b", "id": 1}])
    prompts = lines(tmp_path / "samples.jsonl", [{"id": 1, "text": "Q"}, {"id": "1", "text": "R"}])
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    with pytest.raises(BadInput, match=r"pairs.jsonl:1: .* do not hold their prompts: name the file"):
        list(ImportPreferences(str(tiny_policy)).run(path, context))
    with pytest.raises(BadInput, match=r"samples.jsonl:2: id '1' has another prompt above"):
        list(ImportPreferences(str(tiny_policy), prompts=prompts).run(path, context))


def test_a_prompt_that_a_row_says_twice_and_otherwise_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    """Generated rows hold prompt and response as `text`, beside `prompt`."""
    path = lines(tmp_path / "pairs.jsonl", [{"chosen": " 5", "reject": " 6", "id": 1}])
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    prompts = lines(tmp_path / "s.jsonl", [{"id": 1, "prompt": "2 + 3 =", "text": "2 + 3 = 5"}])
    with pytest.raises(BadInput, match=r"s.jsonl:1: text and prompt differ"):
        list(ImportPreferences(str(tiny_policy), prompts=prompts).run(path, context))
    prompts = lines(tmp_path / "s.jsonl", [{"id": 1, "prompt": "2 + 3 =", "text": None}])
    (pair,) = ImportPreferences(str(tiny_policy), prompts=prompts).run(path, context)
    assert pair.prompt == "2 + 3 ="


def test_pairs_that_repeat_the_prompt_of_their_id_are_rejected_and_empty_columns_are_none(
    tiny_policy: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"chosen": "2 + 3 = 5", "reject": "2 + 3 = 6", "id": 1},
        {"chosen": " 5", "reject": " 6", "id": 1, "chosen_full": None, "reject_full": None, "is_full": False},
        {"chosen": " 5", "reject": " 6", "id": 1, "chosen_full": None, "reject_full": None, "is_full": None},
    ]
    path = lines(tmp_path / "pairs.jsonl", rows)
    prompts = lines(tmp_path / "s.jsonl", [{"id": 1, "text": "2 + 3 ="}])
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    partial, whole = ImportPreferences(str(tiny_policy), prompts=prompts).run(path, context)
    assert len(whole.chosen_ids) == len(partial.chosen_ids) + 1
    (rejected,) = (json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines())
    assert rejected["reason"] == "chosen and reject repeat the prompt of their id"


def test_conversations_become_examples_whose_weights_mask_all_but_the_assistant(
    chat_model: Path, tmp_path: Path
) -> None:
    turns = [("user", "2 + 3?"), ("assistant", "5"), ("user", "and 4?"), ("assistant", "9")]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"prompt": "2 + 3 =", "completion": " 5"},
        {"prompt": "no completion"},
    ]
    path = lines(tmp_path / "chats.jsonl", rows)
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    records = list(ImportConversations(str(chat_model)).run(path, context))
    write_records(tmp_path / "out.jsonl", records)
    examples = WeightedExamples(str(tmp_path / "out.jsonl"), 128).load(None)
    tokenizer = load_tokenizer(str(chat_model))

    def learnt(number: int) -> str:
        example = examples[number]
        pairs = zip(example.ids[example.prompt_length :], example.weights, strict=True)
        return str(tokenizer.decode([token for token, weight in pairs if weight]))

    end = tokenizer.eos_token
    assert [learnt(0), learnt(1)] == [f"5{end}9{end}", f" 5{end}"]
    assert context.counts["rejected"] == 1
    context = StageContext(None, tmp_path / "last.jsonl", 10.0)
    (last, _) = ImportConversations(str(chat_model), learns="last").run(path, context)
    assert tokenizer.decode(last.prompt_ids).endswith("and 4?" + end + "\nassistant: ")
    assert tokenizer.decode(last.response_ids) == f"9{end}\n"
    assert last.weights == [1.0] * (len(last.weights) - 1) + [0.0]


def test_the_last_turn_is_learnt_of_a_template_that_leaves_out_earlier_thoughts(
    chat_model: Path, tmp_path: Path
) -> None:
    """Such a template cannot teach the earlier turns: their thoughts are gone once the conversation goes on."""
    tokenizer = load_tokenizer(str(chat_model))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    shutil.copytree(chat_model, tmp_path / "forgets")
    tokenizer.save_pretrained(tmp_path / "forgets")
    turns = [
        ("user", "2?"),
        ("assistant", "<think>two</think>2"),
        ("user", "3?"),
        ("assistant", "<think>three</think>3"),
    ]
    path = lines(tmp_path / "chats.jsonl", [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    with pytest.raises(BadInput, match=r"learn the last turn alone \(stage\.learns=last\)"):
        list(ImportConversations(str(tmp_path / "forgets")).run(path, context))
    (last,) = ImportConversations(str(tmp_path / "forgets"), learns="last").run(path, context)
    learnt = [token for token, weight in zip(last.response_ids, last.weights, strict=True) if weight]
    assert tokenizer.decode(learnt) == "<think>three</think>3" + tokenizer.eos_token
    assert "two" not in tokenizer.decode(last.prompt_ids)


def test_settings_that_cannot_be_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"stage\.learns must be one of all, last, got 'first'"):
        ImportConversations(str(tiny_policy), learns="first")
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    with pytest.raises(BadInput, match=r"name one of the two: input=FILE, or stage\.hub=NAME"):
        list(ImportPreferences(str(tiny_policy)).run("", context))
