"""Published process reward models against a computation by hand, as their authors describe it: a network of the same
classes with random weights, saved under the published names of weights, and published tokenizers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from benchmarks.road.published_models import LLAMA_CHAT, SIZES, build_tokenizers, save, write_model
from espalier.data.records import BadInput
from espalier.models.load import BadModel, load_tokenizer
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.published.engines import engine_form
from espalier.models.published.layouts import Tagged, only_id, written_with
from espalier.models.published.load import load_published, name_by_config, row_by_name
from espalier.models.published.scoring import PublishedScorer, Solution
from espalier.models.published.table import PUBLISHED, PublishedPRM, deviate
from espalier.runtime.manifest import weight_files
from tests.support.slow import slow_unless

QUESTION = "Mia has 3 apples and buys 4 more. How many now?"
STEPS = ["Step 1: She begins with 3 apples.", "Step 2: 3 + 4 = 7, so she has 7.", "Step 3: The answer is \\boxed{7}."]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."

Logits = Callable[[list[int]], torch.Tensor]  # ids → logits [T, L] of a plain forward pass in float32


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    pytest.importorskip("sentencepiece", reason="one of them is read with the package sentencepiece")
    return build_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def body_of(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda ids: model.base_model(torch.tensor([ids])).last_hidden_state[0]


def logits_of(folder: Path, auto: Any = AutoModelForCausalLM) -> Logits:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return found

    return logits


def score(folder: Path, name: str, solutions: Sequence[Solution]) -> list[list[float]]:
    return scorer_of(PUBLISHED[name], folder).scores(solutions)


def scorer_of(row: PublishedPRM, folder: Path) -> PublishedScorer:
    return PublishedScorer(load_published(str(folder), row), tokenizer_of(folder), row, "fp32")


READ: dict[tuple[bytes, ...], Any] = {}


def tokenizer_of(folder: Path) -> Any:
    """Read once for all folders with the same files: that of 32,000 pieces takes longer than scoring."""
    files = tuple(path.read_bytes() for path in sorted([*folder.glob("*token*"), *folder.glob("chat*")]))
    if files not in READ:
        READ[files] = load_tokenizer(str(folder))
    return READ[files]


def assert_exact(folder: Path, name: str, expected: Sequence[float], steps: Sequence[str] = STEPS) -> None:
    """The row's scores are those by hand, alone and beside another solution; and not one number for all steps."""
    other = Solution("other", "How many are 2 and 2?", [*steps[:2], "Step 3: It is 4.", "Step 4: So \\boxed{4}."])
    scorer = scorer_of(PUBLISHED[name], folder)
    alone = scorer.scores([Solution("mia", QUESTION, steps)])[0]
    beside = scorer.scores([other, Solution("mia", QUESTION, steps)])[1]
    assert alone == pytest.approx([float(value) for value in expected], abs=2e-5)
    assert beside == pytest.approx(alone, abs=2e-5)
    assert len({round(value, 4) for value in alone}) == len(steps)


def share(logits: torch.Tensor, good: int, bad: int) -> float:
    return float(torch.softmax(logits[[good, bad]], dim=0)[0])


@pytest.mark.slow
def test_tokens_of_math_shepherd_are_those_of_its_card(tokenizers: dict[str, Any]) -> None:
    """Mistral's vocabulary is Math-Shepherd's: `+` 648, `-` 387, `ки` 12902."""
    pieces = tokenizers["pieces"]
    assert [only_id(pieces, text) for text in ("+", "-", "ки")] == [648, 387, 12902]


def test_math_shepherd(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, tokenizers["pieces"], "mistral")
    text = f"{QUESTION} " + "\n".join(f"{step} ки" for step in STEPS)
    ids = tokenizers["pieces"](text).input_ids
    logits = logits_of(tmp_path)(ids)
    assert_exact(tmp_path, "math_shepherd", [share(logits[k], 648, 387) for k, one in enumerate(ids) if one == 12902])


def test_math_shepherds_steps_get_the_numbers_that_they_lack(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, tokenizers["pieces"], "mistral")
    bare = [step.partition(": ")[2] for step in STEPS]
    given, written = (score(tmp_path, "math_shepherd", [Solution("s", QUESTION, steps)]) for steps in (bare, STEPS))
    assert given == written


