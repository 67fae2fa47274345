"""Rounds: replayed rows, checkpoints as policies, RestEM's choices, the manifest, and the script's stages in one piece.

The script runs for real, with a `python` that only writes down what it is asked; the commands are then run here one
by one: stages as they are, samplers and trainers as stand-ins that write files of the same kinds.
"""

import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM

from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import (
    BadInput,
    Completion,
    Demonstration,
    PreferencePair,
    State,
    StepScores,
    StepValues,
    Trajectory,
)
from espalier.pipeline.rounds.choose_checkpoint import ChooseCheckpoint, choose
from espalier.pipeline.rounds.record_round import RecordRound
from espalier.pipeline.rounds.replay_rounds import ReplayRounds, kept_share
from espalier.pipeline.stage import StageContext, run_stage
from espalier.pipeline.values.choose_labels import ChooseLabels
from espalier.runtime.entrypoint import CONF, build, register_schemas
from espalier.runtime.schemas import SampleConfig, StageConfig, TrainConfig
from espalier.sampling.checkpoints import find_policy_checkpoints
from espalier.training import checkpoint
from espalier.training.engine import TorchEngine
from espalier.training.export_checkpoints import ExportCheckpoints
from tests.values.test_choose_labels import ROW

ROOT = Path(__file__).resolve().parent.parent.parent


def context(output: Path | str = "unused") -> StageContext:
    return StageContext(None, Path(output), 10.0)


def demonstrations(*texts: str) -> list[Demonstration]:
    return [Demonstration(f"p/{number}", "Q\n", text) for number, text in enumerate(texts)]


# --- replay -------------------------------------------------------------------------------------------------


def replay(run: Path, number: int, share: float, seed: int = 0, kind: str = "Demonstration") -> ReplayRounds:
    return ReplayRounds(run_dir=str(run), round=number, file="rows.jsonl", kind=kind, share=share, seed=seed)


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    """Three rounds of demonstrations; the ids are the same in each."""
    for number in range(3):
        write_records(tmp_path / f"round{number}" / "rows.jsonl", demonstrations(*(f"{number}{k}" for k in range(20))))
    return tmp_path


def test_the_first_round_is_itself(rounds: Path) -> None:
    path = rounds / "round0" / "rows.jsonl"
    stage = replay(rounds, 0, 1.0)
    assert stage.inputs() == []
    assert stage.run(str(path), context()) == read_records(Demonstration, path)


def test_a_share_of_every_earlier_round_follows_newest_first_with_its_round_in_the_id(rounds: Path) -> None:
    told = context()
    stage = replay(rounds, 2, 0.1)
    rows = stage.run(str(rounds / "round2" / "rows.jsonl"), told)
    assert stage.inputs() == [f"{rounds}/round1/rows.jsonl", f"{rounds}/round0/rows.jsonl"]
    assert [row.completion[0] for row in rows] == ["2"] * 20 + ["1"] * 2 + ["0"] * 2
    assert [row.id.partition("@")[2] for row in rows[20:]] == ["round1", "round1", "round0", "round0"]
    assert len({row.id for row in rows}) == len(rows)
    assert told.counts == {"this_round": 20, "round1": 2, "round1_repeated": 0, "round0": 2, "round0_repeated": 0}


def test_a_share_of_zero_reads_no_earlier_round(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", demonstrations("a"))
    stage = replay(tmp_path / "nowhere", 3, 0.0)
    assert stage.inputs() == []
    assert stage.run(str(tmp_path / "rows.jsonl"), context()) == demonstrations("a")


def test_what_a_later_round_teaches_already_is_not_replayed(rounds: Path) -> None:
    write_records(rounds / "round1" / "rows.jsonl", demonstrations("20", "new"))
    told = context()
    rows = replay(rounds, 2, 1.0).run(str(rounds / "round2" / "rows.jsonl"), told)
    assert [row.completion for row in rows[20:22]] == ["new", "00"]
    assert (told.counts["round1"], told.counts["round1_repeated"]) == (1, 1)


def test_the_share_is_exact_grows_with_itself_and_knows_no_order() -> None:
    ids = [f"p/{number}" for number in range(50)]
    small, large = kept_share(ids, 0.1, "s"), kept_share(ids, 0.5, "s")
    assert (len(small), len(large)) == (5, 25)
    assert small <= large
    assert kept_share(ids[::-1], 0.1, "s") == small
    assert kept_share(ids, 0.1, "other") != small


@pytest.mark.parametrize(("changes", "said"), [({"kind": "Problem"}, "stage.kind must be one of StepValues"),
                                               ({"share": 1.5}, "from 0 to 1, got 2, 1.5"),
                                               ({"number": -1}, "must be 0 or more")])  # fmt: skip
def test_a_replay_that_says_nothing_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        replay(tmp_path, **{"number": 2, "share": 0.5, **changes})


# --- the choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "rule", "place"),
    [
        ([0.3, 0.4, 0.5, 0.45, 0.6], "first_non_improvement", 2),
        ([0.3, 0.4, 0.5, 0.45, 0.6], "best", 4),
        ([0.3, 0.4, 0.5, 0.45, 0.6], "last", 4),
        ([0.3, 0.3, 0.9], "first_non_improvement", 0),  # it must rise, not stay
        ([0.5, 0.4], "first_non_improvement", 0),
        ([0.1, 0.2, 0.3], "first_non_improvement", 2),
        ([0.2, 0.7, 0.7], "best", 1),  # of equal ones the earliest
        ([0.2], "first_non_improvement", 0),
        ([0.2], "best", 0),
        ([0.9, 0.1], "last", 1),
    ],
)
def test_rules_of_restem_by_hand(accuracies: list[float], rule: str, place: int) -> None:
    assert choose(accuracies, rule) == place


