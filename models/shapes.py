"""Sizes of which there are few, for matrix products on a CPU.

oneDNN builds a kernel for every shape of a bf16 product that it has not seen: measured, 1.3 ms for a product of one
segment's attention that takes 0.05 ms, and 5 ms for one of a linear layer that takes 0.3 ms. Packed rows and their
segments have a size of their own in every batch, so most of a step went into kernels that were used once. Rounded up,
the same few are used again: training steps of the tiny Llama took 0.6 of the time on a CPU with AMX.
"""

import torch

ROWS = 64  # tokens of a packed row, and of what a head reads
SEGMENT = 32  # queries and keys of one segment
TOGETHER = 4  # segments that are computed at once


def missing(size: int, step: int, tensor: torch.Tensor) -> int:
    """Count the rows that `size` lacks to a multiple of `step`, for products with a `tensor` [...] of any shape; none
    on other devices than CPUs, and none in float32, whose products have no kernel of their own for each shape. Ids are
    whole numbers: what they become is not known, and those that go to a GPU only afterwards are rounded up too."""
    is_rounded = tensor.device.type == "cpu" and tensor.dtype not in (torch.float32, torch.float64)
    return -size % step if is_rounded else 0
