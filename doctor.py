"""Check a machine, a model, a task and a config before money is spent: one line each, green or the remedy.

    python doctor.py                                                     # the machine alone
    python doctor.py -cn exp/ppo/vineppo_word_arithmetic model.path=M output_dir=D
    python doctor.py -cn exp/sft/word_arithmetic model.path=M examples.path=F.jsonl output_dir=D
    python doctor.py -cn api/vllm/trajectories policy=M output=F.jsonl --quick     # without networks and engines

The arguments are those of the program that is to run (main.py, trainer_base_ds_mul.py, service_api_caller_v1.py or
vllm_inference.py): put doctor.py in its place, for one process. Networks are loaded, the engine starts, and one small
step is made; what that writes is removed, and the run's own folder is not touched. Exit code 0 where all is well, 1
where a check failed, 2 where the arguments make no config.
"""

import sys

from espalier.runtime.entrypoint import BadConfig, entrypoint
from espalier.runtime.logs import quiet_libraries
from espalier.runtime.schemas import RLConfig, SampleConfig, StageConfig, TrainConfig

QUICK = "--quick"


def main() -> None:
    """The checks of the config that is named, or of the machine."""
    is_quick = QUICK in sys.argv
    sys.argv = [word for word in sys.argv if word != QUICK]
    if len(sys.argv) == 1:
        from espalier.checks.check import examine, show
        from espalier.checks.checklist import machine_checks

        quiet_libraries()
        sys.exit(show(examine(machine_checks())))

    @entrypoint((RLConfig, TrainConfig, SampleConfig, StageConfig), config_name="rl")
    def check(config: RLConfig | TrainConfig | SampleConfig | StageConfig) -> int:
        if isinstance(config, StageConfig):
            raise BadConfig(
                "the doctor looks at runs: what stages come to, -cn training/explain and -cn values/plan say"
            )
        from espalier.checks.check import examine, show
        from espalier.checks.checklist import checks_of

        return show(examine(checks_of(config, has_engine=not is_quick)))

    check()


if __name__ == "__main__":
    main()
