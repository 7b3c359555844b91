"""Muon for matrices and AdamW for the rest.

Owns: batched orthogonalised momentum over blocks of equal shape, parameter grouping by the table.
Knows nothing of: schedules, losses.
"""

from typing import Any

import torch
from torch import Tensor

from training.model import Base


def orthogonalise(g: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices, [k, m, n] with m <= n."""
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = torch.bfloat16 if g.is_cuda else torch.float32
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(rounds):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


class Muon:
    """Orthogonalised Nesterov momentum, batched over all blocks of one shape."""

    def __init__(self, params: list[tuple[Tensor, int]], momentum: float, decay: float) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
        for p, blocks in params:
            rows = p.shape[-2] // blocks
            groups.setdefault((rows, p.shape[-1]), []).append((p, blocks))
        self.groups = list(groups.items())
        self.buffers: list[Tensor | None] = [None] * len(self.groups)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; parameters without gradients count as zero gradient."""
        for k, ((rows, cols), members) in enumerate(self.groups):
            if all(p.grad is None for p, _ in members):
                continue
            grads = []
            for p, _ in members:
                g = p.grad if p.grad is not None else torch.zeros_like(p)
                grads.append(g.reshape(-1, rows, cols))
            g = torch.cat(grads)
            buffer = self.buffers[k]
            if buffer is None:
                buffer = self.buffers[k] = torch.zeros_like(g)
            buffer.lerp_(g, 1 - self.momentum)
            u = g.lerp(buffer, self.momentum)
            u = orthogonalise(u if rows <= cols else u.mT)
            if rows > cols:
                u = u.mT
            u = u.float() * (-lr * max(1.0, rows / cols) ** 0.5)
            at = 0
            for (p, _), g_p in zip(members, grads, strict=True):
                n = g_p.shape[0]
                if self.decay and p.grad is not None:
                    p.mul_(1 - lr * self.decay)
                p.add_(u[at : at + n].reshape(p.shape))
                at += n


class Optimiser:
    """Both optimisers with learning rates relative to one factor."""

    def __init__(
        self,
        model: Base,
        *,
        muon_lr: float,
        adam_lr: float,
        only: str | None = None,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        muon, embed, adam = [], [], []
        for p in model.table.values():
            param = model.params[p.name]
            if p.optimiser == "none" or (only is not None and not p.name.startswith(only)):
                param.requires_grad_(False)
                continue
            if p.optimiser == "muon":
                muon.append((param, p.blocks))
            elif p.optimiser == "embed":
                embed.append(param)
            else:
                adam.append(param)
        self.all = [p for p, _ in muon] + embed + adam
        self.muon = Muon(muon, momentum, decay)
        groups: list[dict[str, Any]] = [
            {"params": ps, "rel": rel} for ps, rel in ((embed, 1.0), (adam, 0.5)) if ps
        ]
        self.adam = torch.optim.AdamW(
            groups,
            lr=adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=bool(self.all) and self.all[0].is_cuda,
        )

    def step(self, factor: float) -> None:
        """Update with learning rates times `factor`, and drop the gradients."""
        self.muon.step(self.muon_lr * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor * group["rel"]
        self.adam.step()
        for p in self.all:
            p.grad = None