def evaluated(path: Path, **accuracies: float) -> Path:
    rows = {name.replace("_", "-"): {"accuracy": {"mean": {"mean": value}}} for name, value in accuracies.items()}
    write_json(path, {"policies": rows, "failed": {}})
    return path


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    for step in (0, 20, 100):
        (tmp_path / "candidates" / f"step-{step}").mkdir(parents=True)
    return tmp_path / "candidates"


def test_the_choice_is_a_link_that_moves_with_the_run(candidates: Path, tmp_path: Path) -> None:
    policies = evaluated(tmp_path / "policies.json", x_step_0=0.1, x_step_20=0.2, x_step_100=0.15)
    told = context(tmp_path / "policy")
    ChooseCheckpoint(str(candidates), "first_non_improvement").run(str(policies), told)
    assert told.counts == {"step-0": 0.1, "step-20": 0.2, "step-100": 0.15, "chosen": "step-20"}
    assert (tmp_path / "policy").readlink() == Path("candidates/step-20")


@pytest.mark.parametrize(("text", "said"), [("[]", "not the evaluation of policies"), ("{", "not the evaluation"),
                                            ('{"policies": {}}', "0 evaluations of 'step-0'"),
                                            ('{"policies": {"a-step-0": {"accuracy": {"greedy": 1}}}}',
                                             "has no accuracy 'mean': there are greedy")])  # fmt: skip
def test_figures_that_are_missing_are_named(text: str, said: str, candidates: Path, tmp_path: Path) -> None:
    (tmp_path / "policies.json").write_text(text)
    with pytest.raises(BadInput, match=said):
        ChooseCheckpoint(str(candidates), "best").run(str(tmp_path / "policies.json"), context(tmp_path / "policy"))
    assert not (tmp_path / "policy").is_symlink()


# --- checkpoints as policies --------------------------------------------------------------------------------


