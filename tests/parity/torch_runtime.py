"""The hand-written torch trainer as one more runtime of the parity contract."""

from __future__ import annotations

import numpy as np

from hybrid.backends.protocol import SessionState, StepResult
from hybrid.models.initial_numpy import initial_values
from hybrid.optim.table import rows
from hybrid.training.parity.runtimes import Trace
from hybrid.training.parity.workload import Workload
from oracles.torch_decoder import Settings, train

# Fields of the loss scaler that a workload leaves at their defaults.
SCALER = {"minScale": 1.0, "maxScale": 65536.0, "scaleFactor": 2.0, "backoffFactor": 0.5}


class TorchOracle:
    """float32 arithmetic throughout. In a mixed-f16 workload it follows the loss scaler and skips where told."""

    name = "torch"
    precisions = ("f32",)
    resumes = False

    def train(self, workload: Workload, resume_after: int = 0) -> Trace:
        optimizer, scaling = workload.optimizer, workload.loss_scaling
        initial = initial_values(workload.model, workload.seed)
        infos = [workload.info(step) for step in range(1, workload.steps + 1)]
        settings = Settings(
            lr=[row[2] for row in rows(optimizer, 1, workload.steps)],
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_norm=workload.max_grad_norm,
            z_loss=[info.z_loss for info in infos],
            seed=workload.seed,
            scaler=SCALER | scaling if scaling["enabled"] else None,
            overflow_steps=frozenset({workload.overflow_step} - {0}),
        )
        steps = [workload.microbatches(info.data_step) for info in infos]
        trace = train(workload.model.to_dict(), initial, steps, settings)
        scales = [*trace.loss_scales[1:], float(trace.scaler["scale"])]
        results = [
            StepResult(
                data_step=info.data_step,
                loss=trace.losses[i],
                nll=trace.nlls[i],
                target_tokens=info.target_tokens,
                grad_norm=trace.grad_norms[i],
                clip_factor=trace.clip_factors[i],
                loss_scale=trace.loss_scales[i],
                loss_scale_after=scales[i],
                growth_counter=0,
                overflow=trace.overflows[i],
                loss_overflow=False,
                nan_count=0,
                inf_count=0,
                optimizer_step=trace.optimizer_steps[i],
            )
            for i, info in enumerate(infos)
        ]
        final = SessionState(
            {name: weight.astype(np.float32) for name, weight in trace.weights.items()},
            {name: moment.astype(np.float32) for name, moment in trace.moments.items()},
            trace.optimizer_steps[-1],
        )
        return Trace(SessionState(initial, {}, 0), results, final)
