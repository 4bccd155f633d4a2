"""What follows from a step's gradients: norm, clipping, loss scale, and the optimizer; all of it on the device.

Nothing here waits for the device. A step that must be skipped is skipped by a flag that the fused kernel reads; loss
scale, growth counter and optimizer step are tensors; the learning rate is picked from a table by the optimizer step,
which does not advance on a skipped step. `judge` writes everything the host wants to know into one row of numbers,
to be read whenever it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.backends.protocol import StepInfo, StepResult
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.optim.groups import Group
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows

FLOAT32_MAX = float(np.finfo(np.float32).max)
NORM_EPSILON = 1e-6  # of the clip factor max_norm / (norm + epsilon), as in the mirrored runner
TABLE_ROWS = 256  # learning rates of as many optimizer steps are on the device
DOT_PIECE = 1 << 16  # a product on a CPU sums all of it in f32

ROW = (
    *("loss_sum", "nll_sum", "norm", "clip", "scale", "scale_after", "growth", "overflow", "loss_overflow"),
    *("nan_count", "inf_count", "optimizer_step"),
)

SLOTS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}  # ours, and torch's


class Updater:
    """Scaler and optimizer of a session. `weights`: what this rank holds of the parameters, by name; none of it where a
    tensor has fewer rows than there are shards.

    torch's fused AdamW computes p -= lr * wd * p, then p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps): the rule of
    `hybrid.optim.adamw` in another order of roundings.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        settings: OptimizerSettings,
        max_grad_norm: float,
        scaler: DynamicLossScaler,
        device: torch.device,
    ) -> None:
        self.weights = dict(weights)
        self.settings = settings
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler  # its settings; its state moves on the device
        self.device = device
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [self.weights[name] for name in group.names if self.weights[name].numel()],
                    "weight_decay": settings.weight_decay if group.decay else 0.0,
                }
                for group in groups
                if group.names
            ],
            lr=self._lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr  # one tensor for all, filled in before each step
        for parameter in self.weights.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                **{slot: torch.zeros_like(parameter) for slot in SLOTS.values()},
            }
        self.restore(0, scaler)

    # --- state -------------------------------------------------------------------------------------------------------

    def restore(self, optimizer_step: int, scaler: DynamicLossScaler) -> None:
        """Go on from this optimizer step and scaler."""
        self.scaler = scaler
        self._scale = torch.tensor(float(self.scaler.scale), dtype=torch.float64, device=self.device)
        self._growth = torch.tensor(self.scaler.growth_counter, dtype=torch.int64, device=self.device)
        self._step = torch.tensor(optimizer_step, dtype=torch.int64, device=self.device)
        for state in self.optimizer.state.values():
            state["step"].fill_(float(optimizer_step))
        self._at_most = optimizer_step  # no fewer optimizer steps than this have been skipped
        self._fill_table(optimizer_step)
        self._row: Tensor | None = None

    def _fill_table(self, optimizer_step: int) -> None:
        self._table_start = optimizer_step
        table = [row[2] for row in rows(self.settings, optimizer_step + 1, TABLE_ROWS)]
        self._table = torch.tensor(table, dtype=torch.float32, device=self.device)

    def moments(self) -> dict[str, Tensor]:
        """Both moments by `<slot>/<name>`: the tensors themselves."""
        states = {name: self.optimizer.state[parameter] for name, parameter in self.weights.items()}
        return {f"{slot}/{name}": state[kept] for slot, kept in SLOTS.items() for name, state in states.items()}

    def scaler_state(self) -> dict[str, Any]:
        """As a checkpoint keeps it; waits for the device."""
        return {"scale": self._scale.item(), "growthCounter": int(self._growth.item())}

    @property
    def optimizer_step(self) -> int:
        """Waits for the device."""
        return int(self._step.item())

    # --- a step ------------------------------------------------------------------------------------------------------

    def step_scale(self) -> Tensor:
        """The loss scale of the current step, f64 []."""
        return self._scale if self.scaler.enabled else torch.ones_like(self._scale)

    def clear(self) -> None:
        for parameter in self.weights.values():
            parameter.grad = None
        self._row = None

    def statistics(self) -> Tensor:
        """Of the complete gradients of a step, f64 [3]: sum of squares, elements that are NaN, that are infinite."""
        gradients = [p.grad for p in self.weights.values() if p.grad is not None and p.numel()]
        if not gradients:
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        return torch.stack([value.double() for value in _statistics(gradients)])

    def judge(self, totals: Tensor, target_tokens: int) -> Tensor:
        """The row (f64, in the order of `ROW`) of the step with these sums over all of it and all ranks, f64 [5]: loss,
        nll, and `statistics`. Moves nothing."""
        if self._row is not None:
            return self._row
        loss_sum, nll_sum, squares, nan_count, inf_count = totals
        scale = self.step_scale()
        usable = squares <= FLOAT32_MAX  # what f32 cannot hold is no norm on any device; false for NaN
        norm = torch.where(usable, squares.sqrt() / scale, torch.nan)
        fits = totals[:2].abs().amax() <= FLOAT32_MAX * target_tokens  # false for NaN, too
        overflow = ~(usable & fits)
        clip = torch.ones_like(norm)
        if self.max_grad_norm > 0:
            clipped = self.max_grad_norm / (norm + NORM_EPSILON)
            clip = torch.where(overflow | (norm <= self.max_grad_norm), clip, clipped)
        scale_after, growth = self._scaler_after(overflow)
        step = self._step + (~overflow)
        values = (
            loss_sum,
            nll_sum,
            norm,
            clip,
            scale,
            scale_after,
            growth,
            overflow,
            ~fits,
            nan_count,
            inf_count,
            step,
        )
        self._row = torch.stack([value.to(torch.float64) for value in values])
        return self._row

    def _scaler_after(self, overflow: Tensor) -> tuple[Tensor, Tensor]:
        """`DynamicLossScaler.update` on the device: (scale that the next step uses, growth counter)."""
        scaler = self.scaler
        if not scaler.enabled:
            return torch.ones_like(self._scale), self._growth
        backs_off = overflow if scaler.overflow_check else torch.zeros_like(overflow)
        growth = torch.where(backs_off, 0, self._growth + 1)
        grows = growth >= scaler.growth_interval
        down = (self._scale * scaler.backoff_factor).clamp(min=scaler.min_scale)
        up = (self._scale * scaler.scale_factor).clamp(max=scaler.max_scale)
        scale = torch.where(backs_off, down, torch.where(grows, up, self._scale))
        return scale, torch.where(grows, 0, growth)

    def apply(self, row: Tensor) -> None:
        """Scale, counters and weights after the step that `judge` gave this row."""
        named = dict(zip(ROW, row, strict=True))
        if self._at_most - self._table_start >= TABLE_ROWS:
            self._at_most = self.optimizer_step
            self._fill_table(self._at_most)
        # Not by subscript: torch would read the index back to the host, and so wait for the step.
        self._lr.copy_(self._table.index_select(0, (self._step - self._table_start).reshape(1))[0])
        # The kernel divides by `grad_scale`; a step with a set `found_inf` changes neither weights, moments nor steps.
        self.optimizer.grad_scale = (named["scale"] / named["clip"]).float()  # type: ignore[attr-defined]
        self.optimizer.found_inf = named["overflow"].float()  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.scaler.enabled:
            self._scale = named["scale_after"]
            self._growth = named["growth"].to(torch.int64)
        self._step = named["optimizer_step"].to(torch.int64)
        self._at_most += 1
        self._row = None


