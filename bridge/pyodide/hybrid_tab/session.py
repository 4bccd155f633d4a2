"""A session on the device of this tab, driven from Python: one call across the border for each program."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid import errors
from hybrid.errors import ConfigError, HybridError
from hybrid.plan.compiler import PlanSettings
from hybrid_tab.batches import Batch
from hybrid_tab.compiling import CompiledPlan, compiled, parse_profile, plan_files


@dataclass(frozen=True)
class StepResult:
    """What a step came to; see `StepResult` in web/runtime/step_result.js. Times in milliseconds, None where they were
    not measured."""

    data_step: int
    loss: float
    nll: float
    target_tokens: int
    grad_norm: float | None
    clip_factor: float
    loss_scale: float
    loss_scale_after: float
    growth_counter: int
    overflow: bool
    loss_overflow: bool
    nan_count: int
    inf_count: int
    optimizer_step: int
    step_time_ms: float | None
    forward_ms: float | None
    backward_ms: float | None
    optimizer_ms: float | None
    timing_source: str


class _Border:
    """The JavaScript side of the script that is running: `ScriptHost` of web/pyodide/script_host.js."""

    host: Any = None


def set_host(host: Any) -> None:
    _Border.host = host


def _host() -> Any:
    if _Border.host is None:
        raise HybridError("there is no device here: this works in a script that the page runs")
    return _Border.host


async def _cross(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """The result of an asynchronous call, as Python values; an error of JavaScript as the same error of Python."""
    try:
        result = await call(*arguments)
    except Exception as error:
        raise _python_error(error) from None
    return result.to_py() if hasattr(result, "to_py") else result


def _python_error(error: Exception) -> Exception:
    if isinstance(error, HybridError):
        return error
    name, message = getattr(error, "name", ""), getattr(error, "message", None) or str(error)
    kind = getattr(errors, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, HybridError)):
        return HybridError(message)
    try:
        return kind(message)
    except TypeError:  # one that is made of more than a message
        return HybridError(message)


async def compile(settings: PlanSettings, *, blocks: Mapping[str, Callable[..., Any]] | None = None) -> CompiledPlan:
    """The plan for these settings on this device.

    blocks: functions in the place of those of `hybrid.models.decoder`, by name: normalise, embed, attend, feed_forward,
    layer, finish. Errors: ConfigError, LimitExceeded; OpError (a TypeError) from what a block does wrong.
    """
    return compiled(settings, parse_profile(await _cross(_host().deviceProfile)), blocks)


async def open(plan: CompiledPlan, *, seed: int = 1337, metrics_interval: int = 1) -> Session:
    """A session with fresh weights of the seed. metrics_interval: steps between two readbacks of results."""
    host = _host()
    for name, content in plan_files(plan.plan).items():
        host.file(name, content)
    shape = plan.plan.shape
    return Session(await _cross_raw(host.openSession, seed, metrics_interval), shape["B"], shape["T"])


async def _cross_raw(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    try:
        return await call(*arguments)
    except Exception as error:
        raise _python_error(error) from None


def report(**values: float | int | str | None) -> None:
    """Show numbers on the page: report(step=3, loss=2.5)."""
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not isinstance(value, float | int | str | None):
            raise ConfigError(f"report({name}={value!r}): expected a number or a text")
    _host().report([*values], [*values.values()])


class Session:
    """Trains a plan. A step is `begin`, one `accumulate` for each microbatch, then `apply`, or `step` for all of them.
    Results arrive later, through `results`."""

    def __init__(self, handle: Any, batch_size: int, sequence_length: int) -> None:
        self._handle = handle
        self._step = 0
        self.batch_size = batch_size
        self.sequence_length = sequence_length

    async def begin(self, data_step: int, target_tokens: int, microbatches: int = 1, z_loss: float = 0.0) -> None:
        """target_tokens: targets of the whole step, over all microbatches: the denominator of its loss."""
        await _cross(self._handle.begin, data_step, target_tokens, microbatches, z_loss)
        self._step = data_step

    async def accumulate(self, batch: Batch) -> None:
        await _cross(self._handle.accumulate, batch.words())

    async def apply(self) -> None:
        await _cross(self._handle.apply)

    async def step(self, batches: Sequence[Batch], z_loss: float = 0.0) -> int:
        """A whole step, the next one; returns its number, from 1 on."""
        targets = sum(batch.target_tokens for batch in batches)
        await self.begin(self._step + 1, targets, len(batches), z_loss)
        for batch in batches:
            await self.accumulate(batch)
        await self.apply()
        return self._step

    async def results(self, *, wait: bool = False) -> list[StepResult]:
        """What has arrived since the last call, in the order of steps; with `wait`, all of the steps applied so far."""
        rows = await _cross(self._handle.results, wait)
        return [StepResult(**{_snake(name): value for name, value in row.items()}) for row in rows]

    async def evaluate(self, batch: Batch) -> float:
        """Mean loss over the targets of a batch, without dropout."""
        found = await _cross(self._handle.evaluate, batch.words())
        return float(found["lossSum"] / found["targetTokens"])

    async def generate(
        self, prompt: Sequence[int], *, tokens: int = 200, temperature: float = 0.8, top_k: int = 0, seed: int = 1337
    ) -> list[int]:
        """Ids that continue the prompt. temperature 0 takes the likeliest each time; top_k 0 is off."""
        return list(await _cross(self._handle.generate, [*prompt], tokens, temperature, top_k, seed))

    def close(self) -> None:
        """Free its buffers. What a script leaves open is closed when it ends."""
        self._handle.close()


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
