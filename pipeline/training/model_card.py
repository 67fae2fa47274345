"""A model folder and the run it came from → the card that goes with it when it is given to others.

The card says what the model is, how it is used, what it was trained on (names, hashes, counts), with which settings,
and figures with their intervals. Folders of this machine do not appear in it: of an absolute path the last name stays.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from espalier.data.jsonl import file_sha256
from espalier.data.records import BadInput
from espalier.runtime.fingerprints import input_fingerprints

POLICY, VERIFIER, PROCESS, OUTCOME, TWO_POLICIES, OTHER = (
    "policy",
    "generative verifier",
    "process reward model",
    "reward model",
    "two policies",
    "network",
)
_WRITERS = POLICY, VERIFIER
_OUTCOME_OBJECTIVES = ("outcome_reward", "bradley_terry", "hinge")
_SHOWN = ("objective", "update", "optimizer", "lora", "deepspeed", "precision", "max_steps", "num_epochs", "seed",
          "num_iterations", "advantage", "reward", "kl", "rollout", "task")  # fmt: skip
"""What of a run's config the card shows; all of it goes along as run/config.yaml."""


_FOLDERS = re.compile(r"(?:(?<=file://)|(?<![^\s=:,'\"(\[{]))(?:~[\w.-]*/|/[^\s/=:,'\"()\[\]{}]+/)[^\s=:,'\"()\[\]{}]*")
"""An absolute path inside of other text: of two names at least, so that [/INST] and /no_think are none."""


@dataclass(frozen=True)
class Figure:
    """A figure, its 95 % interval and what it is of; `unit` "share" is shown in percent."""

    name: str
    mean: float
    low: float
    high: float
    n: int
    unit: str = "share"


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model: `kind` (of the constants above), `base` it was trained from, the `config` of its run,
    `commit` and `versions` of the code, `data`: (name, SHA-256, counts) of each file it was trained on, "" and {} of
    one that changed since, `tracked`: its W&B run as PROJECT/ID, "" without one. A model of another toolkit has its
    kind alone."""

    kind: str
    model_type: str
    base: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    tracked: str = ""


def read_facts(model: Path) -> ModelFacts:
    """Return what a model folder and the run around it (`config.yaml` and `provenance.yaml` beside it) say. Raises
    BadInput where it is no model folder."""
    if not (model / "config.json").is_file():
        raise BadInput(f"{model} has no config.json: name a model folder")
    network = json.loads((model / "config.json").read_text())
    run = model.parent
    origin = _yaml(run / "provenance.yaml")
    config = _yaml(run / "config.yaml") if origin else {}  # else it is not of a run of ours
    return ModelFacts(
        _kind(model, network, config),
        str(network.get("model_type", "")),
        str((config.get("model") or {}).get("path", "")),
        config,
        str(origin.get("commit", "")),
        origin.get("versions") or {},
        [_data(Path(path), digest) for path, digest in (origin.get("inputs") or {}).items() if _is_data(path)],
        _tracked(run, config),
    )


def _tracked(run: Path, config: Mapping[str, Any]) -> str:
    path = run / "wandb_id"
    project = (config.get("tracking") or {}).get("project", "")
    return f"{project}/{path.read_text().strip()}" if config and path.is_file() else ""


def _yaml(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def _kind(model: Path, network: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    architecture = next(iter(network.get("architectures") or []), "")
    if (model / "log_ratio_reward.json").is_file():
        return TWO_POLICIES
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        examples = str((config.get("examples") or {}).get("_target_", ""))
        return VERIFIER if examples.endswith("VerifierExamples") else POLICY
    objective = str((config.get("objective") or {}).get("_target_", ""))
    if architecture.endswith("ForSequenceClassification") or any(name in objective for name in _OUTCOME_OBJECTIVES):
        return OUTCOME
    return PROCESS if architecture.endswith("ForTokenClassification") else OTHER


def _is_data(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json", ".parquet", ".gz")


def _data(path: Path, fingerprint: str) -> tuple[str, str, Mapping[str, Any]]:
    if input_fingerprints({"path": str(path)}).get(str(path)) != fingerprint:
        return path.name, "", {}
    return path.name, file_sha256(path), counts_of(path)


def counts_of(path: Path) -> dict[str, Any]:
    """Return the numbers among the counts of a file's provenance, {} where it has none."""
    counts = _json(path.with_suffix(".meta.json")).get("counts", {})
    return {name: count for name, count in counts.items() if isinstance(count, int | float)}