def _statistics(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of squares f64, elements that are NaN, elements that are infinite) over all gradients."""
    squares = _squares(gradients)
    nothing = torch.zeros((), dtype=torch.int64, device=squares.device)
    if not squares.is_cuda and bool(squares.isfinite()):
        return squares, nothing, nothing
    nan_count = sum((g.isnan().sum() for g in gradients), nothing)
    inf_count = sum((g.isinf().sum() for g in gradients), nothing)
    return squares, nan_count, inf_count


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares, f64 []."""
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
    flat = (gradient.flatten() for gradient in gradients)
    pieces = (piece for g in flat for piece in (torch.split(g, DOT_PIECE) if len(g) > DOT_PIECE else (g,)))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).double().sum()


def step_result(row: Sequence[float], info: StepInfo, **times: Any) -> StepResult:
    """A row that has reached the host, as the protocol's result."""
    named = dict(zip(ROW, row, strict=True))
    overflow, loss_overflow = bool(named["overflow"]), bool(named["loss_overflow"])
    return StepResult(
        data_step=info.data_step,
        loss=FLOAT32_MAX if loss_overflow else named["loss_sum"] / info.target_tokens,
        nll=FLOAT32_MAX if loss_overflow else named["nll_sum"] / info.target_tokens,
        target_tokens=info.target_tokens,
        grad_norm=named["norm"] if isfinite(named["norm"]) else None,
        clip_factor=named["clip"],
        loss_scale=named["scale"],
        loss_scale_after=named["scale_after"],
        growth_counter=int(named["growth"]),
        overflow=overflow,
        loss_overflow=loss_overflow,
        nan_count=int(named["nan_count"]),
        inf_count=int(named["inf_count"]),
        optimizer_step=int(named["optimizer_step"]),
        **times,
    )
