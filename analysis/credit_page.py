"""The page of a run's step credit: figures first, then where estimators disagree, then the rollouts themselves.

Rollouts of an iteration and a problem are one group; blocks hold groups in the order of iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.analysis.credit_run import CreditRun, Disagreement, PairCount, scale_of
from espalier.analysis.embedded import BLOCK_CHARACTERS, Cap, pack
from espalier.analysis.markup import Markup, join, printable, tag
from espalier.analysis.script_page import render_script_page
from espalier.analysis.sections import duration, note, section, table, tiles
from espalier.data.records import SampledRollout


@dataclass(frozen=True)
class CreditData:
    """`pairs` count all steps of `run`; of all `disagreements` the first `num_listed` are on the page."""

    name: str
    run: CreditRun
    limit: float
    pairs: Sequence[PairCount]
    disagreements: Sequence[Disagreement]
    num_listed: int
    cap: Cap


@dataclass
class PackedGroups:
    """Groups of rollouts in blocks, and the index that finds them (a list for every column)."""

    blocks: list[str] = field(default_factory=list)
    index: dict[str, list[Any]] = field(default_factory=dict)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of every rollout: its group, and its place in that."""
    _groups: list[dict[str, Any]] = field(default_factory=list)
    _size: int = 0

    def add(self, rows: Sequence[SampledRollout], rollouts: Sequence[dict[str, Any]], cap: Cap) -> None:
        """Add a group that is not empty."""
        first, number = rows[0], len(self.index.get("problem", ()))
        columns = {
            "iteration": first.iteration,
            "problem": printable(first.problem_id),
            "ids": [printable(row.id) for row in rows],
            "right": sum(row.is_correct for row in rows),
            "reward": short(sum(row.reward for row in rows) / len(rows)),
            "worst": max((mark[1] for rollout in rollouts for mark in rollout["marks"]), default=0.0),
            "block": len(self.blocks),
            "place": len(self._groups),
        }
        for name, value in columns.items():
            self.index.setdefault(name, []).append(value)
        self.places += [(number, place) for place in range(len(rows))]
        gold = first.gold if isinstance(first.gold, str) else " | ".join(map(str, first.gold))
        self._groups.append({"prompt": cap.cut(first.prompt), "gold": cap.cut(gold), "rollouts": list(rollouts)})
        self._size += len(first.prompt) + sum(len(step) + 20 for row in rows for step in row.steps)
        if self._size > BLOCK_CHARACTERS:
            self.close_block()

    def close_block(self) -> None:
        """Pack what has been added since the last block."""
        if self._groups:
            self.blocks.append(pack(self._groups))
        self._groups, self._size = [], 0


def short(number: float) -> float:
    """Round to four digits."""
    return float(f"{number:.4g}")


def pack_groups(data: CreditData) -> PackedGroups:
    """Return every rollout of the run with all that the page shows of it."""
    marks: dict[int, dict[int, float]] = {}
    for one in data.disagreements:  # the largest of a step comes first
        marks.setdefault(one.rollout, {}).setdefault(one.step, short(one.size))
    packed = PackedGroups()
    groups: dict[tuple[int, str], list[int]] = {}
    for place, row in enumerate(data.run.rollouts):
        groups.setdefault((row.iteration, row.problem_id), []).append(place)
    order: list[int] = []
    for places in groups.values():
        details = [_detail(data, data.run.rollouts[place], marks.get(place, {})) for place in places]
        packed.add([data.run.rollouts[place] for place in places], details, data.cap)
        order += places
    packed.close_block()
    by_place = dict(zip(order, packed.places, strict=True))
    packed.places = [by_place[place] for place in range(len(data.run.rollouts))]
    return packed


def _detail(data: CreditData, row: SampledRollout, marks: dict[int, float]) -> dict[str, Any]:
    run = data.run
    return {
        "id": printable(row.id),
        "right": int(row.is_correct),
        "reward": short(row.reward),
        "answer": None if row.answer is None else data.cap.cut(row.answer),
        "finish": printable(row.finish_reason),
        "tokens": row.num_tokens,
        "version": row.policy_version,
        "steps": [data.cap.cut(step) for step in row.steps],
        "rewards": [short(value) for value in row.step_rewards],
        "values": [[short(value) for value in run.values(row, key)] for key in run.estimators],
        "advantages": [[short(value) for value in run.advantages(row, key)] for key in run.estimators],
        "marks": [[step, size] for step, size in sorted(marks.items())],
        "believed": [[data.cap.cut(answer), short(value)] for answer, value in row.reward_answers.items()],
    }


def _index(data: CreditData, packed: PackedGroups) -> dict[str, Any]:
    run, keys = data.run, list(data.run.estimators)
    estimators = []
    for key, name in run.estimators.items():
        scale = short(scale_of([value for row in run.rollouts for value in run.advantages(row, key)]))
        has_values = int(any(len(run.values(row, key)) for row in run.rollouts))
        estimators.append([printable(key), printable(name), scale, has_values])
    listed = [
        [*packed.places[one.rollout], one.step, *map(keys.index, one.estimators), *map(short, one.advantages)]
        for one in data.disagreements[: data.num_listed]
    ]
    return {"estimators": estimators, "groups": packed.index, "disagreements": listed}


