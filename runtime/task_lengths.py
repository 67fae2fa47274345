"""Lengths by the task, for configs in which nobody gives any: `${by_task:128,1024}`.

The embedded tasks have short solutions and tiny policies; every other task, which is read from somewhere (`task.path`),
has solutions of real models. scripts/environment.sh says the same to the stages of the scripts.
"""

from omegaconf import DictConfig, OmegaConf


def register_lengths() -> None:
    """Make `${by_task:EMBEDDED,OTHER}` known to configs."""
    OmegaConf.register_new_resolver("by_task", by_task, replace=True)


def by_task(embedded: int, other: int, *, _root_: DictConfig) -> int:
    """Return `other` where the config's task is read from somewhere, else `embedded` (without a task, too)."""
    task = OmegaConf.select(_root_, "task")
    return other if isinstance(task, DictConfig) and "path" in [*task.keys()] else embedded
