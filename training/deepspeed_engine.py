"""The same engine over `deepspeed.initialize`: ZeRO 0 to 3, offload, on GPUs (nccl) or CPUs (gloo).

The YAML is DeepSpeed's own JSON; batch sizes and clipping are filled in here from the run's config. The
optimizer is ours (torch.optim) and the loop sets the learning rate, so that one schedule serves all engines.
DeepSpeed averages gradients over ranks; losses are scaled by the number of ranks to make that a sum.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from runtime.distributed import device, is_main_rank, world_size


class DeepSpeedEngine:
    """Args: `settings`, DeepSpeed's JSON as a dict; `num_micro_batches` a step and rank."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        max_grad_norm: float,
    ):
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.device = device()
        batch_sizes = {
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": max_grad_norm,
        }
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={**settings, **batch_sizes}
        )
        self.zero_stage = int(settings.get("zero_optimization", {}).get("stage", 0))

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, then DeepSpeed's step, which updates on the last micro-batch only."""
        if self.model.is_gradient_accumulation_boundary():
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate
        self.model.backward(loss * world_size(), scale_wrt_gas=False)
        self.model.step()

    _learning_rate = 0.0

    def set_learning_rate(self, learning_rate: float) -> None:
        """The rate of the update that the next accumulation boundary makes."""
        self._learning_rate = learning_rate

    def step(self, learning_rate: float) -> float:
        """The update has been made by the last `backward`; the gradient norm it saw."""
        norm = self.model.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    def save_model(self, folder: Path) -> None:
        """Gather (ZeRO-3) and write a standard folder from rank 0."""
        if self.zero_stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(self.model.module.parameters()), modifier_rank=0):
                state = {name: value.detach().cpu().clone() for name, value in self.model.module.state_dict().items()}
                if is_main_rank():
                    self.model.module.save_pretrained(folder, state_dict=state)
        elif is_main_rank():
            self.model.module.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """DeepSpeed's own checkpoint, one part a rank."""
        self.model.save_checkpoint(str(folder), tag="deepspeed")

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote, on the same number of ranks."""
        self.model.load_checkpoint(str(folder), tag="deepspeed")
