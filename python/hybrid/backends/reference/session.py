"""A training session in NumPy: what every other session must agree with, and what trains where there is no GPU.

It keeps the semantics of a device: loss scaling, skipping on overflow or non-finite gradients, results that are
polled. Being synchronous, it has each result as soon as `apply` returns.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult
from hybrid.backends.reference.executor import PRECISIONS, Executor, Run, working_copies
from hybrid.backends.row_index import previous_ids, row_indices
from hybrid.backends.sampling import generate
from hybrid.backends.state_check import check_state
from hybrid.backends.validate import validate_batch
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.data.batch import Batch
from hybrid.errors import ConfigError, DataContractError
from hybrid.models.config import ModelConfig
from hybrid.models.initial_numpy import initial_values
from hybrid.models.parameters import parameter_specs
from hybrid.optim.groups import parameter_groups
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows
from hybrid.plan.programs import decode_graph, evaluation_graph, training_graph
from hybrid.random.streams import stream_key

Array = NDArray[Any]
FLOAT32_MAX = float(np.finfo(np.float32).max)
NORM_EPSILON = 1e-6  # of the clip factor max_norm / (norm + epsilon), as in the mirrored runner


class ReferenceSession:
    """Implements `backends.protocol.TrainingSession`.

    precision: "f32", "mixed-f16", or "f64" (the oracle: everything in double precision, states exported as float32).
    max_grad_norm: clip the gradient norm to this; None or 0 does not clip. loss_scaling: fields of
    `DynamicLossScaler`. seed: of initial weights and dropout. recompute: run each layer's forward part again in its
    backward part.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        batch_size: int,
        sequence_length: int,
        precision: str = "f32",
        optimizer: OptimizerSettings,
        max_grad_norm: float | None = None,
        loss_scaling: dict[str, Any] | None = None,
        seed: int = 1337,
        recompute: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision {precision!r}: the reference backend has {', '.join(PRECISIONS)}")
        optimizer.validate()
        self.model = model
        self.precision = precision
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm or 0.0
        self.shape = (batch_size, sequence_length)
        self.scaler = DynamicLossScaler(loss_scaling)
        self._loss_scaling = loss_scaling
        graph = training_graph(model, batch_size, sequence_length, recompute=recompute)
        self._training = Executor(graph, precision)
        self._evaluation: Executor | None = None
        self._decoders = lru_cache(maxsize=4)(self._decoder)
        self._dropout_keys = np.array(
            [stream_key(seed, f"dropout/{site}") for site in graph.dropout_sites], np.uint32
        ).reshape(-1, 2)
        specs = parameter_specs(model)
        self._shapes = {spec.name: spec.shape for spec in specs}
        self._groups = parameter_groups(specs)
        self._wide = PRECISIONS[precision].wide
        self._runs = 0
        fresh = {
            f"{slot}/{n}": np.zeros(s, np.float32) for slot in ("moment1", "moment2") for n, s in self._shapes.items()
        }
        self._load(SessionState(initial_values(model, seed), fresh, 0, self.scaler.state()))
        self._gradients = {name: np.zeros(shape, self._wide) for name, shape in self._shapes.items()}

    def _load(self, state: SessionState) -> None:
        self._parameters = {name: array.astype(self._wide) for name, array in state.model.items()}
        self._moments = {name: array.astype(self._wide) for name, array in state.optimizer.items()}
        self._optimizer_step = state.optimizer_step
        self._refresh_copies()
        self._info: StepInfo | None = None
        self._judged: StepResult | None = None
        self._results: list[StepResult] = []

    def _refresh_copies(self) -> None:
        self._working, self._weights_fit = working_copies(self._parameters, self.precision)

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, info: StepInfo) -> None:
        if self._info is not None:
            raise RuntimeError(f"begin: step {self._info.data_step} was not applied")
        if info.target_tokens < 1:
            raise DataContractError(f"step {info.data_step} has no target tokens: its loss would have no meaning")
        if info.microbatches < 1:
            raise ConfigError(f"step {info.data_step} has {info.microbatches} microbatches: expected at least 1")
        self._info = info
        self._judged = None
        self._accumulated = 0
        self._loss_sum = self._nll_sum = 0.0
        self._overflow = not self._weights_fit
        self._forward_ms = self._backward_ms = 0.0
        self._started = time.perf_counter()
        for gradient in self._gradients.values():
            gradient.fill(0.0)

    def accumulate(self, batch: Batch) -> None:
        info = self._info
        if info is None or self._accumulated == info.microbatches:
            raise RuntimeError("accumulate: more microbatches than `begin` announced, or no `begin`")
        scale = self.scaler.step_scale()
        run = self._run_batch(
            self._training,
            batch,
            data_step=np.array([info.data_step], np.uint32),
            z_loss=np.array([info.z_loss]),
            loss_seed=np.array([scale / info.target_tokens]),
        )
        self._loss_sum += float(run.outputs["loss_rows"].sum(dtype=np.float64))
        self._nll_sum += float(run.outputs["nll_rows"].sum(dtype=np.float64))
        self._overflow |= run.overflow
        self._forward_ms += run.forward_ms
        self._backward_ms += run.backward_ms
        self._accumulated += 1

    def _run_batch(self, executor: Executor, batch: Batch, **scalars: Array) -> Run:
        validate_batch(batch, self.model.vocabulary_size, self.model.context_length, self.shape)
        inputs: dict[str, Array] = {
            "ids": batch.ids,
            "targets": batch.targets,
            "positions": batch.positions,
            "segment_ids": batch.segment_ids,
            "sample_ids": batch.sample_ids,
            "dropout_keys": self._dropout_keys,
            **row_indices(executor.graph.inputs, batch),
            **scalars,
        }
        self._runs += 1
        return executor.run(inputs, self._working, self._gradients)

    def inspect(self) -> StepResult:
        if self._judged is None:
            self._judged = self._judge()
        return self._judged

    def _judge(self) -> StepResult:
        """Everything about the current step that follows from its gradients. Moves nothing."""
        info = self._info
        if info is None or self._accumulated != info.microbatches:
            raise RuntimeError("inspect or apply: not all microbatches of the step have been accumulated")
        scale = self.scaler.step_scale()
        squares = sum(float(np.square(g, dtype=np.float64).sum()) for g in self._gradients.values())
        nan_count = inf_count = 0
        if not isfinite(squares):
            nan_count = sum(int(np.count_nonzero(np.isnan(g))) for g in self._gradients.values())
            inf_count = sum(int(np.count_nonzero(np.isinf(g))) for g in self._gradients.values())
        # A device adds the squares up in float32: what that cannot hold is no usable norm here either.
        limit = FLOAT32_MAX if self._wide is np.float32 else float("inf")
        norm = sqrt(squares) / scale if isfinite(squares) and squares <= limit else None
        loss, nll = self._loss_sum / info.target_tokens, self._nll_sum / info.target_tokens
        loss_overflow = not (abs(loss) <= FLOAT32_MAX and abs(nll) <= FLOAT32_MAX)
        overflow = self._overflow or loss_overflow or norm is None
        clips = not overflow and self.max_grad_norm > 0 and norm is not None and norm > self.max_grad_norm
        after = self._scaler_after(overflow)
        return StepResult(
            data_step=info.data_step,
            loss=FLOAT32_MAX if loss_overflow else loss,
            nll=FLOAT32_MAX if loss_overflow else nll,
            target_tokens=info.target_tokens,
            grad_norm=norm,
            clip_factor=self.max_grad_norm / (norm + NORM_EPSILON) if clips and norm is not None else 1.0,
            loss_scale=float(scale),
            loss_scale_after=float(after.step_scale()),
            growth_counter=after.growth_counter,
            overflow=overflow,
            loss_overflow=loss_overflow,
            nan_count=nan_count,
            inf_count=inf_count,
            optimizer_step=self._optimizer_step + (0 if overflow else 1),
        )

    def _scaler_after(self, overflow: bool) -> DynamicLossScaler:
        after = DynamicLossScaler(self._loss_scaling)
        after.restore(self.scaler.state())
        after.update(overflow and after.overflow_check)
        return after

    def apply(self) -> None:
        result = self.inspect()
        self.scaler = self._scaler_after(result.overflow)
        before = time.perf_counter()
        if not result.overflow:
            self._optimizer_step = result.optimizer_step
            self._update(result.clip_factor / result.loss_scale)
            self._refresh_copies()
        ended = time.perf_counter()
        self._results.append(
            replace(
                result,
                step_time_ms=(ended - self._started) * 1e3,
                forward_ms=self._forward_ms,
                backward_ms=self._backward_ms,
                optimizer_ms=(ended - before) * 1e3,
                timing_source="device",
            )
        )
        self._info = self._judged = None

    def _update(self, multiplier: float) -> None:
        """AdamW over each group in the arithmetic type, in place; see `hybrid.optim.adamw`."""
        number = self._wide
        row = [number(value) for value in rows(self.optimizer, self._optimizer_step, 1)[0]]
        correction1, correction2 = row[0], row[1]
        beta1, beta2, eps = (
            number(value) for value in (self.optimizer.beta1, self.optimizer.beta2, self.optimizer.eps)
        )
        # 1 - beta is formed in double precision: for beta 0.999 the float32 difference is off by 1e-5.
        rest1, rest2 = number(1 - self.optimizer.beta1), number(1 - self.optimizer.beta2)
        for index, group in enumerate(self._groups):
            rate, decay = row[2 + 2 * index], row[3 + 2 * index]
            for name in group.names:
                gradient = self._gradients[name] * number(multiplier)
                m, v = self._moments[f"moment1/{name}"], self._moments[f"moment2/{name}"]
                parameter = self._parameters[name]
                m *= beta1
                m += rest1 * gradient
                v *= beta2
                v += rest2 * np.square(gradient)
                parameter -= rate * ((m / correction1) / (np.sqrt(v / correction2) + eps) + decay * parameter)

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        results, self._results = self._results, []
        return results

    # --- evaluation and sampling -------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Evaluation:
        if self._evaluation is None:
            self._evaluation = Executor(evaluation_graph(self.model, *self.shape), self.precision)
        run = self._run_batch(self._evaluation, batch, z_loss=np.zeros(1))
        loss = float(run.outputs["nll_rows"].sum(dtype=np.float64))
        return Evaluation(loss, batch.target_tokens, run.overflow or not self._weights_fit)

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        """See `backends.sampling.generate`. The weights are those of the moment each token is asked for."""
        caches: dict[str, Array] = {}
        seen: list[int] = []  # what they hold

        def decode(ids: list[int], start: int) -> Array:
            executor = self._decoders(len(ids))
            if not caches:
                caches.update(executor.new_caches())
            row = np.arange(start, start + len(ids), dtype=np.uint32)
            inputs = {
                "ids": np.array([ids], np.uint32),
                "positions": row[None],
                "start": row[:1],
                "last": np.array([len(ids) - 1], np.uint32),
            }
            del seen[start:]
            before = executor.graph.inputs.get("previous_ids")
            if before is not None:
                inputs["previous_ids"] = previous_ids(seen, before.shape[1])
            seen.extend(ids)
            self._runs += 1
            logits: Array = executor.run(inputs, self._working, caches=caches).outputs["logits"]
            return logits

        yield from generate(
            lambda ids: decode(ids, 0),
            lambda token, position: decode([token], position),
            prompt,
            options,
            vocabulary_size=self.model.vocabulary_size,
            context_length=self.model.context_length,
        )

    def _decoder(self, tokens: int) -> Executor:
        return Executor(decode_graph(self.model, tokens, self.model.context_length), self.precision)

    # --- state -------------------------------------------------------------------------------------------------------

    def export_state(self) -> SessionState:
        if self._info is not None:
            raise RuntimeError(f"export_state: step {self._info.data_step} is under way; apply it first")
        return SessionState(
            model={name: array.astype(np.float32) for name, array in self._parameters.items()},
            optimizer={name: array.astype(np.float32) for name, array in self._moments.items()},
            optimizer_step=self._optimizer_step,
            scaler=self.scaler.state(),
        )

    def import_state(self, state: SessionState) -> None:
        """CheckpointCorrupt when a name, shape, type or scaler field is not what this model needs; nothing has
        changed then."""
        check_state(state, self._shapes)
        scaler = DynamicLossScaler(self._loss_scaling)
        if state.scaler:
            scaler.restore(state.scaler)
        self.scaler = scaler
        self._load(state)

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "reference",
            "adapter": f"NumPy {np.__version__} on {platform.machine() or 'CPU'}",
            "precision": self.precision,
            "kernel_path": f"numpy-{self.precision}",
        }

    def memory(self) -> dict[str, int]:
        """Bytes by arena. `activations` is the most that one microbatch needs at once, without the temporaries of a
        kernel."""
        parameters = sum(array.nbytes for array in self._parameters.values())
        copies = sum(a.nbytes for n, a in self._working.items() if a is not self._parameters[n])
        moments = {
            slot: sum(a.nbytes for n, a in self._moments.items() if n.startswith(slot))
            for slot in ("moment1", "moment2")
        }
        arenas = {
            "params": parameters + copies,
            "grads": sum(array.nbytes for array in self._gradients.values()),
            **moments,
            "activations": self._training.peak_bytes,
        }
        return {**arenas, "total": sum(arenas.values())}

    def counters(self) -> dict[str, int]:
        """`submits` counts graph runs; NumPy has no buffers to read back and no pipelines."""
        return {"submits": self._runs, "readbacks": 0, "buffers_created": 0, "pipelines_created": 0}

    def close(self) -> None:
        self._decoders.cache_clear()
