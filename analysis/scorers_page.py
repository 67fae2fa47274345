"""The page of step scorers: a table for every evaluation, a column for every scorer; no network, no script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.analysis.markup import Markup, tag
from espalier.analysis.page import render_page
from espalier.analysis.sections import note, section, table
from espalier.data.records import BadInput

MANY_LAST_MINIMA = 0.4
"""Of solutions of several steps, from which share on a process reward model is an outcome model in disguise."""
Cells = dict[str, str]  # figure → what is shown


@dataclass(frozen=True)
class Scorer:
    """A scorer's name, what was counted when it scored, and its documents; None for what was not evaluated."""

    name: str
    counts: Mapping[str, Any] = field(default_factory=dict)
    benchmark: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    pairs: Mapping[str, Any] | None = None


def render_scorers(scorers: Sequence[Scorer]) -> str:
    """Return the whole document. Raises BadInput on a document that is of another stage."""
    made = [(name, title, [cells(scorer) for scorer in scorers], text) for name, title, cells, text in _SECTIONS]
    shown = [(name, title, columns, text) for name, title, columns, text in made if any(columns)]
    parts = [
        section(name, title, note(text), _table([scorer.name for scorer in scorers], columns))
        for name, title, columns, text in shown
    ]
    lead = "Figures in percent with 95 % intervals over problems, but AUC and calibration error, which are shares."
    headline = tag("div", tag("h1", "Step scorers"), tag("p", lead, class_="lead"))
    return render_page("step scorers", [headline, *parts], [name for name, _, _, _ in shown])


def _table(names: Sequence[str], columns: Sequence[Cells]) -> Markup:
    rows = dict.fromkeys(figure for column in columns for figure in column)
    return table(["", *names], [[figure, *(column.get(figure, "–") for column in columns)] for figure in rows])


