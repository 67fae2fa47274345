"""What makes a trajectory worth reading: eleven kinds of suspicion, each with the step it stands at and why.

None of them proves a fault. A value that jumps may be the decisive step; a right answer after a state without any
right completion may be luck, which is why the chance of it stands beside it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from espalier.analysis.inspected import Inspected
from espalier.data.records import BadInput, Completion
from espalier.pipeline.values.step_statistics import impossible_patterns
from espalier.values.monte_carlo import StateKey

# key → (name, what it means); the order is that of the page's buttons
KINDS: dict[str, tuple[str, str]] = {
    "right_after_wrong": ("right after certain wrong", "no completion of a state is right, yet something later is"),
    "wrong_after_right": (
        "wrong after certain right",
        "every completion of a state (two at least) is right, yet the trajectory or all completions of a later state "
        "are wrong",
    ),
    "leak": ("answer given away", "the prompt, or the first of several steps, contains the gold answer"),
    "early": ("answered early", "the task's grader reads an answer before the last step"),
    "jump": ("value jumps", "the value changes much in one step"),
    "wide": ("wide interval", "few completions carry the value"),
    "prm": ("label against PRM", "the reward model's score is far from the label"),
    "judge": ("label against judge", "the judge's verdict is far from the label"),
    "length": ("extreme length", "among the shortest or the longest of all"),
    "unparseable": ("no answer", "no answer could be read from the response, or from most completions of a state"),
    "cut": ("cut off", "the response has no end: its length was limited"),
}


@dataclass(frozen=True)
class Suspicion:
    """`step` counts from 1; 0 is the prompt, or the whole."""

    kind: str
    step: int
    why: str


@dataclass(frozen=True)
class SuspicionRule:
    """`min_jump`, `max_width` and `min_gap` are differences of values in [0, 1]; `length_share` is the share of
    trajectories that are called extreme at either end. Raises BadInput on values out of range."""

    min_jump: float = 0.5
    max_width: float = 0.75
    min_gap: float = 0.5
    length_share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("min_jump", "max_width", "min_gap", "length_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"stage.{name} must be from 0 to 1, got {getattr(self, name)}")

    def length_limits(self, rows: Sequence[Inspected]) -> tuple[int, int]:
        """Return (shortest, longest) that are still usual: nobody is extreme among equals."""
        lengths = sorted(row.length for row in rows)
        place = min(int(self.length_share * len(lengths)), (len(lengths) - 1) // 2)
        return lengths[place], lengths[-1 - place]


def largest_jump(values: Sequence[float | None]) -> tuple[int, float]:
    """Return (step from 1, change of the value in it) of the widest change between neighbours that are both known; (0,
    0.0) where there is none."""
    changes = [
        (step, after - before)
        for step, (before, after) in enumerate(pairwise(values), 2)
        if before is not None and after is not None
    ]
    return max(changes, key=lambda change: abs(change[1]), default=(0, 0.0))


def widest(row: Inspected) -> tuple[int, float]:
    """Return (step from 1, width of the interval), the last step apart; (0, 0.0) where no step before it has a
    value."""
    widths = [
        (step, high - low)
        for step, (value, low, high) in enumerate(zip(row.steps.values, row.steps.low, row.steps.high, strict=True), 1)
        if value is not None and step < len(row.steps.values)
    ]
    return max(widths, key=lambda one: one[1], default=(0, 0.0))


def largest_gap(targets: Sequence[float | None], said: Sequence[float | None] | None) -> tuple[int, float]:
    """Return (step from 1, said less target) where they differ most; (0, 0.0) where nothing is compared."""
    gaps = [
        (step, one - target)
        for step, (target, one) in enumerate(zip(targets, said or [None] * len(targets), strict=True), 1)
        if target is not None and one is not None
    ]
    return max(gaps, key=lambda gap: abs(gap[1]), default=(0, 0.0))


def flags(
    row: Inspected,
    rule: SuspicionRule,
    limits: tuple[int, int],
    completions: Mapping[StateKey, Sequence[Completion]],
    task: Any = None,
) -> list[Suspicion]:
    """Return everything suspicious of a trajectory, in the order of `KINDS`. `limits` are the rule's
    `length_limits`."""
    return [
        *_right_after_wrong(row),
        *_wrong_after_right(row),
        *_leaks(row, task),
        *_differences(row, rule),
        *_length(row, limits),
        *_unparseable(row, completions),
    ]


def _right_after_wrong(row: Inspected) -> list[Suspicion]:
    return [
        Suspicion("right_after_wrong", pattern["step"],
                  f"0 of {pattern['num_completions']} completions are right after step {pattern['step']}, yet step "
                  f"{pattern['later_step']} leads to right ones; chance {pattern['chance']:.2g}")
        for pattern in impossible_patterns(row.steps)
    ]  # fmt: skip


def _wrong_after_right(row: Inspected) -> list[Suspicion]:
    """Return the first such step only: what follows says the same again."""
    counts = list(zip(row.steps.num_correct, row.steps.num_completions, strict=True))
    last_wrong = max((step for step, (right, total) in enumerate(counts) if total and not right), default=-1)
    for step, (right, total) in enumerate(counts[:-1]):
        if step < last_wrong and total >= 2 and right == total:
            later = "the trajectory is wrong"
            if last_wrong < len(counts) - 1:
                later = f"0 of {counts[last_wrong][1]} are right after step {last_wrong + 1}"
            why = f"{right} of {total} completions are right after step {step + 1}, yet {later}"
            return [Suspicion("wrong_after_right", step + 1, why)]
    return []


def searchable_golds(row: Inspected) -> list[str]:
    """Return the gold answers worth looking for in a text: not the letter of an option, which every prompt contains."""
    gold = row.trajectory.gold
    texts = [gold] if isinstance(gold, str) else [str(one) for one in gold]
    return [text.strip() for text in texts if text.strip() and not row.trajectory.num_options]


def holds_word(text: str, word: str) -> bool:
    """Say whether the text contains the word by itself: 12 is not in 112, 12.5 or -12."""
    return re.search(rf"(?<![\w.\-]){re.escape(word)}(?![\w]|\.\d)", text, re.IGNORECASE) is not None


def _leaks(row: Inspected, task: Any) -> list[Suspicion]:
    steps = row.trajectory.steps
    leaks = []
    for gold in searchable_golds(row):
        if holds_word(row.trajectory.prompt, gold):
            leaks.append(Suspicion("leak", 0, f"the prompt contains the gold answer {gold[:60]!r}"))
        elif len(steps) > 2 and holds_word(steps[0], gold):
            leaks.append(
                Suspicion("leak", 1, f"the first of {len(steps)} steps contains the gold answer {gold[:60]!r}")
            )
    text = ""
    for step, piece in enumerate(steps[:-1] if task is not None else [], 1):
        text += piece
        answer = task.grade("", text, row.trajectory.num_options).answer
        if answer is not None:
            why = f"the answer {str(answer)[:60]!r} can be read after step {step} of {len(steps)}"
            return [*leaks, Suspicion("early", step, why)]
    return leaks


def _differences(row: Inspected, rule: SuspicionRule) -> list[Suspicion]:
    flags = []
    step, change = largest_jump(row.steps.values)
    if step and _reaches(abs(change), rule.min_jump):
        flags.append(Suspicion("jump", step, f"the value changes by {change:+.2f} in step {step}"))
    step, width = widest(row)
    if step and width > rule.max_width:
        total = row.steps.num_completions[step - 1]
        why = f"the interval after step {step} is {width:.2f} wide ({total} completions)"
        flags.append(Suspicion("wide", step, why))
    for kind, name, said in (("prm", "PRM", row.scores), ("judge", "judge", row.verdicts)):
        step, gap = largest_gap(row.targets(), said)
        if step and _reaches(abs(gap), rule.min_gap):
            why = f"the {name} is {gap:+.2f} from the label of step {step}"
            flags.append(Suspicion(kind, step, why))
    return flags


def _reaches(difference: float, least: float) -> bool:
    """At least so much, whatever rounding took: 0.9 - 0.4 reaches 0.5."""
    return difference >= least - 1e-9


def _length(row: Inspected, limits: tuple[int, int]) -> list[Suspicion]:
    shortest, longest = limits
    unit = "tokens" if row.trajectory.response_ids else "characters"
    if row.length < shortest:
        return [Suspicion("length", 0, f"{row.length} {unit}: usual are {shortest} and more")]
    if row.length > longest:
        return [Suspicion("length", 0, f"{row.length} {unit}: usual are {longest} and fewer")]
    return []


def _unparseable(row: Inspected, completions: Mapping[StateKey, Sequence[Completion]]) -> list[Suspicion]:
    flags = []
    if row.trajectory.answer is None:
        flags.append(Suspicion("unparseable", len(row.trajectory.steps), "no answer can be read from the response"))
    for step, key in enumerate(row.states):
        rows = completions.get(key, ())
        missing = sum(one.answer is None for one in rows)
        if 2 * missing > len(rows):
            where = f"after step {step}" if step else "of the prompt"
            why = f"{missing} of {len(rows)} completions {where} have no answer"
            flags.append(Suspicion("unparseable", step, why))
    if row.trajectory.finish_reason != "stop":
        flags.append(Suspicion("cut", len(row.trajectory.steps), f"ended by '{row.trajectory.finish_reason}'"))
    return flags
