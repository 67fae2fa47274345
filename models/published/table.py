"""Published process reward models, a row each: what they are given, where they are read, how, and by which network.

Read from the models' cards and their authors' code. `names` are parts of the names of their repositories: of such a
name, or a folder called so, the row is known without being said. Where an evaluator in circulation reads a model
otherwise, this is the way of its authors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
