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
    body, whose weights' names begin so, or a file of it); or two policies (`models.log_ratio_reward`)."""

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
        ClassShares((0.0, 1.0, 0.0)),
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
_QUESTION = "{question}"


def deviate(row: PublishedPRM, deviations: Mapping[str, Any]) -> PublishedPRM:
    """Return a row with other values of what its layout and its read are made of, by their names (`models.published`:
    `layouts`, `reads`); `\\n` in a text is a newline, which nobody can type on a command line. Raises BadInput on a
    name that they do not have, on a value of another type, and on a text that leaves the problem out."""
    parts: dict[str, dict[str, Any]] = {"layout": {}, "read": {}}
    known = {name: (part, value) for part in parts for name, value in vars(getattr(row, part)).items()}
    for name, value in deviations.items():
        if name not in known:
            raise BadInput(f"stage.deviations.{name}: this layout is made of {', '.join(known) or 'nothing'}: name one "
                           "of these")  # fmt: skip
        part, before = known[name]
        is_list = isinstance(before, tuple)
        kinds = (list | tuple) if is_list else type(before)
        if not isinstance(value, kinds) or (is_list and not all(type(one) in (int, float) for one in value)):
            raise BadInput(f"stage.deviations.{name} must be of the kind of {before!r}, got {value!r}")
        text = value.replace("\\n", "\n") if isinstance(value, str) else value
        if isinstance(before, str) and _QUESTION in before and _QUESTION not in text:
            raise BadInput(f"stage.deviations.{name} must hold {_QUESTION}, which the problem is put in place of: the "
                           f"model would score steps without it; got {value!r}")  # fmt: skip
        parts[part][name] = tuple(map(float, value)) if is_list else text
    return replace(row, layout=replace(row.layout, **parts["layout"]), read=replace(row.read, **parts["read"]))  # type: ignore[type-var]
