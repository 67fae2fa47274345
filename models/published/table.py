"""Published process reward models, a row each: what they are given, where they are read, how, and by which network.

Read from the models' cards and their authors' code. `names` are parts of the names of their repositories: of such a
name, or a folder called so, the row is known without being said. Where an evaluator in circulation reads a model
otherwise, this is the way of its authors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from espalier.data.records import BadInput
from espalier.models.published.layouts import (
    ChatSteps,
    ChatTagged,
    ChatTurns,
    ChatWhole,
    Document,
    Layout,
    Pieces,
    Separated,
    Tagged,
)
from espalier.models.published.reads import ClassShares, MeanLogit, Read, Scalar, TokenShare

CAUSAL, CLASSES, POLICIES = "causal", "classes", "policies"
_QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class PublishedPRM:
    """`network`: a causal LM; classes (transformers' token classification; with `head` a head of its own on a model's
    body, whose weights' names begin so, or a file of it); or two policies (`models.log_ratio_reward`). `read`: a high
    score is a good step in every row, as all that compares scores takes it."""

    layout: Layout
    read: Read
    network: str = CAUSAL
    head: str = ""
    names: tuple[str, ...] = ()


_ROWS = {
    "math_shepherd": PublishedPRM(
        Tagged("{question} ", " ки", between="\n", numbers=True),
        TokenShare("+", "-"),
        names=("math-shepherd-mistral-7b-prm",),
    ),
    "rlhflow": PublishedPRM(ChatTurns("+"), TokenShare("+", "-"), names=("Llama3.1-8B-PRM-",)),
    "qwen": PublishedPRM(
        ChatTagged("<extra_0>", _QWEN_SYSTEM),
        ClassShares(),
        CLASSES,
        head="score.",
        names=("Qwen2.5-Math-PRM-", "Qwen2.5-Math-7B-PRM800K"),
    ),
    "skywork": PublishedPRM(
        Pieces("\n", "\n", begins=True, by_lines=True),
        Scalar(),
        CLASSES,
        head="v_head.summary.",
        names=("Skywork-o1-Open-PRM-",),
    ),
    "reasoneval": PublishedPRM(
        Separated("Question:\n{question}\nAnswer:\nLet's think step by step.\n"),
        ClassShares((0.0, 1.0, 1.0)),
        CLASSES,
        head="score_head.",
        names=("ReasonEval-",),
    ),
    "reasoneval_redundancy": PublishedPRM(
        Separated("Question:\n{question}\nAnswer:\nLet's think step by step.\n"),
        ClassShares((1.0, 0.0, 1.0)),  # 1 - redundancy, the published score, which is high for a bad step
        CLASSES,
        head="score_head.",
    ),
    "easy_to_hard": PublishedPRM(
        Document("# Question\n\n{question}\n\n# Solution\n\n"), MeanLogit(), names=("llemma-7b-prm", "easy-to-hard")
    ),
    "versa": PublishedPRM(
        Tagged("{question} \n\n", " \n\n\n\n"),
        TokenShare("+", "-"),
        names=("VersaPRM", "Llama-PRM800K"),
    ),
    "pure": PublishedPRM(Pieces("\n\n"), ClassShares(), CLASSES, names=("PURE-PRM-",)),
    "trl": PublishedPRM(Pieces("\n", begins=True), ClassShares(), CLASSES),
    "math_psa": PublishedPRM(
        Tagged("{question} ", " \n\n\n\n\n", between=" "), TokenShare(" +", " -"), names=("Math-psa",)
    ),
    "er_prm": PublishedPRM(Tagged("{question} ", " ки"), TokenShare(" +", " -"), names=("ER-PRM",)),
    "pqm": PublishedPRM(
        Tagged("{question} ", " [PRM]", between="\n", tag="[PRM]"),
        Scalar(),
        CLASSES,
        head="v_head.summary.",
        names=("PQM",),
    ),
    "math_minos": PublishedPRM(
        Tagged("Human: {question}\n\nAssistant: ", "и", between="\n"), Scalar(), CLASSES, names=("MATH-Minos",)
    ),
    "eurus": PublishedPRM(ChatSteps(), Scalar(), POLICIES, names=("EurusPRM",)),
    "reasonflux": PublishedPRM(
        ChatTagged("<extra_0>"), ClassShares(), CLASSES, head="score.", names=("ReasonFlux-PRM-7B",)
    ),
    "reasonflux_small": PublishedPRM(
        ChatWhole(), Scalar(), CLASSES, head="reward_head.pt", names=("ReasonFlux-PRM-1.5B",)
    ),
}
PUBLISHED: Mapping[str, PublishedPRM] = MappingProxyType(_ROWS)


def deviate(row: PublishedPRM, deviations: Mapping[str, Any]) -> PublishedPRM:
    """Return a row with other values of what its layout and its read are made of, by their names (`models.published`:
    `layouts`, `reads`). Raises BadInput on a name that they do not have, on a value of another type, on a text before
    the steps without the question, and on weights that give scores outside [0, 1]."""
    parts: dict[str, dict[str, Any]] = {"layout": {}, "read": {}}
    known = {name: (part, value) for part in parts for name, value in vars(getattr(row, part)).items()}
    for name, value in deviations.items():
        if name not in known:
            raise BadInput(f"stage.deviations.{name}: this layout is made of {', '.join(known) or 'nothing'}: name one "
                           "of these")  # fmt: skip
        part, before = known[name]
        parts[part][name] = _checked(name, with_newlines(value), before)
    return replace(row, layout=replace(row.layout, **parts["layout"]), read=replace(row.read, **parts["read"]))  # type: ignore[type-var]


def with_newlines(value: Any) -> Any:
    """Return a value whose `\\n`, where it is a text, are newlines, which nobody can type on a command line."""
    return value.replace("\\n", "\n") if isinstance(value, str) else value


def _checked(name: str, value: Any, before: Any) -> Any:
    """Return another value of what is now `before`. Raises BadInput where it does not fit."""
    kind = {tuple: "a list of numbers", bool: "true or false"}.get(type(before), "a text")
    fits = type(value) is type(before)
    if isinstance(before, tuple):
        fits = isinstance(value, list | tuple) and all(type(one) in (int, float) for one in value)
    if not fits:
        raise BadInput(f"stage.deviations.{name} must be {kind}, as {before!r} is, got {value!r}")
    if name == "before" and "{question}" not in value:
        raise BadInput(f"stage.deviations.before must hold {{question}}, got {value!r}: without it the model reads no "
                       "question")  # fmt: skip
    if not isinstance(before, tuple):
        return value
    if not all(0 <= weight <= 1 for weight in value):
        raise BadInput(f"stage.deviations.{name} must be numbers in [0, 1], got {value!r}: scores are in [0, 1]")
    return tuple(map(float, value))