def _key_figures(data: CreditData) -> Markup:
    rows = data.run.rollouts
    iterations, problems = {row.iteration for row in rows}, {row.problem_id for row in rows}
    return tiles(
        [
            (f"{len(iterations):,}", f"iterations, {min(iterations)} to {max(iterations)}"),
            (f"{len(rows):,}", f"rollouts of {len(problems):,} problems"),
            (f"{100 * sum(row.is_correct for row in rows) / len(rows):.1f} %", "right"),
            (f"{sum(len(row.steps) for row in rows):,}", "steps"),
            (f"{len(data.run.estimators)}", "estimators"),
            (f"{len(data.disagreements):,}", "disagreements"),
        ]
    )


def _pair_table(data: CreditData) -> Markup:
    if not data.pairs:
        return note("Nothing to compare: the run's own estimator alone (main.py estimators=from_groups adds others).")
    names = data.run.estimators
    rows = []
    for pair in data.pairs:
        share = f"{100 * pair.num_opposite / pair.num_sure:.1f}" if pair.num_sure else "none"
        both = f"{names[pair.estimators[0]]} against {names[pair.estimators[1]]}"
        rows.append([both, f"{pair.num_steps:,}", f"{pair.num_sure:,}", f"{pair.num_opposite:,}", share])
    return table(["estimators", "steps", "both sure", "opposite signs", "% of these"], rows)


def _disagreements(data: CreditData) -> Markup:
    text = (
        f"Sure is an advantage at least {data.limit:g} from 0 (stage.min_advantage). A disagreement's size is the "
        "smaller of the two. Advantages of the run's own estimator are those it was trained with, after whitening."
    )
    left = len(data.disagreements) - data.num_listed
    cut = [tag("p", f"The {left:,} smallest are not listed (stage.max_disagreements).", class_="cut")] if left else []
    pairs = tag("label", "estimators", tag("select", tag("option", "all pairs", value=""), id="pair"))
    more = Markup('<button id="more-disagreements" class="more" type="button" hidden>show more</button>')
    listed = [tag("div", pairs, class_="controls"), tag("div", id="disagreement-list", class_="scroll"), more]
    return section("disagreements", "Where estimators disagree", _pair_table(data), note(text), *cut,
                   *(listed if data.num_listed else []))  # fmt: skip


def _controls() -> Markup:
    def select(name: str, label: str, options: Sequence[tuple[str, str]]) -> Markup:
        written = (tag("option", text, value=key) for key, text in options)
        return tag("label", label, tag("select", *written, id=name))

    search = Markup('<input id="q" type="search" placeholder="search" aria-label="search" autocomplete="off">')
    steps = [Markup(f'<button id="{name}" class="chip" type="button">{text}</button>')
             for name, text in (("earlier", "‹ earlier"), ("later", "later ›"))]  # fmt: skip
    which = [("", "all groups"), ("mixed", "right and wrong ones"), ("marked", "with a disagreement")]
    keys = (
        "Keys: j and k next and previous rollout, Enter opens it, [ and ] iteration, e estimator, v value or advantage."
    )
    return join(
        [
            tag("div", search, select("in", "in", [("ids", "ids"), ("text", "prompts and steps")]),
                select("only", "groups", which), select("sort", "sorted by", []), class_="controls"),
            tag("div", select("it", "iteration", [("", "all")]), *steps, select("e", "colour by", []),
                select("by", "its", [("advantage", "advantage"), ("value", "value")]), class_="controls"),
            tag("div", id="legend", class_="legend"),
            tag("p", keys, class_="note"),
            tag("p", "reading …", id="status", role="status"),
            tag("noscript", note("The rollouts need JavaScript.")),
            tag("div", id="list"),
            Markup('<button id="more" class="more" type="button" hidden>show more</button>'),
        ]
    )  # fmt: skip


def size_sentences(data: CreditData, packed: PackedGroups) -> list[str]:
    """Say what the page holds and what the further estimators cost."""
    size = sum(map(len, packed.blocks))
    sentences = [f"This page holds {len(data.run.rollouts):,} rollouts in {size / 1e6:.2f} MB."]
    costs = data.run.costs
    if costs.get("samples/completions"):
        sentences.append(f"For comparison the further estimators had {costs['samples/completions']:,.0f} completions "
                         f"of {costs.get('samples/completion_tokens', 0):,.0f} tokens sampled, in "
                         f"{duration(costs.get('seconds/samples', 0.0))}; nothing was trained with them.")  # fmt: skip
    elif len(data.run.estimators) > 1:
        sentences.append("The further estimators had nothing sampled; nothing was trained with them.")
    return sentences


def render_credit(data: CreditData) -> str:
    """Return the whole document."""
    packed = pack_groups(data)
    first, *rest = size_sentences(data, packed)
    main = [
        tag("h1", "Credit, step by step"),
        tag("p", first, class_="lead"),
        *(tag("p", sentence) for sentence in rest),
        _key_figures(data),
        _disagreements(data),
        section("rollouts", "Rollouts", _controls()),
    ]
    links = ("disagreements", "rollouts")
    return render_script_page(data.name, main, links, ["credit.js", "credit.css"], _index(data, packed), packed.blocks)
