"""Pages say what is true: every command exists and composes, generated pages are what is generated, names exist."""

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.analysis.accuracy_figure import DrawAccuracies
from espalier.data.records import BadInput
from espalier.pipeline.pages.document_formats import PAGE, DocumentFormats
from espalier.pipeline.pages.document_settings import DocumentSettings
from espalier.pipeline.pages.document_stages import DocumentStages
from espalier.pipeline.stage import StageContext
from espalier.rl.probes.checks import REMEDIES
from espalier.runtime import schemas
from espalier.runtime.entrypoint import find_component
from espalier.runtime.help import explanations, topics_of
from tests.support.page_commands import CONF, PAGES, ROOT, Command, commands, fault, script_fault, spans
from tests.support.slow import slow_unless

COMMANDS = {page.name: sorted(set(commands(page)), key=str) for page in PAGES}
DOCS = ROOT / "docs"
# Settings of these begin with their name: where their keys stand.
OF_CONFIGS = {"objective": "objective", "examples": "examples", "advantage": "advantage", "client": "client",
              "server": "server", "requests": "requests", "filter": "filter", "params": "api/vllm_params",
              "model": "model", "lora": "lora"}  # fmt: skip
ROOTS = (schemas.RLConfig, schemas.TrainConfig, schemas.SampleConfig, schemas.StageConfig)
OF_SCHEMAS = {topic for root in ROOTS for topic in topics_of(root)}
CONFIGS = {"exp", "sft", "dpo", "ppo", "reward", "stage", "objective", "advantage", "filter", "api", "requests"}
STAGE_FOLDERS = {path.name for path in (CONF / "stage").iterdir()} - {"prm"}  # prm/model is of a run
GROUPS = {"task", "advantage", "filter", "objective", "reward", "critic", "kl", "lora", "deepspeed", "client", "server"}
ENDINGS = {"log", "json", "jsonl", "py", "md"}  # critic.json is a file


def context(output: str = "page.md") -> StageContext:
    return StageContext(None, Path(output), 10.0)


# What a reader begins with. Names of configs and settings on all pages are looked up without composing them below.
FIRST = ("README.md", "index.md", "quickstart.md", "walk.md", "process_rewards.md", "training.md", "reinforcement.md")


@pytest.mark.parametrize("page", slow_unless(FIRST.__contains__, [name for name, found in COMMANDS.items() if found]))
def test_every_command_of_a_page_exists_and_takes_its_settings(page: str) -> None:
    wrong = [f"{command}: {reason}" for command in COMMANDS[page] if (reason := fault(command))]
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_and_wrong_ones_are_seen() -> None:
    assert sum(map(len, COMMANDS.values())) > 100
    for words, reason in [
        ("python run_stage.py -cn no_such_stage", "no_such_stage"),
        ("python run_stage.py -cn values/cut_states stage.kep_ratio=0.5", "kep_ratio"),
        ("python main.py -cn exp/ppo/vineppo_word_arithmetic advantage=vine model.path=M", "vine"),
        ("python no_program.py -cn train", "no program"),
        ("bash scripts/preferences.sh pair=step policy=M", "pair"),
        ("bash scripts/bench.sh no_benchmark", "no_benchmark"),
        ("bash scripts/check.sh spelling", "spelling"),
        ("python main.py -cn exp/ppo/grpo_problem_file task.path=F model.path=M output_dir=D", "task.kind: no value"),
        ("bash scripts/prm_benchmark.sh prm=P task=problem_file task.kind=number file=F run=R", "task.path: no value"),
    ]:
        assert reason in fault(Command("page.md", tuple(words.split()))), words
    assert not fault(Command("page.md", ("bash", "scripts/evaluate.sh", "task=problem_file"), is_open=True))


def test_where_an_answer_is_read_in_a_box_the_prompt_asks_for_one() -> None:
    boxed = [command for found in COMMANDS.values() for command in found if "task.kind=response_math" in command.words]
    asking = [command for command in boxed if not command.is_open and "prm_benchmark.sh" not in str(command)]
    assert len(asking) > 10
    prompts = {"prompt=chat_math", "prompt@task.template=chat_math"}
    assert not [str(command) for command in asking if not prompts & {*command.words}]


