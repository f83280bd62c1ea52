"""Adam with the interface of Apex's FusedAdam, on torch's own Adam arithmetic.

Without TransformerEngine or Apex, Megatron's distributed optimizer saves and loads torch's AdamW, whose step counter is
a tensor per parameter: loading asserts on the empty state of a fresh process, and then hands one counter tensor to all
parameters, which each advances. FusedAdam counts steps per parameter group; Megatron's code for it resumes exactly.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron_upipe.integration.symbols import Replacement


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``) or AdamW whose step counter ``step`` is an int in the parameter group.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, in the parameter's dtype. ``capturable`` is accepted and has no
    meaning on a CPU.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            for p in params:
                if len(self.state[p]) == 0:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            self._update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(done)) for _ in params],
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


def replacements() -> list[Replacement]:
    """Makes Megatron use ``GroupStepAdam`` on the code path that it has for FusedAdam."""
    why = "the optimizer state must survive a distributed-optimizer resume"
    to = lambda value: lambda original: value  # noqa: E731
    return [
        Replacement("megatron.core.optimizer:Adam", to(GroupStepAdam), why),
        Replacement("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", to(False), why),
        # what it asks its optimizer to be, in 0.18
        Replacement("megatron.core.optimizer.distrib_optimizer:Adam", to(GroupStepAdam), why, ">=0.18,<0.19"),
        Replacement("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", to(True), why),
        Replacement("megatron.core.optimizer.distrib_optimizer:USING_TE_OPTIMIZER", to(False), why),
        Replacement("megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER", to(True), why),
    ]