def deviations_of(path: Path) -> str:
    """Return how the step scores that a file of figures was made of were read otherwise than published, by the
    provenance of both; "" where that says nothing."""
    meta = _json(path.with_suffix(".meta.json"))
    scores = ((meta.get("config") or {}).get("stage") or {}).get("scores") or []
    paths = [scores] if isinstance(scores, str) else list(scores.values() if isinstance(scores, Mapping) else scores)
    counts = (_json(Path(one).with_suffix(".meta.json")).get("counts") or {} for one in paths)
    return "; ".join(dict.fromkeys(str(one["deviations"]) for one in counts if one.get("deviations")))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def figures_of(document: Any, name: str = "") -> Iterator[Figure]:
    """Give every figure of a JSON document that has a mean with an interval: the rows of its table where it has one.

    A row of a table names itself (`metric`); elsewhere the name is the way to it.
    """
    if isinstance(document, Mapping):
        rows = (document.get("table") or {}).get("rows") if isinstance(document.get("table"), Mapping) else None
        if rows:
            yield from figures_of(rows, name)
        elif {"mean", "low", "high"} <= document.keys():
            numbers = [document[key] for key in ("mean", "low", "high")]
            if all(isinstance(number, int | float) for number in numbers):
                mean, low, high = map(float, numbers)
                unit = str(document.get("unit", "share"))
                yield Figure(str(document.get("metric", name)), mean, low, high, int(document.get("n", 0)), unit)
        else:
            for key, value in document.items():
                yield from figures_of(value, f"{name} {key}".strip())
    elif isinstance(document, Sequence) and not isinstance(document, str):
        for value in document:
            yield from figures_of(value, name)


def write_card(
    name: str,
    facts: ModelFacts,
    figures: Mapping[str, Sequence[Figure]],
    *,
    license_id: str = "",
    repository: str = "",
    data_repository: str = "",
) -> str:
    """Return the card as Markdown with the hub's front matter; `figures` by the file they stand in."""
    parts = [
        _front_matter(facts, license_id, data_repository),
        f"# {name}",
        _what(facts),
        _usage(facts, repository or name),
    ]
    parts += [_figures(figures), _trained(facts, data_repository)]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_data_card(name: str, files: Mapping[str, Mapping[str, Any]], model: str, license_id: str = "") -> str:
    """Return the card of a model's data: the files with their counts, and the model."""
    head = {"tags": ["espalier", "reasoning"]} | ({"license": license_id} if license_id else {})
    rows = [f"| `{file}` | {_counts(counts)} |" for file, counts in files.items()]
    return "\n\n".join([
        f"---\n{yaml.safe_dump(head)}---",
        f"# {name}",
        f"Data of [{model}](https://huggingface.co/{model}): JSON lines, in the formats of Espalier.",
        "\n".join(["| file | counts |", "|---|---|", *rows]),
    ]) + "\n"  # fmt: skip


def _front_matter(facts: ModelFacts, license_id: str, data_repository: str) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["espalier", "reasoning", *_tags(facts.kind)]}
    if facts.kind in (*_WRITERS, PROCESS):
        head["pipeline_tag"] = "text-generation" if facts.kind in _WRITERS else "token-classification"
    if _is_hub_name(facts.base):
        head["base_model"] = facts.base
    if license_id:
        head["license"] = license_id
    if data_repository:
        head["datasets"] = [data_repository]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def _tags(kind: str) -> list[str]:
    return {
        VERIFIER: ["generative-verifier"],
        PROCESS: ["process-reward-model"],
        TWO_POLICIES: ["process-reward-model"],
        OUTCOME: ["reward-model"],
    }.get(kind, [])


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/")) and not Path(path).exists()


def _what(facts: ModelFacts) -> str:
    base = f", trained from `{shown_path(facts.base)}`" if facts.base else ""
    said = {
        POLICY: "A language model that writes solutions step by step",
        VERIFIER: "A generative verifier: a language model that writes whether a solution is right",
        PROCESS: "A process reward model: its score of a step, from 0 to 1, estimates how likely a solution is to end "
        "right from there",
        OUTCOME: "A reward model: one score for a whole response",
        TWO_POLICIES: "A process reward model of two policies: the log-ratio of the one in this folder to the one in "
        "`reference/`, scaled as `log_ratio_reward.json` says",
        OTHER: "A network",
    }[facts.kind]
    return f"{said} ({facts.model_type}{base})."


