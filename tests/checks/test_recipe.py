"""Settings by a model's size: which preset, what its GPUs hold, that presets bind to the experiments of their kind."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from espalier.checks.recipe import (
    NEUTRAL,
    SIZES,
    Node,
    kind_of,
    main,
    node_here,
    parameters_of,
    preset,
    recipe,
    size_of,
    zero_of,
)
from espalier.data.records import BadInput
from espalier.runtime.schemas import RLConfig, TrainConfig
from tests.runtime.test_configs import CONF, bind_components, compose_config
from tests.support.scripts import ROOT
from tests.support.slow import slow_unless

KINDS = {**NEUTRAL, "ppo": "ppo/grpo_problem_file"}
PRESETS = sorted(path for kind in KINDS for path in (CONF / "size" / kind).glob("*.yaml"))
# Published: Tulu 3 (SFT, DPO, PPO, reward model), VinePPO, Jiao et al., DAPO, Huang et al., Llama 2, TRL's documented
# commands for Qwen2 0.5B.
RATES = {
    "sft": (2e-5, 1e-5, 5e-6, 2e-6, 2e-6),
    "reward": (1e-5, 1e-5, 1e-6, 1e-6, 1e-6),
    "outcome": (1e-5, 3e-6, 3e-6, 5e-6, 5e-6),
    "dpo": (5e-7, 1e-6, 5e-7, 2e-7, 2e-7),
    "ppo": (1e-6, 1e-6, 1e-6, 1e-6, 1e-7),
}


@pytest.mark.parametrize(
    ("parameters", "size"),
    [(1e6, "0.5b"), (0.49e9, "0.5b"), (1.1e9, "1.5b"), (3.1e9, "1.5b"), (7.6e9, "7b"), (14.8e9, "7b"), (32.8e9, "32b"),
     (70.6e9, "70b"), (405e9, "70b")],
)  # fmt: skip
def test_a_model_has_the_size_it_is_nearest_to(parameters: float, size: str) -> None:
    assert size_of(int(parameters)) == size


@pytest.mark.parametrize(
    ("parameters", "full", "adapters"),
    [(0.49e9, ("none", "none", "none"), ("none", "none", "none")),
     (1.54e9, ("none", "none", "none"), ("none", "none", "none")),
     # 7.6e9 parameters, 56 GiB usable: ZeRO-2 of 8 takes 4 + 4/8 + 12/8 + 2 = 8 bytes each, 57 GiB; of 16 7, 50 GiB
     (7.6e9, ("zero2_offload", "zero3", "zero2"), ("none", "none", "none")),
     (32.8e9, (None, "zero3_offload", "zero3"), (None, "zero3", "zero3")),
     (70.6e9, (None, "zero3_offload", "zero3_offload"), (None, "zero3", "zero3"))],
)  # fmt: skip
def test_zero_is_the_fastest_that_fits_one_eight_and_sixteen_gpus(
    parameters: float, full: tuple[str | None, ...], adapters: tuple[str | None, ...]
) -> None:
    for ranks, alone, with_adapters in zip((1, 8, 16), full, adapters, strict=True):
        assert zero_of(int(parameters), ranks, has_adapters=False) == alone
        assert zero_of(int(parameters), ranks, has_adapters=True) == with_adapters


def test_what_fits_nowhere_ends_with_its_remedy_and_adapters_go_to_four_bits() -> None:
    with pytest.raises(BadInput, match=r"32\.8B parameters has no room .* on 1 GPU of 80 GiB: set lora=qlora, or more"):
        preset("dpo", int(32.8e9), 1, has_adapters=False)
    assert preset("sft", int(32.8e9), 1, has_adapters=True) == ["size=[sft/32b,sft/lora_large]", "lora=qlora"]
    assert preset("dpo", int(7.6e9), 1, True) == ["size=[dpo/7b,dpo/lora]"]
    assert preset("dpo", int(7.6e9), 8, False, Node(gpu_gib=141.0)) == ["size=dpo/7b", "deepspeed=zero1"]


def test_the_smallest_gpu_here_is_what_a_model_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert node_here() == Node()  # one of 80 GiB is taken for granted
    sizes = [SimpleNamespace(total_memory=gib * 2**30) for gib in (48, 24)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    monkeypatch.setattr("espalier.checks.recipe.whole_memory", lambda: 128 * 2**30)
    assert node_here() == Node(24.0, 64.0)
    monkeypatch.setattr("espalier.checks.recipe.parameters_of", lambda model: int(1.24e9))
    words, why = recipe("reward", ["problem_file"], "M", 1)
    assert words == ["-cn", "exp/reward/step_values", "size=reward/1.5b", "deepspeed=zero2_offload"]
    assert "on GPUs of 24 GiB" in why
    assert recipe("reward", ["problem_file"], "M", 1, ["lora=lora"])[0][2:] == ["size=[reward/1.5b,reward/lora]"]


@pytest.mark.parametrize("engine", ["zero3_offload", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "path",
    slow_unless(lambda path: path.stem in ("7b", "lora"), PRESETS),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_a_preset_binds_to_the_experiment_of_its_kind_and_sets_its_rate(path: Path, engine: str) -> None:
    kind = path.parent.name
    chosen = path.stem if path.stem[0].isdigit() else f"32b,{kind}/{path.stem}"
    size = f"[{kind}/{chosen}]" if "," in chosen else f"{kind}/{chosen}"
    config = compose_config(CONF, f"exp/{KINDS[kind]}", f"size={size}", f"deepspeed={engine}")
    assert "model" in bind_components(config)
    assert config["update"].learning_rate > 0
    assert config["update"].micro_batch_tokens >= 4096
    assert config["model"].gradient_checkpointing
    assert config["precision"] == "auto"  # bf16 on the GPUs that they are for
    assert config["checkpoints"].save_every > 0
    assert bool(config["lora"]) == ("lora" in path.stem)
    assert re.search(r"\(.*20\d\d.*\)|TRL's documented", path.read_text()), "a rate without its source"


def test_a_command_chooses_adapters_in_four_bits_over_a_presets_own() -> None:
    config = compose_config(CONF, "exp/dpo/preference_pairs", "size=[dpo/70b,dpo/lora]", "lora=qlora")
    assert (config["lora"].bits, config["update"].learning_rate) == (4, 5e-6)


@pytest.mark.parametrize("kind", RATES)
def test_rates_are_the_published_ones(kind: str) -> None:
    found = [compose_config(CONF, f"exp/{KINDS[kind]}", f"size={kind}/{name}")["update"].learning_rate
             for name, _ in SIZES]  # fmt: skip
    assert tuple(found) == RATES[kind]


def test_every_objective_is_of_the_kind_whose_rates_it_takes() -> None:
    heads = {"bradley_terry": "outcome", "outcome_reward": "outcome", "process_reward": "reward", "sft": "sft"}
    for path in sorted((CONF / "objective").glob("*.yaml")):
        objective = compose_config(CONF / "objective", path.stem)
        assert kind_of(TrainConfig(objective=objective)) == heads.get(path.stem, "dpo"), path.stem
    assert kind_of(RLConfig()) == "ppo"


def test_neutral_experiments_hold_no_setting_of_the_embedded_tasks() -> None:
    for kind, name in KINDS.items():
        config = compose_config(CONF, f"exp/{name}")
        assert config["model"].attention == "auto"
        assert kind == "ppo" or (config["max_steps"] == 0 and config["update"].learning_rate == 0.0)
        assert kind != "dpo" or (config["objective"].beta == 0.1 and config["objective"].sft_weight == 0.0)


def test_ppo_against_an_outcome_model_is_as_published_but_for_the_rate_of_a_size() -> None:
    """Huang et al. 2024: 1,000,000 responses in batches of 512, four passes, one rate of policy and critic."""
    config = compose_config(CONF, f"exp/{NEUTRAL['ppo']}", "reward.terms.outcome_model.path=R")
    update, critic = config["update"], config["critic"]
    assert config["rollout"].num_problems * config["rollout"].group_size * config["num_iterations"] == 999_936
    assert (update.num_epochs, update.minibatch_size, update.clip_low, update.clip_high) == (4, 512, 0.2, 0.2)
    assert (update.learning_rate, critic.learning_rate, critic.loss_coefficient, critic.clip_range) == (
        3e-6, 3e-6, 0.1, 0.2
    )  # fmt: skip
    assert (config["advantage"].gamma, config["advantage"].lam) == (1.0, 0.95)
    assert (config["kl"].coefficient, config["kl"].place, config["params"].temperature) == (0.05, "reward", 0.7)
    assert (critic.model.path, critic.model.source) == ("R", "reward_model")
    large = compose_config(CONF, f"exp/{NEUTRAL['ppo']}", "reward.terms.outcome_model.path=R", "size=ppo/70b")
    assert (large["update"].learning_rate, large["critic"].learning_rate) == (1e-7, 1e-7)


def test_a_tiny_policy_takes_the_embedded_tasks_own_experiment_and_a_large_one_never(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parameters_of(str(tiny_policy)) < 20e6
    assert recipe("dpo", ["rule_logic"], str(tiny_policy), 1)[0] == ["-cn", "exp/dpo/rule_logic"]
    assert recipe("dpo", ["qa_world", "word_arithmetic"], str(tiny_policy), 1)[0] == ["-cn", "exp/dpo/word_arithmetic"]
    words, why = recipe("reward", ["gsm8k"], str(tiny_policy), 1)
    assert words == ["-cn", "exp/reward/step_values", "size=reward/0.5b"]
    outcome = ["outcome_pairs_shopping_notes", "outcome_pairs_embedded"]
    assert recipe("outcome", outcome, str(tiny_policy), 1)[0] == ["-cn", "exp/reward/outcome_pairs_embedded"]
    assert recipe("outcome", ["outcome_pairs_gsm8k"], str(tiny_policy), 1)[0] == [
        "-cn", "exp/reward/outcome_pairs", "size=outcome/0.5b"
    ]  # fmt: skip
    assert recipe("ppo", ["rlhf_shopping_notes"], str(tiny_policy), 1)[0] == ["-cn", "exp/ppo/rlhf_shopping_notes"]
    assert "its rate is that of much larger models" in why
    monkeypatch.setattr("espalier.checks.recipe.parameters_of", lambda model: int(7.6e9))
    words, why = recipe("dpo", ["word_arithmetic"], "M", 8, ["deepspeed=zero1", "objective.beta=0.3"])
    assert words == ["-cn", "exp/dpo/preference_pairs", "size=dpo/7b"]
    assert recipe("outcome", outcome, "M", 8)[0] == [
        "-cn", "exp/reward/outcome_pairs", "size=outcome/7b", "deepspeed=zero3"
    ]  # fmt: skip
    words, says = recipe("ppo", ["rlhf_shopping_notes"], "M", 8, ["lora=lora"])
    assert words == ["-cn", "exp/ppo/ppo_outcome_model", "size=[ppo/7b,ppo/lora]"]
    assert says.endswith("ppo= names another)")
    monkeypatch.setattr("espalier.checks.recipe.parameters_of", lambda model: int(70e9))
    with pytest.raises(BadInput, match="does not fit 1 GPU of 80 GiB with lora=lora: set lora=qlora"):
        recipe("dpo", ["word_arithmetic"], "M", 1, ["lora=lora"])
    assert why.startswith("M (7.60B parameters) is trained by exp/dpo/preference_pairs size=dpo/7b")


def test_a_hub_models_parameters_are_counted_from_its_config(tiny_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_policy / "config.json").read_text())
    assert parameters_of(str(tmp_path)) == parameters_of(str(tiny_policy))


@pytest.mark.parametrize("words", [[], ["dpo", "gsm8k", "M"], ["sleep", "gsm8k", "M", "1"], ["dpo", "gsm8k", "M", "x"]])
def test_the_program_says_what_it_takes(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe", *words])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: give KIND TASKS MODEL RANKS [overrides], with KIND one of sft, ")


def test_the_program_says_a_missing_folder_in_a_line() -> None:
    command = [sys.executable, "-m", "espalier.checks.recipe", "dpo", "gsm8k", "/no/such/model", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: /no/such/model: no such model folder: check the path\n"
