"""Linear algebra that PyTorch does not get right for stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def inverses(matrices: Tensor) -> Tensor:
    """Inverses one by one, which is as quick for the few heads of a layer.

    PyTorch 2.14 with oneMKL returns numbers like 1e10 for a stack of matrices of 160 rows and more, once a process has called
    `torch.set_num_threads` with 2 or more; alone, each matrix comes out right.

    Args:
        matrices: [n, d, d] float32 or float64, any device.
    Returns:
        Tensor like `matrices`.
    Raises:
        torch.linalg.LinAlgError: a matrix is singular.
    """
    return torch.stack([torch.linalg.inv(matrix) for matrix in matrices])


def singular(matrices: Tensor) -> int | None:
    """Index of the first matrix that cannot be inverted, or None.

    Args:
        matrices: [n, d, d] float32 or float64, finite.
    """
    for index, matrix in enumerate(matrices.double()):
        pivots = torch.linalg.lu_factor_ex(matrix)[0].diagonal().abs()
        if not pivots.min() > 1e-12 * pivots.max():
            return index
    return None