def train_in_name_only(config: TrainConfig, step: int = 12) -> None:
    """What a finished training run leaves: every weight a little larger at every checkpoint."""
    run = Path(config.output_dir)
    if (run / "model").is_dir():
        return
    run.mkdir(parents=True)
    model_settings = {"_target_": "espalier.models.load.load_policy", "path": config.model["path"]}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model_settings}))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "train/loss": 1 / s}) + "\n" for s in (1, step)))
    shutil.copytree(config.model["path"], run / "model")
    if not config.examples["_target_"].endswith("StepValueExamples"):
        model = AutoModelForCausalLM.from_pretrained(config.model["path"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.5
        engine = TorchEngine(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), 0.0)
        checkpoint.save(run, engine, checkpoint.TrainState(4, "data"), keep=9)


@pytest.fixture
def trained(tiny_policy: Path, tmp_path: Path) -> Path:
    config = TrainConfig(output_dir=str(tmp_path / "run"), model={"path": str(tiny_policy)}, examples={"_target_": "x"})
    train_in_name_only(config)
    return tmp_path / "run"


def test_a_run_becomes_its_start_its_checkpoints_and_its_end(trained: Path, tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "candidates"
    ExportCheckpoints(str(trained)).run("", context(output))
    assert sorted(path.name for path in output.iterdir()) == ["step-00000000", "step-00000004", "step-00000012"]
    assert (output / "step-00000000").resolve() == tiny_policy.resolve()
    assert (output / "step-00000012").resolve() == (trained / "model").resolve()
    before = AutoModelForCausalLM.from_pretrained(tiny_policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(output / "step-00000004").state_dict()
    assert all(torch.equal(after[name], value + 0.5) for name, value in before.items())
    assert (output / "step-00000004" / "tokenizer.json").is_file()


def test_the_last_model_alone_needs_no_checkpoint(trained: Path, tmp_path: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    ExportCheckpoints(str(trained), "last").run("", context(tmp_path / "candidates"))
    assert [path.name for path in (tmp_path / "candidates").iterdir()] == ["step-00000012"]


@pytest.mark.parametrize(("damage", "said"), [
    (lambda run: (run / "metrics.jsonl").write_text("{}\n"), "does not say how many steps"),
    (lambda run: (run / "config.yaml").write_text("model: 3\n"), "does not say where training started"),
    (lambda run: next((run / "checkpoints/step-00000004/pieces").iterdir()).unlink(), "is missing"),
    (lambda run: (run / "checkpoints/step-00000004/state.json").write_text("{}"), "is damaged"),
])  # fmt: skip
def test_a_damaged_run_is_named_and_leaves_nothing(
    damage: Callable[[Path], Any], said: str, trained: Path, tmp_path: Path
) -> None:
    damage(trained)
    with pytest.raises((BadInput, checkpoint.BadCheckpoint), match=said):
        ExportCheckpoints(str(trained)).run("", context(tmp_path / "candidates"))
    assert not list(tmp_path.glob("candidates*"))


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    config = StageConfig(output=str(tmp_path / "candidates"), stage={})
    with pytest.raises(BadInput, match=r"config.yaml: no such file"):
        run_stage(ExportCheckpoints(str(tmp_path / "run")), None, config)


# --- the manifest -------------------------------------------------------------------------------------------


def test_the_manifest_holds_every_round_in_order(tmp_path: Path) -> None:
    for number in range(11):
        folder = tmp_path / f"round{number}"
        (folder / "candidates" / "step-1").mkdir(parents=True)
        (folder / "policy").symlink_to("candidates/step-1")
        write_json(folder / "data" / "x.meta.json", {"counts": {"rows": number}, "seconds": 1.5, "commit": "c"})
        policies = evaluated(folder / "policies.json", step_1=number / 10)
        stage = RecordRound(str(folder), number, "before", "start", {"method": "restem"})
        config = StageConfig(output=str(folder / "round.json"), input=str(policies), stage={})
        run_stage(stage, None, config)
    found = json.loads((tmp_path / "rounds.json").read_text())["rounds"]
    assert [row["round"] for row in found] == list(range(11))
    assert (found[3]["policy"], found[3]["trained_from"]) == ("candidates/step-1", "start")
    assert found[3]["files"]["data/x"]["counts"] == {"rows": 3}
    assert found[3]["candidates"] == {"step-1": {"mean": {"mean": 0.3}}}
    assert found[3]["seconds"] == 1.5


# --- the script ---------------------------------------------------------------------------------------------

NUM_PROBLEMS = 4


@cache
def composed(program: str, name: str, *choices: str) -> DictConfig:
    """A program's config before its settings; composing takes most of a test's time."""
    folder = CONF / "stage" if program == "run_stage.py" else CONF
    search = [f"hydra.searchpath=[file://{CONF}]"] if folder != CONF else []
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return compose(config_name=name, overrides=[*choices, *search])


def typed(command: Sequence[str]) -> Any:
    """The config of a command as the program gets it: settings by Hydra's grammar, none that does not exist."""
    program, flag, name, *settings = command
    assert flag == "-cn"
    choices = [setting for setting in settings if setting.startswith(("task=", "objective="))]
    config = copy.deepcopy(composed(program, name, *choices))
    OmegaConf.set_struct(config, True)
    for setting in OverridesParser.create().parse_overrides([s for s in settings if s not in choices]):
        OmegaConf.update(config, setting.key_or_group, setting.value(), merge=True)
    return OmegaConf.to_object(config)


def sampled(seed: int, problem: int, sample: int, config: SampleConfig) -> Trajectory:
    """A trajectory of two steps; odd samples are right."""
    ids = [10 + problem, 20 + sample, 30 + seed % 1000, 2]
    steps = [f"{ids[0]} {ids[1]}\n", f"#### {ids[2]}"]
    is_right = sample % 2 == 1
    name, answer = f"p{problem}", "7" if is_right else "8"
    return Trajectory(
        f"{name}/{sample}", name, "Q\n", "".join(steps), steps, [1], ids, [2, 4], "stop", "7", answer, is_right
    )


def sample_in_name_only(config: SampleConfig) -> None:
    """Trajectories, or completions of which those after an odd token are right."""
    output = Path(config.output)
    assert Path(config.policy).is_dir(), config.policy
    if output.exists():
        return
    if "states" in config.requests:
        states = read_records(State, config.requests["states"])
        write_records(output, [
            Completion(f"{s.id}/{k}", s.id, s.problem_id, "x", [5], "stop", "7", s.prefix_ids[-1] % 2 == 1)
            for s in states for k in range(config.params["n"])
        ])  # fmt: skip
        return
    problems = range(config.requests["first"], config.requests["first"] + config.requests["limit"])
    write_records(output, [sampled(config.seed, p, k, config) for p in problems for k in range(config.params["n"])])


def evaluate_in_name_only(config: SampleConfig, accuracies: dict[str, float]) -> None:
    """policies.json as vllm_inference.py writes it."""
    rows = {}
    for policy in find_policy_checkpoints(config.policies, config.output):
        step = policy.name.rpartition("-")[2].lstrip("0") or "0"
        rows[policy.name] = {"accuracy": {"mean": {"mean": accuracies[step]}}}
    if not (Path(config.output) / "policies.json").exists():
        write_json(Path(config.output) / "policies.json", {"policies": rows, "failed": {}})


def run_here(commands: Sequence[Sequence[str]], accuracies: dict[str, float]) -> None:
    """Run the commands of a script, sampling and training in name only."""
    register_schemas()
    for command in commands:
        config = typed(command)
        if isinstance(config, SampleConfig):
            evaluate_in_name_only(config, accuracies) if config.policies else sample_in_name_only(config)
        elif isinstance(config, TrainConfig):
            read_records({"StepValueExamples": StepValues, "PreferenceExamples": PreferencePair,
                          "DemonstrationExamples": Demonstration}[config.examples["_target_"].split(".")[-1]],
                         config.examples["path"])  # fmt: skip
            train_in_name_only(config)
        elif config.stage["_target_"].endswith("ScoreSteps"):
            assert (Path(config.stage["model"]) / "model.safetensors").is_file()
            rows = read_records(Trajectory, config.input)
            scores = [StepScores(t.id, t.problem_id, [0.5, 0.9 if t.is_correct else 0.2]) for t in rows]
            if not Path(config.output).exists():
                write_records(config.output, scores)
        else:
            assert run_stage(build(config.stage), None, config) == 0


def state_of(run: Path) -> dict[str, int]:
    """Every file's time of writing, but the locks' and the log of seconds."""
    paths = [path for path in run.rglob("*") if path.is_file() and path.name[0] != "." and path.stem != "seconds"]
    return {str(path): path.lstat().st_mtime_ns for path in paths}


COMMON = [f"num_problems={NUM_PROBLEMS}", "num_samples=4", "num_completions=2", "num_dev=8"]


@pytest.mark.slow
def test_restem_starts_each_round_from_the_first_policy_and_samples_from_the_chosen_checkpoint(
    script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["method=restem", f"policy={tiny_policy}", f"run={run}", "policy_replay=1", *COMMON]
    commands = script(*settings, "num_rounds=2")
    run_here(commands, {"0": 0.2, "4": 0.4, "12": 0.3})
    assert (run / "round0" / "policy").readlink() == Path("candidates/step-00000004")
    manifest = json.loads((run / "rounds.json").read_text())["rounds"]
    assert [row["policy_before"] for row in manifest] == [str(tiny_policy), f"{run}/round0/policy"]
    assert [row["trained_from"] for row in manifest] == [str(tiny_policy)] * 2
    assert manifest[1]["settings"]["rule"] == "first_non_improvement"
    assert manifest[1]["training"]["train"]["step"] == 12
    rows = read_records(Demonstration, run / "round1" / "replayed.jsonl")
    assert [row.id for row in rows[:2] + rows[8:10]] == ["p0/1", "p0/3", "p0/1@round0", "p0/3@round0"]

    before = state_of(run)
    run_here(script(*settings, "num_rounds=2"), {"0": 0.9, "4": 0.1, "12": 0.1})  # all is there: nothing is asked
    assert state_of(run) == before
    run_here(script(*settings, "num_rounds=3")[-8:], {"0": 0.2, "4": 0.2, "12": 0.3})
    assert (run / "round2" / "policy").readlink() == Path("candidates/step-00000000")
    assert [row["round"] for row in json.loads((run / "rounds.json").read_text())["rounds"]] == [0, 1, 2]


@pytest.mark.slow
def test_process_dpo_goes_on_from_the_last_policy_with_a_reward_model_of_each_round(
    script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["method=process_dpo", f"policy={tiny_policy}", f"run={run}", "num_rounds=2", "prm_replay=0.5",
                "prm_from=last", "stride=2", *COMMON]  # fmt: skip
    commands = script(*settings)
    run_here(commands, {"12": 0.5})
    manifest = json.loads((run / "rounds.json").read_text())["rounds"]
    assert [row["trained_from"] for row in manifest] == [str(tiny_policy), f"{run}/round0/policy"]
    assert [row["policy"] for row in manifest] == ["train/model"] * 2
    values = read_records(StepValues, run / "round1" / "process_rewards" / "replayed_step_values.jsonl")
    assert len(values) == 16 + 8
    assert {row.problem_id for row in values[:16]} == {"p2", "p3", "p4", "p5"}
    assert all(row.id.endswith("@round0") for row in values[16:])
    pairs = read_records(PreferencePair, run / "round1" / "examples.jsonl")
    assert {pair.kind for pair in pairs} == {"process"}
    for name, part in (("prm", "train"), ("prm_other", "held_out")):  # each goes on from its own fold's
        (train,) = [c for c in commands if f"output_dir={run}/round1/{name}" in c]
        assert f"model.path={run}/round0/{name}/model" in train
        assert {f"examples.part={part}", "examples.held_out_share=0.5"} < set(train)
    (score,) = [c for c in commands if f"output={run}/round1/process_rewards/step_scores.jsonl" in c]
    assert {f"stage.{name}={run}/round1/{folder}/model"
            for name, folder in (("model", "prm"), ("other_model", "prm_other"))} < set(score)  # fmt: skip


def test_one_fold_trains_one_reward_model_and_holds_a_tenth_out(script: Callable[..., list[list[str]]]) -> None:
    commands = script("policy=a", "run=b", "folds=1", name="process_rewards.sh")
    (train,) = [c for c in commands if c[0] == "trainer_base_ds_mul.py"]
    assert "examples.held_out_share=0.1" in train
    assert not any("stage.other_model" in part for c in commands for part in c)
    assert script("policy=a", "run=b", "folds=3", name="process_rewards.sh", code=2) == []


def test_labels_and_pairs_are_checked_before_anything_is_trained_on_them(
    script: Callable[..., list[list[str]]],
) -> None:
    commands = script("policy=a", "run=b", "smallest_reliability=0", name="process_rewards.sh")
    names = [c[2] if c[0] == "run_stage.py" else c[0] for c in commands]
    (check,) = [c for c in commands if "values/label_signal" in c]
    assert "stage.smallest_reliability=0" in check
    assert names.index("values/label_signal") + 1 == names.index("trainer_base_ds_mul.py")
    commands = script("policy=a", "run=b", "task=word_arithmetic", "pairs=process", name="preferences.sh")
    names = [c[2] if c[0] == "run_stage.py" else c[0] for c in commands]
    assert names == ["pairs/process_preferences", "pairs/check_pairs", "trainer_base_ds_mul.py"]
    assert "stage.scores=b/process_rewards/step_scores.jsonl" in commands[1]
    commands = script("policy=a", "run=b", "task=word_arithmetic", "pairs=step", name="preferences.sh")
    assert not any(part.startswith("stage.scores") for c in commands for part in c)


def test_every_round_checks_its_own_pairs_before_the_policy_learns_them(
    script: Callable[..., list[list[str]]],
) -> None:
    """A round of dpo_positive has no values: its pairs are right over wrong by their outcomes."""
    settings = ["policy=a", "run=b", "num_rounds=2", "largest_wrong_share=0.3"]
    commands = script("method=process_dpo", *settings)
    names = [c[2] for c in commands]
    checks = [place for place, name in enumerate(names) if name == "pairs/check_pairs"]
    assert [names[place - 1 : place + 3] for place in checks] == [
        ["pairs/process_preferences", "pairs/check_pairs", "rounds/replay_rounds", "exp/dpo/word_arithmetic"]
    ] * 2
    for number, place in enumerate(checks):
        data = f"b/round{number}/process_rewards"
        assert commands[place][3:] == [
            f"input=b/round{number}/examples.jsonl", f"output=b/round{number}/examples.check.json",
            f"stage.values={data}/step_values.jsonl", f"stage.scores={data}/step_scores.jsonl",
            "stage.largest_wrong_share=0.3",
        ]  # fmt: skip
    for method in ("dpo_positive", "restem"):
        assert not any("pairs/check_pairs" in c for c in script(f"method={method}", *settings))


def test_labels_by_contrast_are_what_the_reward_models_learn(
    script: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """The choice is read from the file that the stage has written."""
    register_schemas()
    run, policy = tmp_path / "run", str(tmp_path)
    rows = [Trajectory(**{**vars(ROW), "id": f"p/{k}", "is_correct": k < 30}) for k in range(400)]
    write_records(run / "process_rewards" / "trajectories.jsonl", rows)
    chosen = ChooseLabels().run(str(run / "process_rewards" / "trajectories.jsonl"), context())
    write_json(run / "process_rewards" / "labels.json", chosen)
    commands = script(f"policy={policy}", f"run={run}", "num_completions=3", name="process_rewards.sh")
    by_stage = {c[2]: c for c in commands if c[0] == "run_stage.py"}
    cut, join, label = (
        typed(by_stage[f"values/{name}"]) for name in ("cut_states", "join_completions", "label_by_contrast")
    )
    assert (cut.stage["solutions"], cut.stage["first_step"]) == ("right", 0)
    assert (cut.stage["smallest_alternative"], cut.stage["policy"]) == (0.1, policy)
    assert typed(by_stage["values/estimate_values"]).stage["estimator"] == "smoothed"
    assert (join.stage["states"], label.stage["states"], label.input) == (cut.output, cut.output, join.output)
    assert "values/label_signal" not in by_stage
    trains = [typed(c) for c in commands if c[0] == "trainer_base_ds_mul.py"]
    data = run / "process_rewards"
    assert [Path(train.examples["path"]) for train in trains] == [
        data / "prm_pairs.jsonl", data / "prm_other_pairs.jsonl"
    ]  # fmt: skip
    assert [train.model["path"] for train in trains] == [policy, policy]
    made = [typed(c) for c in commands if c[:3:2] == ["run_stage.py", "prm/make_log_ratio_reward"]]
    assert [row.stage["policy"] for row in made] == [f"{train.output_dir}/model" for train in trains]
    assert [(row.stage["part"], row.stage["held_out_share"], row.stage["reference"]) for row in made] == [
        ("train", 0.5, policy), ("held_out", 0.5, policy)
    ]  # fmt: skip
    assert {row.input for row in made} == {label.output}
    score = typed(by_stage["prm/score_steps"])
    assert [score.stage["model"], score.stage["other_model"]] == [row.output for row in made]
    pairs = [typed(c) for c in commands if c[:3:2] == ["run_stage.py", "pairs/outcome_preferences"]]
    assert [(row.stage["part"], row.stage["held_out_share"]) for row in pairs] == [("train", 0.5), ("held_out", 0.5)]
    judge = typed(by_stage["prm/prm_calibration"])
    assert (judge.input, judge.stage["target"]) == (label.output, "labels")
    assert typed(by_stage["pages/inspect_steps"]).stage["values"] == label.output
    old = run / "prm" / "model"
    old.mkdir(parents=True)  # with a head, of another recipe
    assert not any("prm/make_log_ratio_reward" in c for c in script(f"policy={policy}", f"run={run}",
                                                                    name="process_rewards.sh", code=2))  # fmt: skip
    old.rmdir()
    starts = [f"policy={policy}", "prm_start=m", "other_start=m"]
    assert len(script(*starts, f"run={run}", name="process_rewards.sh", code=2)) == 2  # nothing was completed
    of_hub = script("policy=org/name", f"run={run}", name="process_rewards.sh")
    made = [command for command in of_hub if "prm/make_log_ratio_reward" in command]
    assert made
    assert all("stage.reference=org/name" in command for command in made)


def test_two_reward_models_start_alike(script: Callable[..., list[list[str]]]) -> None:
    for given in ("prm_start=m", "other_start=m"):
        assert script("policy=a", "run=b", given, name="process_rewards.sh", code=2) == []


def test_contrast_is_refused_where_its_labels_would_not_be_what_is_trained_on(
    script: Callable[..., list[list[str]]],
) -> None:
    for settings in (["steps=cut_points"], ["rounds=r", "round=1"]):  # before anything is sampled
        assert script("policy=a", "run=b", "labels=contrast", *settings, name="process_rewards.sh", code=2) == []


def test_step_pairs_are_of_the_labels_that_the_run_has_chosen(
    script: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """Not of a file that an earlier choice has left there."""
    data = tmp_path / "run" / "process_rewards"
    data.mkdir(parents=True)
    (data / "labelled_steps.jsonl").write_text("")
    for labels, name in (("values", "stage.values"), ("contrast", "stage.labels")):
        write_json(data / "labels.json", {"labels": labels, "why": "contrast"})
        build_pairs, *_ = script(
            "policy=a", f"run={tmp_path}/run", "task=word_arithmetic", "pairs=step", name="preferences.sh"
        )
        file = {"values": "step_values", "contrast": "labelled_steps"}[labels]
        assert f"{name}={data}/{file}.jsonl" in build_pairs
        assert ("stage.chosen=solution" in build_pairs) == (labels == "contrast")
        build_pairs, check, *_ = script(
            "policy=a", f"run={tmp_path}/run", "task=word_arithmetic", "pairs=process", name="preferences.sh"
        )
        assert f"input={data}/trajectories.jsonl" in build_pairs
        assert f"stage.values={data}/{file}.jsonl" in check  # what the reward model that ranked them learned from
        assert ("stage.cut_wrong_below=0.5" in build_pairs) == (labels == "contrast")


def test_help_prints_what_a_script_does_and_its_defaults_and_starts_nothing() -> None:
    for name, default in (("process_rewards", "num_completions=4"), ("bench", ""), ("iterate", "num_rounds=2")):
        done = subprocess.run(["bash", str(ROOT / "scripts" / f"{name}.sh"), "--help"], capture_output=True, text=True,
                              env={"PATH": "/usr/bin:/bin"}, timeout=60, check=True)  # fmt: skip
        assert f"bash scripts/{name}.sh" in done.stdout
        assert default in done.stdout
        assert not any(word in done.stdout + done.stderr for word in ("#!", "settings=", "source", "set -euo"))


def test_a_broken_stage_is_done_again_and_nothing_else(
    script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["method=dpo_positive", f"policy={tiny_policy}", f"run={run}", "num_rounds=1", *COMMON]
    commands = script(*settings)
    run_here(commands, {"12": 0.5})
    (pair, *_) = read_records(PreferencePair, run / "round0" / "examples.jsonl")
    assert pair.kind == "outcome"
    objective = objective_of(commands)
    assert objective["_target_"].endswith("PositivePreference")
    assert (objective["penalty"], objective["beta"], objective["sft_weight"]) == (50.0, 0.1, 0.0)
    before = state_of(run)
    (run / "round0" / "policy").unlink()
    (run / "round0" / "policy.meta.json").unlink()
    run_here(commands, {"12": 0.5})
    assert (run / "round0" / "policy" / "config.json").is_file()
    after = state_of(run)
    assert {path for path in before if before[path] != after[path]} == {str(run / "round0" / "policy.meta.json")}


def test_other_settings_in_the_same_run_are_refused(
    script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["method=restem", f"policy={tiny_policy}", f"run={run}", "num_rounds=1", *COMMON]
    run_here(script(*settings), {"0": 0.2, "4": 0.4, "12": 0.3})
    with pytest.raises(BadInput, match=r"policy was made otherwise \(stage.rule was 'first_non_improvement'"):
        run_here(script(*settings, "rule=best"), {"0": 0.2, "4": 0.4, "12": 0.3})


def objective_of(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The objective of the policy's training."""
    register_schemas()
    (command,) = [c for c in commands if c[0].startswith("trainer") and not c[2].startswith("exp/reward")]
    found: dict[str, Any] = typed(command).objective
    return found


def test_the_objective_of_a_round_and_its_settings_are_chosen(
    script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    common = [f"policy={tiny_policy}", f"run={tmp_path / 'run'}", "num_rounds=1", *COMMON]
    positive = objective_of(script("method=dpo_positive", *common, "objective.penalty=5", "objective.beta=0.3"))
    assert (positive["penalty"], positive["beta"]) == (5, 0.3)
    plain = objective_of(script("method=process_dpo", *common))
    assert (plain["_target_"].split(".")[-1], plain["sft_weight"]) == ("DirectPreference", 2.0)
    ranked = objective_of(script("method=process_dpo", *common, "objective=dpo_positive"))
    assert (ranked["_target_"].split(".")[-1], ranked["penalty"]) == ("PositivePreference", 50.0)
    published = objective_of(script("method=dpo_positive", *common, "exp=exp/dpo/dpop_rho_gsm8k"))
    assert (published["penalty"], published["beta"], published["temperature"]) == (50.0, 0.3, 0.6)


def test_states_at_cut_points_come_from_samples_with_their_log_probs(
    script: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    register_schemas()
    settings = ["policy=a", f"run={tmp_path}/run", "num_rounds=1", "steps=cut_points", "cut_threshold=0.8", *COMMON]
    commands = script(*settings)
    sample, split, cut = (typed(command) for command in commands[:3])
    assert sample.params["return_logprobs"]
    assert (split.input, split.output) == (sample.output, cut.input)
    assert split.stage["_target_"].endswith("SplitSteps")
    assert (split.stage["policy"], split.stage["threshold"], split.stage["cut_points_per_segment"]) == ("a", 0.8, 1)
    assert not typed(script(*settings[:2], "num_rounds=1", *COMMON)[0]).params["return_logprobs"]


@pytest.mark.parametrize("rule", ["first_non_improvement", "best"])
def test_both_rules_of_restem_choose_and_start_again_from_the_first_policy(
    rule: str, script: Callable[..., list[list[str]]], tiny_policy: Path, tmp_path: Path
) -> None:
    """Accuracy falls after the start and rises above it at the end: one rule stays, the other goes."""
    run = tmp_path / "run"
    settings = ["method=restem", f"policy={tiny_policy}", f"run={run}", "num_rounds=2", f"rule={rule}", *COMMON]
    run_here(script(*settings), {"0": 0.3, "4": 0.2, "12": 0.5})
    chosen = {"first_non_improvement": "step-00000000", "best": "step-00000012"}[rule]
    manifest = json.loads((run / "rounds.json").read_text())["rounds"]
    assert (run / "round1" / "policy").readlink() == Path("candidates") / chosen
    assert [row["trained_from"] for row in manifest] == [str(tiny_policy)] * 2
    assert manifest[1]["policy_before"] == f"{run}/round0/policy"


@pytest.mark.parametrize("pairs", ["outcome", "process", "step", "partial", "dpo_positive"])
def test_preference_learning_composes_for_every_kind_of_pair(
    pairs: str, script: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    register_schemas()
    (tmp_path / "run").mkdir()
    build_pairs, _, train = script(
        f"pairs={pairs}", "policy=a", f"run={tmp_path}/run", "task=word_arithmetic", name="preferences.sh"
    )
    config = typed(build_pairs)
    build(config.stage)
    assert typed(train).examples["path"] == config.output
    is_positive = typed(train).objective["_target_"].endswith("PositivePreference")
    assert is_positive == (pairs == "dpo_positive")


@pytest.mark.parametrize("bad", [["method=ppo", "policy=a", "run=b"], ["method=restem", "run=b"],
                                 ["policy=a", "run=b", "start_from=middle"], ["policy=a", "run=b", "sed=1"],
                                 ["policy=a", "run=b", "prm_from=me"],
                                 ["policy=a", "run=b", "objectiv.beta=1"]])  # fmt: skip
def test_a_wrong_setting_ends_the_script_before_anything_runs(
    bad: list[str], script: Callable[..., list[list[str]]]
) -> None:
    assert script(*bad, code=2) == []


def test_the_quick_start_takes_the_tasks_that_have_settings_for_all_its_trainings_and_names_them(
    script: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    conf = tmp_path / "checkout" / "conf"
    shutil.copytree(CONF, conf)
    for task in ("long_arithmetic", "rule_logic", "word_arithmetic"):
        commands = script(f"task={task}", f"run={tmp_path}/{task}", name="quickstart.sh")
        trained = [c[2] for c in commands if c[:1] == ["trainer_base_ds_mul.py"]]
        assert trained == [f"exp/{kind}/{task}" for kind in ("sft", "reward", "reward", "dpo", "dpo")]
    (conf / "exp" / "dpo" / "rule_logic.yaml").unlink()
    for task in ("long_arithmetic_rare", "rule_logic"):
        with pytest.raises(AssertionError, match=r"choose task=long_arithmetic or word_arithmetic;"):
            script(f"task={task}", f"run={tmp_path}/refused", name="quickstart.sh")
        assert script(f"task={task}", f"run={tmp_path}/refused", name="quickstart.sh", code=2) == []
    assert not (tmp_path / "refused").exists()


def test_rows_of_a_replay_keep_all_but_their_id(tmp_path: Path) -> None:
    row = PreferencePair("p/0>p/1", "p", "outcome", "Q", "a", "b", [1], [2], [3], 1.0, 0.0)
    for number, one in ((0, row), (1, replace(row, chosen_ids=[9]))):
        write_records(tmp_path / f"round{number}" / "rows.jsonl", [one])
    stage = replay(tmp_path, 1, 1.0, kind="PreferencePair")
    rows = stage.run(str(tmp_path / "round1" / "rows.jsonl"), context())
    assert rows[1] == replace(row, id="p/0>p/1@round0")
