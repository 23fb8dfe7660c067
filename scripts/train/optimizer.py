"""The optimizer of the embedded model."""

from __future__ import annotations

import torch
from network import TrainingModel
from settings import ADAM_LR, MUON_LR, WEIGHT_DECAY
from torch import Tensor


class Optimizer:
    """Muon for the hidden matrices, Adam (0.9, 0.95) for the embedding and the norms.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the quintic
    Newton-Schulz iteration and its coefficients).
    """

    def __init__(self, model: TrainingModel) -> None:
        self.model = model
        self.matrices: dict[tuple[int, ...], list[str]] = {}
        self.others: list[str] = []
        for name, weight in model.master.items():
            if weight.dim() == 2 and "embed" not in name:
                self.matrices.setdefault(tuple(weight.shape), []).append(name)
            else:
                self.others.append(name)
        self.state = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in model.master.items()}
        self.steps = 0

    @staticmethod
    def orthogonalize(x: Tensor) -> Tensor:
        """Push all singular values of [batch, rows, columns] matrices towards one."""
        transposed = x.shape[1] > x.shape[2]
        x = (x.mT if transposed else x).bfloat16()
        x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return (x.mT if transposed else x).float()

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the master weights from the copies' gradients; `scale` multiplies both learning rates."""
        self.steps += 1
        grads = {name: w.grad.float() for name, w in self.model.weights.items()}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        clip = min(1.0, 1.0 / (float(norm) + 1e-6))
        for shape, names in self.matrices.items():
            updates = []
            for name in names:
                momentum = self.state[name][0].mul_(0.95).add_(grads[name], alpha=0.05)
                updates.append(grads[name].mul(0.05).add_(momentum, alpha=0.95))
            lr = MUON_LR * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, self.orthogonalize(torch.stack(updates)), strict=True):
                self.model.master[name].mul_(1 - MUON_LR * scale * WEIGHT_DECAY).add_(update, alpha=-lr)
        for name in self.others:
            first, second = self.state[name]
            grad = grads[name].mul_(clip)
            first.lerp_(grad, 0.1)
            second.lerp_(grad.square(), 0.05)
            update = first / (1 - 0.9**self.steps) / ((second / (1 - 0.95**self.steps)).sqrt() + 1e-8)
            self.model.master[name].add_(update, alpha=-ADAM_LR * scale)
        for weight in self.model.weights.values():
            weight.grad = None
        self.model.copy_master()