def _usage(facts: ModelFacts, name: str) -> str:
    if facts.kind == POLICY:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
            f'model = AutoModelForCausalLM.from_pretrained("{name}")'
        )
        return f"## Use\n\n```python\n{code}\n```\n\nIt is asked with the prompts that it was trained on (below)."
    if facts.kind in (PROCESS, TWO_POLICIES):
        code = (
            f'import espalier\n\nprm = espalier.load_prm("{name}")\n'
            'scores = espalier.score_steps(prm, [("How much is 2 * (3 + 4)?\\n", ["3 + 4 = 7\\n", "7 * 2 = 14\\n"])])'
        )
        plain = (
            "Without Espalier: `AutoModelForTokenClassification`; with one label the score of a step is the sigmoid of "
            "the logit at its last token, with K + 1 labels the expected share of K under their softmax."
        )
        return f"## Use\n\n```python\n{code}\n```" + (f"\n\n{plain}" if facts.kind == PROCESS else "")
    if facts.kind == VERIFIER:
        command = f"python run_stage.py -cn prm/score_by_verifier stage.model={name} input=IN.jsonl output=OUT.jsonl"
        asked = (
            "It has to be asked as it was trained. So it is asked about whole solutions, without rationales:\n\n"
            f"    {command}\n\n"
            "Add `verifier@stage.verifier=step` where it judges steps. One that writes rationales is sampled first "
            "(`api/vllm/verifications`, read with `stage.verifications=FILE`); one that judges each step in one "
            "of them is read by `prm/score_by_step_verdicts`."
        )
        return f"## Use\n\n{asked}"
    if facts.kind == OUTCOME:
        command = (
            f"python run_stage.py -cn evaluation/score_responses stage.model={name} input=IN.jsonl output=OUT.jsonl"
        )
        return f"## Use\n\nEspalier scores responses with it:\n\n    {command}"
    return ""


def _figures(figures: Mapping[str, Sequence[Figure]]) -> str:
    parts = []
    for file, found in figures.items():
        rows = [f"| {figure.name} | {_number(figure.mean, figure.unit)} | [{_number(figure.low, figure.unit)}, "
                f"{_number(figure.high, figure.unit)}] | {figure.n} |" for figure in found]  # fmt: skip
        parts.append("\n".join([f"`{file}`", "", "| figure | mean | 95 % interval | n |", "|---|---|---|---|", *rows]))
    return "## Figures\n\n" + "\n\n".join(parts) if parts else ""


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "share" else f"{value:.1f} {unit}"


def _trained(facts: ModelFacts, data_repository: str) -> str:
    if not facts.config:
        return ""
    parts = ["## Training"]
    if facts.data:
        rows = [f"| `{name}` | {_counts(counts)} | {f'`{digest[:16]}`' if digest else 'changed since, or not there'} |"
                for name, digest, counts in facts.data]  # fmt: skip
        where = (
            f"Data: [{data_repository}](https://huggingface.co/datasets/{data_repository}).\n\n"
            if data_repository
            else ""
        )
        parts.append(where + "\n".join(["| data | counts | SHA-256 begins |", "|---|---|---|", *rows]))
    settings = {key: facts.config[key] for key in _SHOWN if facts.config.get(key) not in (None, {}, "")}
    parts.append(f"```yaml\n{yaml.safe_dump(without_folders(settings), sort_keys=False)}```")
    code = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if facts.tracked:
        parts.append(f"Its curves: W&B run `{facts.tracked}`.")
    parts.append(f"Espalier {facts.commit or 'of an unknown commit'}" + (f"; {code}." if code else "."))
    return "\n\n".join(parts)


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "not known"


def shown_path(path: str) -> str:
    """Return a path as others may see it: of an absolute one the last name."""
    return Path(path).name if path.startswith(("/", "~")) else path


def without_folders(node: Any) -> Any:
    """Return a config in which absolute paths, inside of other text too, are their last names."""
    if isinstance(node, Mapping):
        return {key: without_folders(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [without_folders(value) for value in node]
    if not isinstance(node, str):
        return node
    if "\n" not in node:
        node = shown_path(node)
    return _FOLDERS.sub(lambda found: Path(found.group()).name, node)