def _cell(figure: Mapping[str, Any] | None, scale: float = 100.0) -> str:
    if figure is None:
        return "none"
    digits = 1 if scale == 100.0 else 3
    mean, low, high = (f"{scale * figure[key]:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _what(scorer: Scorer) -> Cells:
    names = {"layout": "read as", "steps": "steps scored", "too_long": "solutions too long, without scores",
             "problems_seen": "problems that it was trained on"}  # fmt: skip
    found = {shown: str(scorer.counts[key]) for key, shown in names.items() if key in scorer.counts}
    left_out = (scorer.benchmark or {}).get("left_out") or {}
    return found | {f"left out: {reason}": str(number) for reason, number in left_out.items()}


def _first_errors(scorer: Scorer) -> Cells:
    own, index = (_part(part, "first_error") for part in (scorer.benchmark, (scorer.benchmark or {}).get("index")))
    if own is None:
        return {}
    cells = {"threshold": f"{own['threshold']:.4g}", "chosen on": _source(own["tuning"]),
             "solutions": str(own["num_rows"])}  # fmt: skip
    cells |= {name: _cell(figure) for name, figure in own["overall"].items()}
    cells |= {f"f1 of {group}": _cell(figures["f1"]) for group, figures in own["groups"].items()}
    if "mean_over_groups" in own:
        cells["f1, mean over groups"] = _cell(own["mean_over_groups"]["f1"])
    return cells | ({} if index is None else {"index alone: f1": _cell(index["overall"]["f1"])})


def _steps(scorer: Scorer) -> Cells:
    own, index = (_part(part, "steps") for part in (scorer.benchmark, (scorer.benchmark or {}).get("index")))
    if own is None:
        return {}
    cells = {
        "threshold": f"{own['threshold']:.4g}",
        "chosen on": _source(own["tuning"]),
        "steps": str(own["num_steps"]),
    }
    cells |= {name: _cell(figure) for name, figure in own["overall"].items()}
    cells |= {f"prm_score of {group}": _cell(figures["prm_score"]) for group, figures in own["groups"].items()}
    return cells | ({} if index is None else {"index alone: prm_score": _cell(index["overall"]["prm_score"])})


def _pairs(scorer: Scorer) -> Cells:
    return _by_aggregate(scorer.benchmark)


def _preferences(scorer: Scorer) -> Cells:
    own = scorer.pairs
    if own is None or "subsets" not in own:
        return _by_aggregate(own)
    cells = {"pairs": str(own["num_rows"]), "the response as a whole": _cell(own["accuracy"])}
    subsets = own["subsets"] if len(own["subsets"]) > 1 else {}
    cells |= {f"the response as a whole, {name}": _cell(figure) for name, figure in subsets.items()}
    return cells | {"ties": str(own["num_ties"]), "without a score": str(own["num_without_scores"])}


def _by_aggregate(document: Mapping[str, Any] | None) -> Cells:
    own = _part(document, "pairs")
    if document is None or own is None:
        return {}
    parts = {how: part for how, part in own.items() if isinstance(part, Mapping)}
    cells = {"pairs": str(own["num_pairs"])}
    for how, part in parts.items():
        cells[f"by {how}"] = _cell(part["overall"]["pair_accuracy"])
        cells |= {f"by {how}, {name}": _cell(figures["pair_accuracy"]) for name, figures in part["groups"].items()}
    index = (document.get("index") or {}).get("pairs")
    return cells | (
        {"index alone: fewer steps": _cell(index["fewer_steps"]["overall"]["pair_accuracy"])} if index else {}
    )


def _separation(scorer: Scorer) -> Cells:
    own = _part(scorer.benchmark, "separation")
    if own is None:
        return {}
    names = {"inner_auc": "AUC, inner steps", "inner_auc_of_the_index": "AUC of the index, inner steps",
             "last_auc": "AUC, last steps", "inner_ece": "calibration error, inner steps",
             "last_ece": "calibration error, last steps"}  # fmt: skip
    cells = {shown: _cell(own[key], 1.0) for key, shown in names.items() if key in own}
    share = own["last_minimum"]
    if share is not None:
        cells["lowest score on the last step"] = _last_minimum(share)
    return cells


def _values(scorer: Scorer) -> Cells:
    if scorer.calibration is None:
        return {}
    cells: Cells = {"against": str(scorer.calibration["target"])}
    for kind in ("inner", "terminal"):
        part = scorer.calibration[kind]
        names = {"auc": "AUC", "index_auc": "AUC of the index", "ece": "calibration error", "value_mae": "mean error"}
        cells |= {f"{shown}, {kind} steps": _cell(part[key], 1.0) for key, shown in names.items() if key in part}
    return cells


def _best_of_n(scorer: Scorer) -> Cells:
    own = scorer.evaluation or {}
    figures = {**own.get("accuracy", {}), **own.get("pass_at_k", {})}
    cells = {name: _cell(figure) for name, figure in figures.items()}
    return cells | {f"lowest score on the last step, {name}": _last_minimum(share)
                    for name, share in own.get("last_minimum", {}).items()}  # fmt: skip


def _by_n(scorer: Scorer) -> Cells:
    own: Mapping[str, Mapping[str, Any]] = (scorer.evaluation or {}).get("by_n", {})
    return {f"{name}, n = {n}": _cell(figure) for name, curve in own.items() for n, figure in curve.items()}


def _last_minimum(share: float) -> str:
    warned = " (an outcome model in disguise)" if share > MANY_LAST_MINIMA else ""
    return f"{100 * share:.1f}{warned}"


def _part(found: Mapping[str, Any] | None, name: str) -> Any:
    if found is None:
        return None
    if name not in found and name in ("first_error", "steps"):
        raise BadInput(f"a document without '{name}' is none of prm/evaluate_prm_benchmarks: make it again")
    return found.get(name)


def _source(tuning: Mapping[str, Any] | None) -> str:
    if tuning is None:
        return "given"
    share = f"{100 * tuning['share']:g} % of the problems"
    return f"{share} ({tuning['num_rows']} solutions), which are in no figure"


_SECTIONS = (
    ("scorers", "What scored", _what, "How each model reads a solution, and what it has no scores for."),
    ("first-errors", "First errors (ProcessBench)", _first_errors,
     "f1 is the harmonic mean of the shares of solutions with an error whose first error is found, and of those "
     "without one in which none is. A threshold that was chosen says on what; nobody else's is comparable with it."),
    ("steps", "Single steps (PRMBench)", _steps, "prm_score is the mean of the F1 of right and of wrong steps."),
    ("pairs", "Pairs", _pairs, "How often the better of two solutions has the higher aggregated score; a tie is half."),
    ("preferences", "Preference pairs", _preferences,
     "How often the preferred one of two responses has the higher score: of its steps by an aggregation (a tie is "
     "half), or of the response as a whole (a tie is wrong)."),
    ("separation", "Right and wrong steps apart", _separation,
     "Late steps are wrong more often: what a score knows is what it has above the step's index. The index is counted "
     "on these very steps, which flatters it."),
    ("values", "Calibration against values", _values,
     "Against Monte-Carlo values of the states that steps lead to; the last step's is the outcome."),
    ("best-of-n", "Best of n and votes", _best_of_n,
     "Samples chosen or weighted by the scores, beside the majority's answer, the sample of fewest steps (what the "
     "index alone would choose) and pass@n."),
    ("by-n", "Best of n and votes over n", _by_n,
     "What n of the samples would have given, in the mean over the subsets of n; equal best ones share."),
)  # fmt: skip
