"""Prompt templates: what is rendered, what is refused, the ids, and the page that shows them."""

import copy
import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from espalier.data.answers.grade import Grade
from espalier.data.examples.token_examples import encode_demonstration
from espalier.data.jsonl import write_records
from espalier.data.prompts import PromptTemplate, encode_prompt, encode_text
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.shots import Shot, read_shots
from espalier.pipeline.pages.show_prompt import ShowPrompt, remarks, render_page, render_terminal, token_pieces, visible
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.entrypoint import build, register_schemas

ROOT = Path(__file__).resolve().parent.parent.parent
CONF = ROOT / "conf"
PROMPTS = sorted(path.stem for path in (CONF / "prompt").glob("*.yaml"))
SUM = Problem("p-1", "What is 2 + 3?", "5")
PETS = Problem("p-2", "Who barks?", "B", {}, "Rex is a dog.\nTom is a cat.", ["Tom", "Rex", "Both"])
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def stage_config(name: str, *overrides: str) -> Any:
    """The config of a stage."""
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = compose(config_name=name, overrides=list(overrides))
    OmegaConf.set_struct(composed, False)
    return OmegaConf.to_object(composed)


def prompt_config(name: str) -> PromptTemplate:
    """The template of conf/prompt/`name`.yaml."""
    template = build(stage_config("stage", f"+prompt@task={name}", "output=x", "+stage={}").task)
    assert isinstance(template, PromptTemplate)
    return template