@pytest.mark.parametrize("page", ["walk.md", "recipes.md"])
def test_every_setting_that_a_page_has_added_to_reinforcement_learning_composes_there(page: str) -> None:
    section = (DOCS / page).read_text().partition("\n## Reinforcement learning")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[1] for row in section.splitlines() if row.startswith("| ")]
    added = [span for cell in cells for span in spans(cell) if "=" in span and is_settings(span.replace("+", ""))]
    assert len(added) > 3
    given = "python main.py -cn exp/ppo/grpo_problem_file task.path=F task.kind=number model.path=M output_dir=D"
    wrong = {span: reason for span in added if (reason := fault(Command(page, tuple(f"{given} {span}".split()))))}
    assert not wrong


def test_the_first_page_leads_to_every_page() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert not [name for name in sorted(pages) if f"]({name})" not in (DOCS / "index.md").read_text()]
    here = {path.name for path in DOCS.glob("*.md") if not path.is_symlink()} - {"index.md"}
    assert not [name for name in sorted(here) if f"](docs/{name})" not in (ROOT / "README.md").read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_file_config_and_setting_that_a_page_names_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = [word for span in spans(text) for word in (span.split() if is_settings(span) else [span])]
    wrong = [word for word in words if is_missing(word) and not (page.name == "metrics.md" and "/" in word)]
    assert not wrong, f"{page.name} names what is not there: {', '.join(wrong)}"


def test_figures_in_prose_are_those_of_the_results() -> None:
    """Of results that are measured again now and then; others are read from generated pages."""

    def result(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        return found

    truth, hostile = result("grader_truth")["detail"]["ours"], result("grader_hostile")
    kills, restart = result("rl_kills")["detail"], result("rl")["figures"]["restart_over_live"]["value"]
    faults = [int(row["unit"].split()[2]) for row in result("cluster_faults")["figures"].values()]
    missed, slowest = truth["false_negatives"], hostile["detail"]["slowest_seconds"]
    shown = {
        "results": [
            f"false negatives {missed['count']} (0 % [0, {100 * missed['high']:.2f}]), false positives "
            f"{truth['false_positives']['count']} (0 % [0, {100 * truth['false_positives']['high']:.2f}])",
            f"(slowest {slowest['main thread']:.2f}), none raises, workers at most "
            f"{hostile['figures']['grader_hostile_child_mib']['value']:.0f} MiB, the parent grows by "
            f"{hostile['figures']['grader_hostile_parent_growth_mib']['value']:.0f} MiB",
            f"{hostile['detail']['over_one_second']['eight threads']} of 3,000 calls took 1.0 to "
            f"{slowest['eight threads']:.1f} s",
            f"each resumed: {kills['identical']} of {kills['runs']} runs end with the bits",
            f"the published systems do it: {restart:.1f} times as long",
        ],
        "launching": [f"{sum(faults)} runs ({min(faults)} to {max(faults)} of each"],
    }
    for page, parts in shown.items():
        text = " ".join((DOCS / f"{page}.md").read_text().split())
        assert [part for part in parts if part not in text] == []


SHOWN_CREDIT = {
    "grpo": "GRPO, the mean itself", "rloo": "RLOO", "reinforce_plus_plus": "REINFORCE++", "ppo": "PPO",
    "vineppo_k3": "VinePPO (K = 3, 8 problems)", "spo": "SPO (8 problems)",
    "spo_1": "SPO, a segment behind every improbable token", "grpo_8": "GRPO of 8 problems",
    "ppo_8": "PPO of 8 problems", "lambda_grpo": "`lambda_grpo`", "shared_prefixes": "`shared_prefixes`",
    "tree": "`tree`", "gold_likelihood": "`gold_likelihood`", "first_error": "`first_error`, its model paid for",
    "first_error (reward model given)": "`first_error`, its model given",
    "online_prm_progress": "`online_process_values`, its model paid for",
    "online_prm_progress (reward model given)": "`online_process_values`, its model given",
    "online_prm": "… with `form=value`, its model paid for",
    "online_prm (reward model given)": "… with `form=value`, its model given",
    "pure": "PURE, its model paid for", "pure (reward model given)": "PURE, its model given",
    "prof": "PROF, its model paid for", "prof (reward model given)": "PROF, its model given", "vapo": "VAPO",
    "prime": "PRIME",
}  # fmt: skip


def credit_table() -> list[str]:
    """The table of docs/credit.md, of the stored results."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "credit.json").read_text())["tables"][0]
    heads = {head.split(" ")[0]: re.findall(r"\(([\d.]+ %)", head) for head in stored["columns"][2:]}
    rows = {row[0]: dict(zip(heads, row[2:], strict=True)) for row in stored["rows"]}
    cells = ["word_arithmetic", "rule_logic", *(name for name in heads if name.startswith("long_"))]
    lines = ["", *(f"`{name}`, {heads[name][0]}" for name in cells)], ["---"] * (len(cells) + 1)
    found = ["| " + " | ".join(lines[0]) + " |", "|" + "|".join(lines[1]) + "|"]
    for method, shown in SHOWN_CREDIT.items():
        values = [str(rows[method].get(name, "")).replace(" (grpo_8)", "") for name in cells]
        found.append(f"| {' | '.join([shown, *values])} |")
    return [line.replace("|  | `", "| | `") for line in found]


def test_the_table_of_credit_is_that_of_the_results() -> None:
    page = (DOCS / "credit.md").read_text().splitlines()
    wanted = credit_table()
    start = next(number for number, line in enumerate(page) if line.startswith("| | `word_arithmetic`"))
    assert page[start : start + len(wanted)] == wanted
    assert not page[start + len(wanted)]


def is_settings(span: str) -> bool:
    """Whether a span is `key=value key=value`, to be added to a command."""
    return all(re.match(r"[a-z_.]+=", word) for word in span.split())


def is_missing(word: str) -> bool:
    """Whether a file of ours, a config, a setting or a choice of a group is named that there is not."""
    top, _, rest = word.partition("/")
    if re.fullmatch(r"[\w/.-]+\.(py|sh|md|yaml)", word) and rest and (ROOT / top).is_dir():
        return not (ROOT / word).exists()
    if re.fullmatch(r"[a-z_]+(/[a-z0-9_]+)+", word) and top in CONFIGS | STAGE_FOLDERS:
        return not any((CONF / place / f"{word}.yaml").is_file() for place in ("", "exp", "stage"))
    if setting := re.fullmatch(r"([a-z_]+)\.([a-z_]+)(\.[\w.]+)?(=\S*)?", word):
        keys = keys_of(setting[1])
        return bool(keys) and setting[2] not in keys | ENDINGS
    choice = re.fullmatch(r"([a-z]+)=([a-z][a-z0-9_]*)", word)
    return bool(choice and choice[1] in GROUPS and not (CONF / choice[1] / f"{choice[2]}.yaml").is_file())


@cache
def keys_of(group: str) -> set[str]:
    """The settings `group.KEY` that there are; empty where the group is none that is looked at."""
    if group in OF_SCHEMAS:
        kinds = [topics_of(root)[group] for root in ROOTS if group in topics_of(root)]
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}
    paths = sorted((CONF / OF_CONFIGS.get(group, "stage")).rglob("*.yaml")) if group in {*OF_CONFIGS, "stage"} else []
    rows: list[dict[str, Any]] = [yaml.safe_load(path.read_text()) or {} for path in paths]
    nodes = [row.get("stage", {}) if group == "stage" else row for row in rows]
    targets = {str(node["_target_"]) for node in nodes if "_target_" in node}
    options = {name for target in targets for name in inspect.signature(find_component(target)).parameters}
    return options | {key for node in nodes for key in node}


def test_the_page_of_file_formats_is_what_the_record_classes_say() -> None:
    made = DocumentFormats(str(ROOT)).run("", context())
    assert (DOCS / "formats.md").read_text() == made, "run bash scripts/pages.sh formats"


def test_the_page_of_settings_is_what_the_root_configs_say() -> None:
    made = DocumentSettings().run("", context())
    assert (DOCS / "settings.md").read_text() == made, "run bash scripts/pages.sh settings"
    for root in ROOTS:
        assert not [key for key, text in explanations(root).items() if text not in made.replace("\\|", "|")]


def test_every_kind_that_is_read_is_on_the_page() -> None:
    shown = {name for _, _, sources in PAGE for _, names in sources for name in names}
    text = "".join(path.read_text() for name in ("data", "pipeline", "sampling", "rewards", "training", "analysis")
                   for path in (ROOT / name).rglob("*.py"))  # fmt: skip
    assert {kind for kind in re.findall(r"read_records\(([A-Z]\w+)", text) if not kind.isupper()} <= shown


def test_a_field_without_a_text_is_refused_by_name(tmp_path: Path) -> None:
    for path, _ in [source for _, _, sources in PAGE for source in sources]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "data" / "records.py").write_text('class Problem:\n    """A."""\n\n    shape: list[int]\n')
    with pytest.raises(BadInput, match=r"data/records\.py: Problem\.shape has no text under it"):
        DocumentFormats(str(tmp_path)).run("", context())


def test_a_field_is_written_with_its_type_its_default_and_its_meaning(tmp_path: Path) -> None:
    page = DocumentFormats(str(ROOT)).run("", context())
    trajectory = page.partition("### Trajectory\n")[2].partition("###")[0]
    assert "| `response_ids` | list of integers | must be there | token ids that were sampled" in trajectory
    assert "| `num_options` | integer | `0` | number of options of a choice, else 0 |" in trajectory
    assert "| `answer` | text or null | must be there |" in trajectory
    assert "| `problem_id` | text | must be there | the problem's id |" in page.partition("### State\n")[2]
    assert "| `turns` | list of (object of texts) | `[]` |" in page
    assert "default_factory" not in page


def test_the_page_of_stages_has_a_row_for_every_config() -> None:
    made = DocumentStages(str(CONF / "stage")).run("", context())
    assert (DOCS / "stages.md").read_text() == made, "run bash scripts/pages.sh stages"
    for path in (CONF / "stage").rglob("*.yaml"):
        name = path.relative_to(CONF / "stage").with_suffix("")
        assert f"| `{name}` |" in made.partition(f"## {name.parent}\n")[2].partition("\n## ")[0]


def test_a_stage_whose_comment_says_no_arrow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Does things.\nstage:\n  x: 1\n")
    with pytest.raises(BadInput, match=r"mine\.yaml: its first comment must be '# WHAT IT READS -> WHAT IT WRITES"):
        DocumentStages(str(tmp_path)).run("", context())


def test_the_figure_and_the_table_of_the_first_page_are_of_the_stored_run() -> None:
    metrics = yaml.safe_load((CONF / "stage" / "pages" / "draw_accuracies.yaml").read_text())["stage"]["metrics"]
    made = DrawAccuracies(metrics).run(str(DOCS / "quickstart.json"), context("quickstart.svg"))
    assert (DOCS / "quickstart.svg").read_text() == made, "run bash scripts/pages.sh quickstart"
    page = (DOCS / "index.md").read_text()
    for policy, values in json.loads((DOCS / "quickstart.json").read_text())["accuracy"].items():
        shown = ("greedy", "mean", "majority_8", "best_of_8_product", "best_of_8_minimum", "best_of_8_last")
        cells = [f"{100 * values[m]['mean']:.1f} [{100 * values[m]['low']:.1f}, {100 * values[m]['high']:.1f}]"
                 for m in shown]  # fmt: skip
        row = next(line for line in page.splitlines() if line.startswith(f"| `{policy}`"))
        assert row.endswith(f"| {' | '.join(cells)} |")
        assert f">{100 * values['greedy']['mean']:.1f}<" in made


def test_a_file_that_is_no_summary_gives_no_figure(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"accuracy": {"sft": {"mean": {"mean": 0.5}}}}')
    with pytest.raises(BadInput, match=r"summary\.json: not the summary\.json of a finished run"):
        DrawAccuracies(["mean"]).run(str(tmp_path / "summary.json"), context("x.svg"))


@pytest.mark.parametrize(
    "word", ["rl/no_such.py", "exp/ppo/vine", "values/cut_statez", "advantage.threshhold", "objective=vine", "kl.size"]
)
def test_a_name_that_is_not_there_is_seen(word: str) -> None:
    assert is_missing(word)


@pytest.mark.parametrize(
    ("page", "group", "left_out"),
    [("training.md", "objective", ()), ("training.md", "examples", ()), ("credit.md", "advantage", ()),
     ("papers.md", "advantage", ()), ("papers.md", "objective", ("reward", "bradley_terry", "sft")),
     ("papers.md", "exp", ("debug", "word_arithmetic", "long_arithmetic", "rule_logic", "base_"))],
)  # fmt: skip
def test_a_page_names_every_config_of_its_group(page: str, group: str, left_out: tuple[str, ...]) -> None:
    named = " ".join(spans((DOCS / page).read_text()))
    names = [str(path.relative_to(CONF / group).with_suffix("")) for path in (CONF / group).rglob("*.yaml")]
    assert not [name for name in names if name not in named and not any(part in name for part in left_out)]


def test_troubleshooting_names_every_fault_and_quotes_what_programs_say() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    assert not [kind for kind in REMEDIES if f"| {kind} |" not in page]
    rooms = ("data", "models", "training", "rl", "runtime", "pipeline", "checks", "sampling")
    source = " ".join("".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")).split())
    source = re.sub(r'" f?"', "", source)
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    pieces = [piece.strip() for cell in cells for quote in re.findall(r'"([^"]+)"', cell) for piece in quote.split("…")]
    assert len(pieces) > 10
    assert not [piece for piece in pieces if piece not in source]


def test_the_site_builds_and_asks_no_other_machine_for_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 20
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(https?:)?//|"
                        r"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=[\"']?(https?:)?//|"
                        r"url\([\"']?(?:https?:)?//")  # fmt: skip
    styles = list((tmp_path / "site").rglob("*.css"))
    assert not [path.name for path in [*pages, *styles] if loaded.search(path.read_text())]


def test_readme_fits_two_screens_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert not [link for link in re.findall(r"\]\(([^)#]+)", text) if not (ROOT / link).exists()]


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'\nversion = "{citation["version"]}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"## {citation['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_hooks_and_workflow_call_the_scripts_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "bash scripts/check.sh\n" in ci
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["checks"]["steps"] if "run" in step] == ["bash .ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        assert not script_fault(hook["entry"].split()[1], hook["entry"].split()[2:])


@pytest.mark.parametrize(("added", "code"), [
    pytest.param("", 0, marks=pytest.mark.slow),
    pytest.param("[x](nowhere.md)", 1, marks=pytest.mark.slow),
    pytest.param("[x](training.md#nothing)", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_check_of_pages_fails_on_a_link_that_leads_nowhere(added: str, code: int, tmp_path: Path) -> None:
    line = next(line for line in (ROOT / "scripts" / "check.sh").read_text().splitlines() if " pages) " in line)
    command = line.partition("mkdocs ")[2].partition(" ;;")[0].split()
    shutil.copytree(DOCS, tmp_path / "docs")  # links become files
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n\n{added}\n")
    built = subprocess.run([sys.executable, "-m", "mkdocs", *command], cwd=tmp_path, capture_output=True, text=True,
                           timeout=60, check=False)  # fmt: skip
    assert built.returncode == code, built.stderr