def test_rlhflow_as_some_evaluators_read_it(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """The first step behind an empty line, and the share of `+` in the whole vocabulary."""
    llama = tokenizers["llama"]
    save(tmp_path, llama, "llama")
    logits, talk, expected = logits_of(tmp_path), list[dict[str, str]](), []
    plus = llama("+", add_special_tokens=False).input_ids[-1]
    for number, step in enumerate(STEPS):
        content = f"{QUESTION}\n\n{step}" if number == 0 else step
        talk += [{"role": "user", "content": content}, {"role": "assistant", "content": "+"}]
        ids = llama.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
        expected.append(float(torch.softmax(logits(ids)[-3], dim=-1)[plus]))
    row = deviate(PUBLISHED["rlhflow"], {"after_question": "\n\n", "of_all": True})
    found = scorer_of(row, tmp_path).scores([Solution("mia", QUESTION, STEPS)])[0]
    assert found == pytest.approx(expected, abs=2e-5)
    with pytest.raises(BadModel, match=r"stage\.deviations\.of_all reads the whole vocabulary"):
        engine_form(str(tmp_path), row, llama)


def test_qwens_system_prompt_by_another_one(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """With none, as ReasonFlux is read; with one of one's own, as the template writes it."""
    qwen = tokenizers["qwen"]
    for system in ("", "Be brief."):
        layout = deviate(PUBLISHED["qwen"], {"system": system}).layout
        talk = [{"role": "system", "content": system}] if system else []
        answer = "<extra_0>".join(STEPS) + "<extra_0>"
        talk += [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        text = qwen.apply_chat_template(talk, tokenize=False)
        assert layout(qwen, QUESTION, STEPS).ids == qwen(text, add_special_tokens=False).input_ids
    assert deviate(PUBLISHED["qwen"], {}) == PUBLISHED["qwen"]


def test_reasoneval_by_weights_of_ones_own(tokenizers: dict[str, Any]) -> None:
    """Positive alone, of logits (0, ln 2, ln 5): 5 / 8."""
    row = deviate(PUBLISHED["reasoneval"], {"weights": [0, 0, 1]})
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    assert float(row.read.scores(logits, None)) == pytest.approx(5 / 8)
    with pytest.raises(
        BadInput, match=r"stage\.deviations\.weights must be a list of numbers, as \(0\.0, 1\.0, 1\.0\)"
    ):
        deviate(PUBLISHED["reasoneval"], {"weights": ["1", 0, 0]})
    with pytest.raises(BadInput, match=r"weights must be numbers in \[0, 1\], got \[-1, 0, 1\]: scores are in"):
        deviate(PUBLISHED["reasoneval"], {"weights": [-1, 0, 1]})


@pytest.mark.parametrize("name", ["er_prm", "reasoneval", "easy_to_hard"])
def test_a_text_of_ones_own_before_the_steps_holds_the_question_and_may_hold_latex(name: str) -> None:
    layout: Any = deviate(PUBLISHED[name], {"before": "End with \\boxed{}. {question}\\n"}).layout
    assert written_with(layout.before, "1 + 1?") == "End with \\boxed{}. 1 + 1?\n"
    for text in ("End with \\boxed{}.", "{q}", ""):
        with pytest.raises(BadInput, match=r"stage\.deviations\.before must hold \{question\}, got"):
            deviate(PUBLISHED[name], {"before": text})


def test_a_deviation_that_leaves_the_problem_out_is_refused() -> None:
    with pytest.raises(BadInput, match=r"stage\.deviations\.before must hold \{question\}"):
        deviate(PUBLISHED["math_shepherd"], {"before": "Solve it step by step. "})


def test_rlhflow_in_one_pass_is_a_pass_for_every_turn(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """The published loop reads the third token from the end of the talk so far."""
    llama = tokenizers["llama"]
    save(tmp_path, llama, "llama")
    logits, talk, expected = logits_of(tmp_path), list[dict[str, str]](), []
    plus, minus = (llama(text, add_special_tokens=False).input_ids[-1] for text in "+-")
    for number, step in enumerate(STEPS):
        content = f"{QUESTION} {step}" if number == 0 else step
        talk += [{"role": "user", "content": content}, {"role": "assistant", "content": "+"}]
        ids = llama.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
        assert ids[-2] == plus
        expected.append(share(logits(ids)[-3], plus, minus))
    assert_exact(tmp_path, "rlhflow", expected)


@pytest.mark.parametrize(("name", "system"), [("qwen", SYSTEM), ("reasonflux", "")])
def test_qwens_head_of_two_layers(name: str, system: str, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    qwen, size = tokenizers["qwen"], SIZES["hidden_size"]
    weights = [torch.randn(shape) / 8 for shape in ((size, size), (size,), (2, size), (2,))]
    names = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")
    save(tmp_path, qwen, "qwen2", 2, dict(zip(names, weights, strict=True)))
    talk = [{"role": "system", "content": system}] if system else []
    answer = "<extra_0>".join(STEPS) + "<extra_0>"
    talk += [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    ids = qwen(qwen.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
    tag = qwen.convert_tokens_to_ids("<extra_0>")
    hidden = body_of(tmp_path)(ids)[[k for k, one in enumerate(ids) if one == tag]]
    first = torch.relu(hidden @ weights[0].T + weights[1])
    expected = torch.softmax(first @ weights[2].T + weights[3], dim=-1)[:, 1]
    assert_exact(tmp_path, name, expected.tolist())


def test_skywork_reads_a_value_at_the_newline_behind_every_line(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    qwen, size = tokenizers["qwen"], SIZES["hidden_size"]
    head = {"v_head.summary.weight": torch.randn(1, size) / 8, "v_head.summary.bias": torch.randn(1)}
    save(tmp_path, qwen, "qwen2", 1, head)
    ids, places = [qwen.bos_token_id, *qwen(QUESTION + "\n", add_special_tokens=False).input_ids], []
    newline = qwen("\n", add_special_tokens=False).input_ids[-1]
    for step in [*STEPS, "Two\nlines."]:
        for line in step.split("\n"):
            ids += [*qwen(line, add_special_tokens=False).input_ids, newline]
        places.append(len(ids) - 1)
    values = body_of(tmp_path)(ids)[places] @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]
    assert_exact(tmp_path, "skywork", torch.sigmoid(values[:, 0]).tolist(), [*STEPS, "Two\nlines."])


@pytest.mark.parametrize("has_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_reasoneval_of_three_classes(has_bias: bool, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    pieces, size = tokenizers["pieces"], SIZES["hidden_size"]
    head = {"score_head.weight": torch.randn(3, size) / 8} | ({"score_head.bias": torch.randn(3)} if has_bias else {})
    save(tmp_path, pieces, "mistral", 3, head)
    mark = pieces.unk_token  # its own pad token is the end token here
    text = f"Question:\n{QUESTION}\nAnswer:\nLet's think step by step.\n{mark}" + "".join(step + mark for step in STEPS)
    ids, places = list[int](), list[int]()
    for token in pieces(text).input_ids:
        if token == pieces.unk_token_id:
            places.append(len(ids) - 1)
        else:
            ids.append(token)
    values = body_of(tmp_path)(ids)[places] @ head["score_head.weight"].T
    assert len(places) == len(STEPS) + 1  # the first mark parts the question from the first step
    values = values[1:]
    shares = torch.softmax(values + head.get("score_head.bias", torch.zeros(3)), dim=-1)
    assert_exact(tmp_path, "reasoneval", (shares[:, 1] + shares[:, 2]).tolist())
    assert_exact(tmp_path, "reasoneval_redundancy", (1 - shares[:, 1]).tolist())


def test_a_redundant_step_has_the_lowest_score_of_its_row_as_a_wrong_one_has_of_others() -> None:
    """Best of n, votes and first errors take a high score as good; the authors' redundancy is high for a bad step."""
    negative, neutral, positive = 9.0 * torch.eye(3)
    logits = torch.stack([negative, neutral, positive])
    assert PUBLISHED["reasoneval_redundancy"].read.scores(logits, None).round().tolist() == [1, 0, 1]
    assert PUBLISHED["reasoneval"].read.scores(logits, None).round().tolist() == [0, 1, 1]


def test_easy_to_hard_reads_empty_lines_and_the_end(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    pieces = tokenizers["pieces"]
    save(tmp_path, pieces, "llama")
    text = f"# Question\n\n{QUESTION}\n\n# Solution\n\n" + "\n\n".join(STEPS)
    ids = [*pieces(text).input_ids, pieces.eos_token_id]
    newline = pieces.convert_tokens_to_ids("<0x0A>")
    pairs = [k for k in range(len(ids) - 1) if ids[k] == ids[k + 1] == newline]
    places = [*pairs[3:], len(ids) - 1]  # behind "# Question", the question and "# Solution" nothing is read
    logits = logits_of(tmp_path)(ids)
    assert_exact(tmp_path, "easy_to_hard", [float(torch.sigmoid(logits[place].mean())) for place in places])


@pytest.mark.parametrize(
    ("name", "before", "after", "between", "pair"),
    [
        ("versa", f"{QUESTION} \n\n", " \n\n\n\n", "", ("+", "-")),
        ("math_psa", f"{QUESTION} ", " \n\n\n\n\n", " ", (" +", " -")),
        pytest.param("er_prm", f"{QUESTION} ", " ки", "", (" +", " -"), marks=pytest.mark.slow),
    ],
)
def test_token_pairs_at_a_tag(
    name: str, before: str, after: str, between: str, pair: tuple[str, str], tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    llama = tokenizers["llama"]
    mark = llama(after, add_special_tokens=False).input_ids
    good, bad = (llama(text, add_special_tokens=False).input_ids for text in pair)
    assert len(good) == len(bad) == 1
    save(tmp_path, llama, "llama")
    ids = llama(before + between.join(step + after for step in STEPS)).input_ids
    places = [k for k, one in enumerate(ids) if one == mark[-1]]
    assert len(places) == len(STEPS)
    logits = logits_of(tmp_path)(ids)
    assert_exact(tmp_path, name, [share(logits[place], good[0], bad[0]) for place in places])


@pytest.mark.parametrize(("name", "separator", "begins"), [("pure", "\n\n", False), ("trl", "\n", True)])
def test_token_classification_of_pieces(
    name: str, separator: str, begins: bool, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    qwen = tokenizers["qwen"]
    save(tmp_path, qwen, "qwen2", 2)
    ids, places = [qwen.bos_token_id] * begins + qwen(QUESTION, add_special_tokens=False).input_ids, []
    for step in STEPS:
        ids += [text for part in (step, separator) for text in qwen(part, add_special_tokens=False).input_ids]
        places.append(len(ids) - 1)
    logits = logits_of(tmp_path, AutoModelForTokenClassification)(ids)[places]
    assert_exact(tmp_path, name, torch.softmax(logits, dim=-1)[:, 1].tolist())


def test_pqm_reads_a_value_at_its_own_token(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    llama, size = tokenizers["llama"], SIZES["hidden_size"]
    head = {"v_head.summary.weight": torch.randn(1, size) / 8, "v_head.summary.bias": torch.randn(1)}
    save(tmp_path, llama, "llama", 1, head)
    ids = llama(f"{QUESTION} " + "\n".join(f"{step} [PRM]" for step in STEPS)).input_ids
    places = [k for k, one in enumerate(ids) if one == llama.convert_tokens_to_ids("[PRM]")]
    values = body_of(tmp_path)(ids)[places] @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]
    assert_exact(tmp_path, "pqm", torch.sigmoid(values[:, 0]).tolist())


def test_math_minos_reads_one_logit_behind_a_letter(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    pieces = tokenizers["pieces"]
    save(tmp_path, pieces, "mistral", 1)
    ids = pieces(f"Human: {QUESTION}\n\nAssistant: " + "\n".join(f"{step}и" for step in STEPS)).input_ids
    places = [k for k, one in enumerate(ids) if one == pieces.convert_tokens_to_ids("и")]
    logits = logits_of(tmp_path, AutoModelForTokenClassification)(ids)[places, 0]
    assert_exact(tmp_path, "math_minos", torch.sigmoid(logits).tolist())


def test_reasonflux_small_says_one_thing_of_the_whole_from_a_head_in_a_file(
    tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    qwen, size = tokenizers["qwen"], SIZES["hidden_size"]
    head = {"weight": torch.randn(1, size) / 8, "bias": torch.randn(1)}
    save(tmp_path, qwen, "qwen2")
    with pytest.raises(BadModel, match=r"reward_head\.pt: no weights of a head can be read"):
        score(tmp_path, "reasonflux_small", [])
    torch.save({f"head.{name}": value for name, value in head.items()}, tmp_path / "reward_head.pt")
    talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "\n\n".join(STEPS)}]
    ids = qwen(qwen.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
    expected = float(torch.sigmoid(body_of(tmp_path)(ids)[-1] @ head["weight"][0] + head["bias"][0]).detach())
    found = score(tmp_path, "reasonflux_small", [Solution("a", "What?", ["It."]), Solution("s", QUESTION, STEPS)])
    assert found[1] == pytest.approx([expected] * 3, abs=2e-5)
    assert abs(found[0][0] - found[1][0]) > 1e-4


def test_eurus_sums_log_ratios_of_two_policies(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    qwen, beta = tokenizers["qwen"], 0.05
    save(tmp_path / "policy", qwen, "qwen2")
    save(tmp_path / "reference-model", qwen, "qwen2")
    write_log_ratio_reward(
        tmp_path / "prm", str(tmp_path / "policy"), str(tmp_path / "reference-model"), Scale("sum", beta, 0.0)
    )
    asked = qwen.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    start = len(qwen(asked, add_special_tokens=False).input_ids)
    ids = qwen(asked + "\n\n".join(STEPS), add_special_tokens=False).input_ids
    logs = [torch.log_softmax(logits_of(tmp_path / name)(ids), dim=-1) for name in ("policy", "reference-model")]
    ratios = [float((logs[0] - logs[1])[k - 1, ids[k]]) for k in range(start, len(ids))]
    expected = []
    for number in range(1, len(STEPS) + 1):
        text = asked + "\n\n".join(STEPS[:number]) + ("\n\n" if number < len(STEPS) else "")
        end = len(qwen(text, add_special_tokens=False).input_ids) - start
        expected.append(float(torch.sigmoid(torch.tensor(beta * sum(ratios[:end])))))
    assert_exact(tmp_path / "prm", "eurus", expected)


def shard(folder: Path, kind: str) -> None:
    """Save a folder's weights again in two files, a head of its own in the second, or all in one of torch's."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if kind == "one file of torch":
        torch.save(weights, folder / "pytorch_model.bin")
        return
    stem, end = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    heads = [name for name in weights if name.startswith(("score.", "v_head."))]
    body = [name for name in weights if name not in heads]
    files = {f"{stem}-00001-of-00002.{end}": body[:9], f"{stem}-00002-of-00002.{end}": body[9:] + heads}
    for file, names in files.items():
        part = {name: weights[name] for name in names}
        save_file(part, folder / file, {"format": "pt"}) if end == "safetensors" else torch.save(part, folder / file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())},
             "weight_map": {name: file for file, names in files.items() for name in names}}  # fmt: skip
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["safetensors", "files of torch", "one file of torch"])
@pytest.mark.parametrize("name", slow_unless(lambda name: name == "qwen", ["qwen", "skywork", "trl"]))
def test_weights_in_several_files_give_the_scores_of_one(
    name: str, kind: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(name, tmp_path / "model", tokenizers)
    expected = score(folder, name, [Solution("mia", QUESTION, STEPS)])
    shard(folder, kind)
    assert score(folder, name, [Solution("mia", QUESTION, STEPS)]) == expected
    assert [Path(file).is_file() for file in weight_files(folder)] == [True] * (1 if kind.startswith("one") else 2)


def test_a_probability_of_exactly_zero_is_the_score_of_its_step(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """A snippet that circulates for Qwen's models takes what is not 0 for what is no step's, and loses such steps."""
    folder = write_model("qwen", tmp_path / "model", tokenizers)
    tokenizer = load_tokenizer(str(folder))
    reading = PUBLISHED["qwen"].layout(tokenizer, QUESTION, STEPS)
    weights = load_file(folder / "model.safetensors")
    hidden = body_of(folder)(reading.ids)[reading.places].detach()
    first = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
    apart = first @ (weights["score.2.weight"][1] - weights["score.2.weight"][0])
    middle = apart.sort().values[1]
    scale = 400 / (apart - middle).abs().sort().values[1]  # exp(-400) is 0 in float32
    weights["score.2.weight"] *= scale
    weights["score.2.bias"] = torch.stack([torch.tensor(0.0), -middle * scale])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    logits = first @ weights["score.2.weight"].T + weights["score.2.bias"]
    shares = torch.softmax(logits, dim=-1)
    assert sorted(shares[:, 1].tolist())[::2] == [0.0, 1.0]
    found = score(folder, "qwen", [Solution("mia", QUESTION, STEPS)])[0]
    assert found == pytest.approx(shares[:, 1].tolist(), abs=0.05)
    assert sorted(found)[::2] == [0.0, 1.0]
    is_step = torch.zeros(len(reading.ids), 1)
    is_step[reading.places] = 1
    masked = torch.zeros(len(reading.ids), 2).index_copy(0, torch.tensor(reading.places), shares) * is_step
    assert len(masked[masked != 0].view(-1, 2)) == 2, "of three steps"


# --- what is no such model, and what cannot be read -----------------------------------------------------------------


def test_a_text_that_holds_the_mark_is_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, tokenizers["pieces"], "mistral")
    with pytest.raises(BadInput, match=r"^row 7: 4 tokens ' ки' mark 3 steps: the text holds the mark itself"):
        score(tmp_path, "math_shepherd", [Solution("row 7", f"{QUESTION} ки", STEPS)])


def test_a_mark_of_several_tokens_is_another_model(tokenizers: dict[str, Any]) -> None:
    """Its last token may stand anywhere."""
    with pytest.raises(BadInput, match=r"^' \[RM\]' is \d+ tokens of this tokenizer"):
        Tagged("{question} ", " [RM]")(tokenizers["qwen"], QUESTION, STEPS)


def test_a_talk_whose_answers_are_joined_to_their_neighbours_is_another_model(
    tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    llama = tokenizers["llama"]
    llama.chat_template = LLAMA_CHAT.replace("<|eot|>", "+<|eot|>")
    save(tmp_path, llama, "llama")
    llama.chat_template = LLAMA_CHAT
    with pytest.raises(BadInput, match=r"joins an answer with its neighbours"):
        score(tmp_path, "rlhflow", [Solution("s", QUESTION, ["1 + 1"])])


def test_a_step_that_ends_in_a_character_of_several_tokens_ends_with_its_last_one(tokenizers: dict[str, Any]) -> None:
    qwen = tokenizers["qwen"]
    reading = PUBLISHED["eurus"].layout(qwen, QUESTION, ["Step 1: so 🤖", "Step 2: 數🤖"])
    assert reading.places[-1] == len(reading.ids) - 1
    assert qwen.decode(reading.ids[reading.start : reading.places[0] + 1]) == "Step 1: so 🤖\n\n"


def test_a_head_of_another_size_and_a_head_that_is_not_there_are_refused(
    tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, tokenizers["qwen"], "qwen2", 3)
    with pytest.raises(BadModel, match=r"reads a head of 2 numbers, and the model's gives 3"):
        score(tmp_path, "trl", [Solution("s", QUESTION, STEPS)])
    with pytest.raises(BadModel, match=r"its head v_head\.summary\.\* is not there"):
        load_published(str(tmp_path), PUBLISHED["skywork"])


def test_a_solution_without_steps_has_no_scores_and_one_too_long_is_named(
    tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, tokenizers["qwen"], "qwen2", 2)
    assert score(tmp_path, "trl", [Solution("a", QUESTION, []), Solution("b", QUESTION, STEPS)])[0] == []
    with pytest.raises(BadInput, match=r"^long: \d+ tokens, and the model has 512 positions"):
        score(tmp_path, "trl", [Solution("long", QUESTION, ["many words " * 400])])


def test_a_model_says_by_its_name_or_its_config_which_row_it_is(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    assert row_by_name("peiyi9979/math-shepherd-mistral-7b-prm") == "math_shepherd"
    assert row_by_name("Qwen/Qwen2.5-Math-PRM-72B") == "qwen"
    assert row_by_name("RLHFlow/Llama3.1-8B-PRM-Deepseek-Data") == "rlhflow"
    assert row_by_name("hanningzhang/ER-PRM-Data") == "er_prm"
    folder = tmp_path / "mine"
    save(folder, tokenizers["qwen"], "qwen2", 2)
    assert (row_by_name(str(folder)), name_by_config(str(folder))) == ("", "trl")
    better = tmp_path / "Better-PRM"  # no ER-PRM
    better.symlink_to(folder)
    assert row_by_name(str(better)) == ""
    for architecture, name in (("Qwen2ForProcessRewardModel", "qwen"), ("ReasonEval_34B", "reasoneval")):
        config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        assert name_by_config(str(folder)) == name
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(BadModel, match=r"nothing says which published model this is .*: set stage\.layout to task \(a"):
        name_by_config(str(folder))
