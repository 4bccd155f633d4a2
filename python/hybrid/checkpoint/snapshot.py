"""What a run hands over to be saved: host copies of its state, and what the manifest says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid.checkpoint import state
from hybrid.checkpoint.manifest import Fingerprints, Hashes, Progress
from hybrid.checkpoint.safetensors import LateTensor
from hybrid.errors import HybridError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs

Tensors = Mapping[str, NDArray[np.float32] | LateTensor]


class Shaped(Protocol):
    """An array, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class CheckpointSnapshot:
    """One moment of a run.

    model: float32 master weights by parameter name, a tied tensor once; in memory, or to be read while they are
    written. optimizer: likewise float32 `<slot>/<parameter>`, such as `moment1/model.norm.weight`, of the parameter's
    shape. optimizer_step: updates applied (skipped steps do not count). scaler, cursor: plain JSON values of the loss
    scaler and the data loader. config: the resolved configuration. run_id: the same for the whole life of a run;
    runtime: where this was made (`webgpu`, `reference`, `torch`, `browser`). session: telemetry windows, elapsed
    milliseconds, and whatever else the loop wants back; not part of the state hash. special_tokens: ids by role (`bos`,
    `eos`, `pad`). tokenizer_json: the text of tokenizer.json, if there is one.
    """

    model: Tensors
    optimizer: Tensors
    optimizer_step: int
    progress: Progress
    config: Mapping[str, Any]
    model_config: ModelConfig
    seed: int
    run_id: str
    runtime: str
    scaler: Mapping[str, Any] = field(default_factory=dict)
    cursor: Mapping[str, Any] = field(default_factory=dict)
    hashes: Hashes = field(default_factory=Hashes)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    environment: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] | None = None
    session: Mapping[str, Any] = field(default_factory=dict)
    resume_audits: tuple[Mapping[str, Any], ...] = ()
    tokenizer_json: str | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def validate(self) -> None:
        """HybridError naming the first tensor that is missing, unknown, or of the wrong dtype or shape."""
        expected = {spec.name: spec.shape for spec in parameter_specs(self.model_config)}
        for problem in tensor_problems("the snapshot", dict(self.model), dict(self.optimizer), expected):
            raise HybridError(problem)
        for name, array in (*self.model.items(), *self.optimizer.items()):
            if array.dtype != np.float32:
                raise HybridError(
                    f"tensor {name!r} is {array.dtype}: a checkpoint holds float32 master weights and moments"
                )

    def owned(self) -> CheckpointSnapshot:
        """The same with arrays of its own, which nobody else can change."""
        return replace(
            self,
            model={name: _own(array) for name, array in self.model.items()},
            optimizer={name: _own(array) for name, array in self.optimizer.items()},
        )

    def state_hash(self) -> str:
        """The state hash of what would be saved (it reads every byte)."""
        return state.state_hash(
            state.digests_of_arrays(self.model),
            state.digests_of_arrays(self.optimizer),
            optimizer_step=self.optimizer_step,
            progress=self.progress.to_json(),
            scaler=self.scaler,
            cursor=self.cursor,
        )


def _own(tensor: NDArray[np.float32] | LateTensor) -> NDArray[np.float32] | LateTensor:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor


def tensor_problems(
    source: str,
    model: Mapping[str, Shaped],
    optimizer: Mapping[str, Shaped],
    expected: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """What is wrong with the names and shapes of a state, one sentence each; `expected`: the model's shapes by name."""
    problems = [
        f"{source} lacks the tensor {name!r} of shape {shape}" for name, shape in expected.items() if name not in model
    ]
    for name, array in model.items():
        if name not in expected:
            problems.append(f"{source} has the tensor {name!r}, which the model does not have")
        elif array.shape != expected[name]:
            problems.append(f"{source}: tensor {name!r} has shape {array.shape}, but the model needs {expected[name]}")
    for name, array in optimizer.items():
        slot, _, parameter = name.partition("/")
        if not slot or parameter not in expected:
            problems.append(f"{source} has the optimizer tensor {name!r}: expected <slot>/<parameter of the model>")
        elif array.shape != expected[parameter]:
            shape = expected[parameter]
            problems.append(f"{source}: optimizer tensor {name!r} has shape {array.shape}, but the model needs {shape}")
    return problems
