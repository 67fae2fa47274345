"""The tasks that searches are held side by side on, with their policies and reward models."""

import subprocess
from dataclasses import dataclass, field

from benchmarks.credit.plan import read_plan
from benchmarks.credit.runs import planned_policy
from benchmarks.processes.forked import ROOT
from benchmarks.sampling.prefill import engine_options
from espalier.sampling.server import VLLMServer

FOLDER = ROOT / "experiments" / "search"


@dataclass(frozen=True)
class Cell:
    """Its name is that of a policy in plan.yaml; `prm` are settings of scripts/process_rewards.sh."""

    name: str
    max_tokens: int
    prm: tuple[str, ...]

    @property
    def task(self) -> tuple[str, ...]:
        """Settings of the task."""
        return (f"task={self.name}",)


CELLS = {cell.name: cell for cell in (Cell("word_arithmetic", 96, ("num_problems=300",)),
                                      Cell("rule_logic", 128, ("num_problems=600",)))}  # fmt: skip


@dataclass
class Models:
    """Folders of policies and reward models by cell; those that are not given are made."""

    policies: dict[str, str] = field(default_factory=dict)
    prms: dict[str, str] = field(default_factory=dict)

    def policy(self, cell: Cell) -> str:
        """Return the policy's folder."""
        if cell.name not in self.policies:
            plan = read_plan(ROOT / "benchmarks" / "credit" / "plan.yaml")
            self.policies[cell.name] = str(planned_policy(plan, cell.name, FOLDER))
        return self.policies[cell.name]

    def prm(self, cell: Cell, labels: str = "values") -> str:
        """Return the folder of the reward model that is trained on these labels of scripts/process_rewards.sh; one that
        was given is on values."""
        key = cell.name if labels == "values" else f"{cell.name}_{labels}"
        if key not in self.prms:
            run = FOLDER / f"{key}_prm"
            settings = [*cell.task, *cell.prm, f"policy={self.policy(cell)}", f"run={run}", "folds=1",
                        f"labels={labels}", f"max_tokens={cell.max_tokens}"]  # fmt: skip
            subprocess.run(["bash", "scripts/process_rewards.sh", *settings], cwd=ROOT, check=True)
            self.prms[key] = str(run / "prm" / "model")
        return self.prms[key]


def serve(policy: str, options: str) -> VLLMServer:
    """Return a server of the policy that is not started yet, one thread."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = str(FOLDER / f"{options}.server.log")
    return VLLMServer(policy, log, max_model_len=512, has_controls=True, num_threads=1, options=engine_options(options))