@pytest.fixture
def bos_tokenizer(demonstration_texts: list[str]) -> Any:
    """A tokenizer that begins every text with <s> and ends it with <|end|>, as some published ones do."""
    from tokenizers.processors import TemplateProcessing

    from espalier.models.tiny import build_tokenizer

    tokenizer = build_tokenizer(demonstration_texts, vocab_size=300)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ids = [("<s>", tokenizer.bos_token_id), ("<|end|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <|end|>", special_tokens=ids)
    return tokenizer


# --- text ---------------------------------------------------------------------------------------------------


def test_the_prompt_of_rlcr_asks_for_the_tags_that_are_read_in_their_order() -> None:
    tags = re.findall(r"<\w+> </\w+>", prompt_config("chat_rlcr").instruction)
    assert tags == [f"<{name}> </{name}>" for name in ("think", "answer", "analysis", "confidence")]


def test_the_default_is_the_question_and_a_newline() -> None:
    assert PromptTemplate().render(SUM) == "What is 2 + 3?\n"


def test_every_field_is_put_in() -> None:
    template = PromptTemplate(template="{context}|{question}|{options}|{letters}|{premises}")
    assert template.render(PETS) == (
        "Rex is a dog.\nTom is a cat.|Who barks?|A. Tom\nB. Rex\nC. Both|A, B or C|Rex is a dog.\nTom is a cat."
    )


def test_listed_premises_stand_one_a_line() -> None:
    problem = Problem("p", "Tom barks.", "False", {"premises": ["All dogs bark.", "Tom is no dog."]}, "All dogs bark.")
    assert PromptTemplate(template="{premises}\n{question}").render(problem) == (
        "All dogs bark.\nTom is no dog.\nTom barks."
    )


@pytest.mark.parametrize(
    ("style", "lines"),
    [("A.", "A. x\nB. y"), ("(A)", "(A) x\n(B) y"), ("A)", "A) x\nB) y"), ("[A]", "[A] x\n[B] y")],
)
def test_letters_are_written_in_the_asked_style(style: str, lines: str) -> None:
    template = PromptTemplate(template="{options}", option_style=style)
    assert template.render(Problem("p", "q", "A", options=["x", "y"])) == lines


def test_an_option_keeps_what_looks_like_a_letter() -> None:
    problem = Problem("p", "q", "A", options=["B. t. toxins", "A) all of it"])
    assert PromptTemplate(template="{options}").render(problem) == "A. B. t. toxins\nB. A) all of it"


@pytest.mark.parametrize(
    "question",
    [r"Find $\frac{1}{2} + \{x\}$", "{question} {options} {no_field}", "{}{0}{{x}}%s {a!r:>3}", "}{", r"\g<1> \1 \n"],
)
def test_a_question_survives_whatever_it_holds(question: str) -> None:
    template = PromptTemplate(template="Q: {question}\nA:", shots=[{"question": question, "response": question}])
    other = Problem("p", question + "!", "1", context=question)
    assert template.render(other) == f"Q: {question}\nA:{question}\n\nQ: {question}!\nA:"


def test_braces_of_a_template_stand_for_themselves_unless_they_hold_a_name() -> None:
    template = PromptTemplate(template=r"{question} \boxed{} \frac{1}{2} { x } {{answer}} {{question}}")
    assert template.render(SUM) == r"What is 2 + 3? \boxed{} \frac{1}{2} { x } {answer} {question}"


def test_an_empty_context_takes_its_newlines_along() -> None:
    template = PromptTemplate(template="{context}\n\n{question}")
    assert template.render(SUM) == "What is 2 + 3?"
    assert template.render(PETS) == "Rex is a dog.\nTom is a cat.\n\nWho barks?"


def test_blocks_stand_in_order_and_empty_ones_fall_away() -> None:
    template = PromptTemplate(
        template="Q: {question}\nA:",
        instruction="Add.",
        shots=[{"question": "1 + 1?", "response": "2"}],
        separator="\n---\n",
        before_response=" ",
        continues=" It is",
    )
    assert template.render(SUM) == "Add.\n---\nQ: 1 + 1?\nA: It is 2\n---\nQ: What is 2 + 3?\nA: It is"
    assert replace(template, instruction="", shots=[]).render(SUM) == "Q: What is 2 + 3?\nA: It is"
    assert template.completion("5") == " 5"


# --- worked examples ----------------------------------------------------------------------------------------


def asked(template: PromptTemplate, problem: Problem) -> list[str]:
    """The questions of the examples shown with a problem whose template is `{question}`."""
    return template.render(problem).split("\n\n")[:-1]


def test_the_first_examples_are_shown_and_never_the_problem_itself() -> None:
    shots = [{"question": f"q{i}", "response": "."} for i in range(4)]
    template = PromptTemplate(template="{question}", shots=shots, num_shots=2)
    assert asked(template, Problem("p", "other", "1")) == ["q0.", "q1."]
    assert asked(template, Problem("p", " q0\n", "1")) == ["q1.", "q2."]
    assert asked(replace(template, num_shots=None), Problem("p", "q3", "1")) == ["q0.", "q1.", "q2."]
    assert asked(replace(template, num_shots=0), SUM) == []


def test_a_question_about_another_context_is_another_problem() -> None:
    shots = [{"question": "Who barks?", "response": ".", "context": "Rex is a dog.", "options": ["Rex", "Tom"]}]
    template = PromptTemplate(template="{context}\n{question}\n{options}", shots=shots)
    assert template.render(PETS).startswith("Rex is a dog.\nWho barks?\nA. Rex\nB. Tom.\n\nRex is a dog.\nTom is")
    assert template.render(replace(PETS, context="Rex  is a dog.")).count("Who barks?") == 1


def test_examples_of_a_file_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "shots.jsonl"
    write_records(path, [Shot(f"q{i}", f"r{i}", id=f"x-{i}") for i in range(50)])
    template = PromptTemplate(template="{question}", shots_path=str(path), num_shots=3)
    assert template.files() == [str(path)]
    drawn = asked(template, SUM)
    assert len(set(drawn)) == 3
    assert drawn == asked(replace(template), SUM)
    assert drawn != asked(replace(template, seed=1), SUM)
    first = drawn[0].split("r")[0]
    without = asked(template, Problem("p", first, "1"))
    assert len(without) == 3
    assert without[:2] == drawn[1:]
    assert asked(template, Problem("x-" + first[1:], "other words", "1")) == without


def test_demonstrations_serve_as_examples(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    write_records(
        path, [Demonstration("g-1/gold", "Context.\n1 + 1?\n", "2"), Demonstration("g-2/gold", "2 + 2?\n", "4")]
    )
    template = PromptTemplate(template="Q: {question}\nA:", shots_path=str(path), num_shots=1, before_response=" ")
    assert template.render(Problem("g-1", "another text", "2")) == "Q: 2 + 2?\nA: 4\n\nQ: another text\nA:"
    assert template.render(Problem("z", "2 + 2?", "2")) == "Q: Context.\n1 + 1?\nA: 2\n\nQ: 2 + 2?\nA:"
    assert template.render(Problem("z", "1 + 1?", "2", context="Context.")).startswith("Q: 2 + 2?")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"shots\.jsonl: the file is empty"),
        (b"\r\n\r\n", r"shots\.jsonl: the file is empty"),
        (b'{"question": "q", "response": "r"}\n{"question": "q', r"shots\.jsonl:2: not a JSON object"),
        (b'{"question": "q"}\n', r"shots\.jsonl:1: Shot lacks the field 'response'"),
        (b'{"question": 3, "response": "r"}\n', r"shots\.jsonl:1: question must be str"),
        (b'{"prompt": "q", "response": "r"}\n', r"shots\.jsonl:1: Demonstration has no field 'response'"),
        (b"\x1f\x8b\x08\x00garbage", r"shots\.jsonl: a damaged gzip file"),
        (b"3\n", r"shots\.jsonl:1: a row must be a JSON object, got 3"),
    ],
)
def test_a_bad_file_of_examples_is_named_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "shots.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        PromptTemplate(shots_path=str(path), num_shots=1).render(SUM)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_dos_lines_and_gzip_are_read(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "shots.jsonl"
    text = b'\xef\xbb\xbf{"question": "q", "response": "r"}\r\n{"question": "s", "response": "t"}\r\n'
    path.write_bytes(pack(text))
    assert [shot.question for shot in read_shots(str(path))] == ["q", "s"]


