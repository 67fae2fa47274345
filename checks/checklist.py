"""Which checks a config asks for: of its machine, model, task, training and engine, the cheap ones first.

Each program's config has a list of its own; what they look at is in `espalier.checks.checked_config`.
"""

from espalier.checks.check import Check
from espalier.checks.checked_config import CheckedConfig
from espalier.checks.machine import check_device, check_server_port, check_versions
from espalier.checks.rehearsal import rehearse_rl, rehearse_sampling
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig, SampleConfig, TrainConfig

Config = RLConfig | SampleConfig | TrainConfig


def checks_of(config: Config, has_engine: bool = True) -> list[Check]:
    """Return the checks of a program's config; without those that load networks and start engines unless
    `has_engine`."""
    case = CheckedConfig(config)
    if isinstance(config, RLConfig):
        checks = _of_rl(case)
    else:
        checks = _of_sampling(case) if isinstance(config, SampleConfig) else _of_training(case)
    return [check for check in checks if has_engine or not check.loads]


def machine_checks() -> list[Check]:
    """Return those that need no config."""
    return [Check("versions", check_versions), Check("device", lambda: check_device("fp32", "", needs_vllm=True))]


def _of_model(case: CheckedConfig) -> list[Check]:
    return [
        Check("versions", check_versions),
        Check("device", case.device),
        Check("memory", case.memory),
        Check("disk", case.disk),
        Check("tokenizer", case.check_tokenizer),
        Check("stop tokens", case.stop_tokens),
    ]


def _of_prompts(case: CheckedConfig) -> list[Check]:
    return [
        Check("port", lambda: check_server_port(getattr(case.config, "server", None))),
        Check("template", case.template),
        Check("window", case.fits_window),
        Check("grader", case.golds),
    ]


def _of_rl(case: CheckedConfig) -> list[Check]:
    return [
        *_of_model(case),
        Check("size", case.size),
        Check("tokenizers agree", case.agreeing_tokenizers),
        *_of_prompts(case),
        Check("client", case.client),
        Check("critic", case.critic),
        Check("packing", case.packing, loads=True),
        Check("engine", lambda: rehearse_rl(case.config, case.tokenizer), loads=True, is_rehearsal=True),
    ]


def _of_sampling(case: CheckedConfig) -> list[Check]:
    if case.config.policies:
        raise BadConfig("the doctor looks at one policy: give policy=MODEL with -cn api/vllm/trajectories, which "
                        "samples as the evaluation of policies does")  # fmt: skip
    engine = Check("engine", lambda: rehearse_sampling(case.config, case.tokenizer), loads=True, is_rehearsal=True)
    return [*_of_model(case), *_of_prompts(case), Check("requests", case.requests), engine]


def _of_training(case: CheckedConfig) -> list[Check]:
    if case.config.mode == "predict":
        return [*_of_model(case), Check("examples", case.check_examples), Check("checkpoints", case.checkpoints)]
    return [
        *_of_model(case),
        Check("size", case.size),
        Check("examples", case.check_examples),
        Check("packing", case.packing, loads=True),
        Check("step", case.step, loads=True, is_rehearsal=True),
    ]