def test_too_few_examples_and_a_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shots.jsonl"
    write_records(path, [Shot("q", "r")])
    with pytest.raises(BadInput, match=r"shots\.jsonl holds 1 worked examples, prompt\.num_shots is 2"):
        PromptTemplate(shots_path=str(path), num_shots=2).render(SUM)
    with pytest.raises(BadInput, match="is a folder where a file is expected"):
        PromptTemplate(shots_path=str(tmp_path), num_shots=1).render(SUM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "{question} {answer}"}, r"template has an unknown field \{answer\}: the fields are \{question\}, "
         r"\{context\}, \{premises\}, \{options\}, \{letters\}; write \{\{answer\}\}"),
        ({"instruction": r"Use \boxed{x}."}, r"instruction has an unknown field \{x\}"),
        ({"template": "no field"}, "names no field"),
        ({"template": ""}, "names no field"),
        ({"template": None}, "prompt.template must be a string"),
        ({"stop": "\n"}, "prompt.stop must be a list"),
        ({"stop": [""]}, "prompt.stop must be a list of strings"),
        ({"num_shots": 1}, "num_shots is 1, there are 0"),
        ({"num_shots": "4"}, "num_shots must be null or a whole number"),
        ({"num_shots": -1}, "num_shots must be null or a whole number"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"is_chat": "yes"}, "is_chat must be null, true or false"),
        ({"option_style": "1."}, "option_style must be the first letter"),
        ({"shots_path": "x.jsonl"}, "needs prompt.num_shots"),
        ({"shots_path": "x.jsonl", "shots": [{"question": "q", "response": "r"}]}, "both given"),
        ({"shots": ["q"]}, r"shots\[0\] must have the fields question and response"),
        ({"shots": [{"question": "q", "answer": "r"}]}, r"shots\[0\]: Shot has no field 'answer'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_refused_with_its_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        PromptTemplate(**arguments)


def test_options_that_are_asked_for_and_missing_are_refused() -> None:
    with pytest.raises(BadInput, match=r"problem 'p-1' has 0 options and the prompt names \{options\}"):
        PromptTemplate(template="{question}\n{options}").render(SUM)
    with pytest.raises(BadInput, match="has 27 options"):
        PromptTemplate(template="{options}").render(replace(PETS, options=["x"] * 27))


# --- ids ----------------------------------------------------------------------------------------------------


def test_the_ids_of_a_plain_prompt_are_those_of_its_text(tokenizer: Any) -> None:
    encoded = PromptTemplate().encode(tokenizer, SUM)
    assert encoded.text == "What is 2 + 3?\n"
    assert encoded.ids == tokenizer(encoded.text).input_ids
    assert tokenizer.decode(encoded.ids) == encoded.text


def test_a_task_without_a_template_is_encoded_by_its_prompt(task: Any, tokenizer: Any) -> None:
    problem = task.problems("dev")[0]
    encoded = encode_prompt(task, tokenizer, problem)
    assert encoded.text == task.prompt(problem)
    assert encoded.ids == tokenizer(encoded.text).input_ids


def test_the_begin_token_stands_once_and_the_end_token_not_at_all(bos_tokenizer: Any) -> None:
    bos, eos = bos_tokenizer.bos_token_id, bos_tokenizer.eos_token_id
    plain = PromptTemplate().encode(bos_tokenizer, SUM).ids
    assert plain[0] == bos
    assert plain.count(bos) == 1
    assert eos not in plain
    written = PromptTemplate(template="<s>{question}\n").encode(bos_tokenizer, SUM).ids
    assert written == plain


@pytest.mark.parametrize("begin", ["<s>", ""])
def test_a_chat_prompt_has_the_special_tokens_of_its_template_alone(begin: str, bos_tokenizer: Any) -> None:
    bos_tokenizer.chat_template = begin + CHATML
    template = PromptTemplate(template="{question}", is_chat=True, system="Add.")
    encoded = template.encode(bos_tokenizer, SUM)
    assert encoded.text == begin + "<|system|>Add.<|end|><|user|>What is 2 + 3?<|end|><|assistant|>"
    assert encoded.ids.count(bos_tokenizer.bos_token_id) == len(begin) // 3
    own = bos_tokenizer.apply_chat_template(template.messages(SUM), add_generation_prompt=True, return_dict=False)
    assert encoded.ids == own


def test_the_text_of_a_chat_prompt_read_back_has_the_same_ids(bos_tokenizer: Any) -> None:
    bos_tokenizer.chat_template = "<s>" + CHATML
    encoded = PromptTemplate(template="{question}", is_chat=True).encode(bos_tokenizer, SUM)
    assert encode_text(bos_tokenizer, encoded.text, "here") == encoded.ids


def test_what_opens_the_response_follows_the_generation_prompt(tokenizer: Any) -> None:
    chat = replace_template(tokenizer, CHATML)
    template = PromptTemplate(
        template="{question}", is_chat=True, continues="Thought 1:", before_response=" ", instruction="Think.",
        shots=[{"question": "1 + 1?", "response": "Two."}],
    )  # fmt: skip
    assert template.messages(SUM) == [
        {"role": "user", "content": "Think.\n\n1 + 1?"},
        {"role": "assistant", "content": "Thought 1: Two."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    assert template.encode(chat, SUM).text.endswith("<|user|>What is 2 + 3?<|end|><|assistant|>Thought 1:")
    assert template.strip_opening("\nThought 1: Five.") == " Five."
    assert template.strip_opening(" Five.") == " Five."


def replace_template(tokenizer: Any, chat_template: str | None) -> Any:
    """A copy of the tokenizer with a chat template."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = chat_template
    return chat


def test_a_tokenizer_without_chat_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match="has no chat template: choose a prompt with is_chat: false"):
        PromptTemplate(template="{question}", is_chat=True).encode(tokenizer, SUM)


def test_a_prompt_that_leaves_it_open_is_a_turn_where_the_tokenizer_has_a_template(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What the template adds by itself, a system turn and the opening of the answer, is said once; the same text as a
    prompt that asks for a chat has."""
    chat = replace_template(tokenizer, "<|system|>You are Q.<|end|>" + CHATML)
    chat.name_or_path = "a model of this test"
    template = prompt_config("plain")
    assert template.encode(tokenizer, SUM).text == "What is 2 + 3?\n"
    with caplog.at_level("INFO"):
        first, again = (template.encode(chat, SUM) for _ in range(2))
    assert first.text == "<|system|>You are Q.<|end|><|user|>What is 2 + 3?<|end|><|assistant|>"
    assert first == again == prompt_config("chat").encode(chat, SUM)
    lines = [record.getMessage() for record in caplog.records if "a model of this test" in record.getMessage()]
    assert len(lines) == 1
    assert "'<|system|>You are Q.<|end|><|user|>' before the question and '<|end|><|assistant|>' behind it" in lines[0]


def test_a_published_layout_stays_text_whatever_the_tokenizer_has(tokenizer: Any) -> None:
    chat = replace_template(tokenizer, CHATML)
    for name in ("gsm8k_few_shot", "math_minerva", "math_vineppo", "react_logic"):
        assert not prompt_config(name).writes_chat(chat)


def test_turns_that_a_chat_template_refuses_end_in_one_line(tokenizer: Any) -> None:
    chat = replace_template(tokenizer, "{{ raise_exception('System role not supported') }}")
    with pytest.raises(BadInput, match=r"refuses the turns system, user \(System role not supported\)") as caught:
        PromptTemplate(template="{question}", is_chat=True, system="Add.").encode(chat, SUM)
    assert "\n" not in str(caught.value)


def test_an_empty_prompt_and_half_a_character_are_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match="problem 'p': the prompt is empty"):
        PromptTemplate(template="{question}").encode(tokenizer, Problem("p", "", "1"))
    with pytest.raises(BadInput, match="problem 'p': character 2 of the prompt is half a character"):
        PromptTemplate(template="{question}").encode(tokenizer, Problem("p", "a \ud800", "1"))


# --- the configs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMPTS)
def test_every_config_asks_a_problem(name: str, tokenizer: Any) -> None:
    template = prompt_config(name)
    chat = replace_template(tokenizer, CHATML)
    encoded = template.encode(chat, PETS)
    assert PETS.question in encoded.text
    assert chat.decode(encoded.ids, skip_special_tokens=False) == encoded.text
    assert template.writes_chat(tokenizer) == name.startswith("chat"), "the tokenizer of this test has no template"
    assert template.is_chat is not True or name.startswith("chat")
    assert template.messages(PETS)[-1]["role"] == "user"
    named = template.template + template.instruction
    for text, field_name in ((PETS.context, "context"), ("B. Rex", "options")):
        assert text in encoded.text or f"{{{field_name}}}" not in named
    assert not any(stop in encoded.text.split(PETS.question)[-1] for stop in template.stop if stop.strip())


@pytest.mark.parametrize("name", PROMPTS)
def test_every_config_shows_every_setting_so_that_each_can_be_overridden(name: str) -> None:
    config = stage_config("stage", f"+prompt@task={name}", "output=x", "+stage={}").task
    assert set(config) - {"_target_"} == {setting.name for setting in fields(PromptTemplate)}


def test_the_vineppo_prompt_is_the_published_one() -> None:
    template = prompt_config("math_vineppo")
    assert template.render(SUM) == "[MATH_TASK] Problem:\nWhat is 2 + 3?\n\nSolution:"
    assert template.stop == ["\n\n\nProblem:"]
    assert template.completion("5") == "\n5"


def test_the_react_prompt_has_the_published_blocks_and_ends_in_the_first_thought() -> None:
    text = prompt_config("react_logic").render(PETS)
    assert text.endswith(
        "\n\nContext:\nRex is a dog.\nTom is a cat.\n\nQuestion:\nWho barks?\n\nOptions:\nA. Tom\nB. Rex\nC. Both\n\n"
        "Thought 1:"
    )
    assert "where X is A, B or C." in text
    one = prompt_config("react_logic_one_shot").render(PETS)
    assert one.endswith(text.split("\n\n", 1)[1])
    assert one.count("Thought 1: ") == one.count("Finish[The answer is B.]") == 1


def test_the_minerva_layout_holds_four_examples() -> None:
    template = prompt_config("math_minerva")
    blocks = template.render(SUM).split("\n\nProblem:\n")
    assert len(blocks) == 5
    assert blocks[-1] == "What is 2 + 3?\n\nSolution:"
    for block, answer in zip(blocks, ["11", "6", r"\frac{1}{12}", r"(-\infty,9)"], strict=False):
        assert block.endswith(f"\nFinal Answer: The final answer is ${answer}$. I hope it is correct.")
        assert rf"$\boxed{{{answer}}}$.".replace("$\\boxed", "\\boxed") in block
        assert "\n\nSolution:\n" in block


def test_the_examples_of_gsm8k_are_graded_right_by_hand() -> None:
    template = prompt_config("gsm8k_few_shot")
    assert [shot.response.split("#### ")[1] for shot in template.shots] == ["22", "75", "23", "125"]
    assert template.render(SUM).endswith("\n#### 125\n\nQuestion: What is 2 + 3?\nAnswer:")


# --- the page -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """A task with a template and one problem, whose demonstration is right."""

    template: PromptTemplate = field(default_factory=PromptTemplate)
    question: str = "What is 2 + 3?"
    name = "sums"

    def problems(self, split: str) -> list[Problem]:
        """One."""
        return [Problem("sums-0", self.question, "5", {}, "", ["4", "5"])]

    def demonstrations(self, split: str) -> list[Demonstration]:
        """One, for training alone."""
        if split != "train":
            raise BadInput("sums has no solutions of this split")
        return [Demonstration("sums-0/gold", self.template.render(self.problems(split)[0]), "#### 5")]

    def grade(self, gold: str, response: str, num_options: int = 0) -> Grade:
        """Not used."""
        raise NotImplementedError


def show(task: Any, policy: Path, **arguments: Any) -> tuple[str, StageContext]:
    context = StageContext(task, policy / "page.html", 10.0)
    return ShowPrompt(str(policy), **arguments).run("", context), context


def test_the_page_shows_the_tokens_that_training_reads(tiny_policy: Path, tokenizer: Any) -> None:
    page, context = show(Sums(), tiny_policy)
    example = encode_demonstration(tokenizer, Sums().demonstrations("train")[0])
    assert context.counts["prompt_tokens"] == example.prompt_length
    assert context.counts["response_tokens"] == len(example.ids) - example.prompt_length
    assert page.count('<span class="learnt') == context.counts["response_tokens"]
    assert f"<small>{example.ids[-1]}</small>" in page
    assert "http" not in page
    assert "<script" not in page
    assert "leaves out the problem&#x27;s options" in page


def test_a_chat_prompt_takes_the_place_of_the_demonstrations_own(tiny_policy: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_policy, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHATML)
    page, context = show(Sums(PromptTemplate(template="{question}", is_chat=True)), tmp_path / "chat")
    assert "&lt;|user|&gt;What is 2 + 3?&lt;|end|&gt;&lt;|assistant|&gt;</pre>" in page
    assert "other tokens" not in page
    assert context.counts["response_tokens"] > 0


def test_a_demonstration_that_begins_otherwise_than_the_prompt_wants_is_remarked(tiny_policy: Path) -> None:
    page, _ = show(Sums(PromptTemplate(before_response=" ")), tiny_policy)
    assert "the demonstration does not begin with the prompt&#x27;s &#x27; &#x27;" in page


def test_without_a_demonstration_the_page_says_why(tiny_policy: Path) -> None:
    page, context = show(Sums(), tiny_policy, split="test")
    assert "no demonstration: sums has no solutions of this split" in page
    assert context.counts["response_tokens"] == 0


def test_a_task_without_a_template_is_shown(task: Any, tiny_policy: Path) -> None:
    page, context = show(task, tiny_policy, index=3)
    assert task.problems("train")[3].question.split()[0] in page
    assert context.counts["response_tokens"] > 0
    assert context.counts["notes"] == 0


def test_an_index_beyond_the_problems_is_refused(tiny_policy: Path) -> None:
    with pytest.raises(BadInput, match=r"stage.index=1: sums has 1 train problems, counted from 0"):
        show(Sums(), tiny_policy, index=1)
    with pytest.raises(BadInput, match="add task=NAME"):
        show(None, tiny_policy)


def test_no_text_of_a_problem_becomes_markup_or_a_terminal_command(tiny_policy: Path) -> None:
    question = "<script>alert(1)</script> & \x1b[31m \u202e\u2028 é 日本 🙂 {title}"
    page, _ = show(Sums(question=question), tiny_policy)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "{title}" in page
    assert visible("\x1b[31m\u202e\ud800é\n") == "\\u001b[31m\\u202e\\ud800é\n"


def test_the_pieces_join_to_the_text_and_bytes_of_one_character_stay_together(tokenizer: Any) -> None:
    text = "Mia has é 日本 🙂 3 apples.\n"
    ids = tokenizer(text).input_ids
    pieces = token_pieces(tokenizer, ids, len(ids))
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.ids] == ids
    assert any(piece.text.strip() == "é" and len(piece.ids) > 1 for piece in pieces)


def test_a_terminal_sees_the_border_with_and_without_colour(tokenizer: Any) -> None:
    ids = tokenizer("3 + 4").input_ids
    pieces = token_pieces(tokenizer, ids, len(ids) - 1)
    plain = render_terminal({"problem": "p"}, ["mind"], pieces, has_colour=False)
    assert "\x1b" not in plain
    assert plain.endswith("3| +\n--- the loss reads from here on ---\n 4")
    assert "\x1b[32m 4" in render_terminal({"problem": "p"}, [], pieces, has_colour=True)
    assert render_page({"problem": "p"}, [], "3 + 4", pieces).count("<span") == 3


def test_a_doubled_begin_token_and_an_end_token_within_are_remarked(bos_tokenizer: Any) -> None:
    template = PromptTemplate(template="{question}")
    twice = Problem("p", "a <s> b <|end|> c", "1")
    notes = remarks(template, bos_tokenizer, twice, template.encode(bos_tokenizer, twice))
    assert notes == [
        "the begin token stands more than once in the prompt",
        "the prompt contains the end token: the text of the problem holds it",
    ]


def test_the_stage_writes_the_page_and_its_provenance(tiny_policy: Path, tmp_path: Path) -> None:
    small = ["task.num_train=5", "task.num_demonstrations=5", "stage.index=2", f"stage.policy={tiny_policy}"]
    config = stage_config("stage/pages/show_prompt", f"output={tmp_path}/prompt.html", *small)
    assert run_stage(build(config.stage), build(config.task), config) == 0
    assert "wa-train-2" in (tmp_path / "prompt.html").read_text()
    meta = json.loads((tmp_path / "prompt.meta.json").read_text())
    assert str(tiny_policy / "tokenizer.json") in meta["inputs"]
    assert meta["counts"]["notes"] == 0


# --- published problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split", "num_problems"),
    [("math", "train", 7500), ("logiqa", "dev", 1241), ("ar_lsat", "dev", 231), ("folio", "train", 1004)],
)
def test_published_problems_keep_every_character_in_their_prompts(
    name: str, split: str, num_problems: int, datasets_dir: Path, tokenizer: Any
) -> None:
    published = build(stage_config("stage", f"task={name}", f"task.path={datasets_dir}", "output=x", "+stage={}").task)
    problems = published.problems(split)
    assert len(problems) == num_problems
    for problem in problems:
        text = published.template.render(problem)
        assert problem.question in text
        lines = [f"{letter}. {option}" for letter, option in zip("ABCDE", problem.options, strict=False)]
        assert "\n".join(lines) in text
        assert all(line in text for line in problem.context.splitlines())
    for problem in problems[::100]:
        encoded = published.template.encode(tokenizer, problem)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == encoded.text
