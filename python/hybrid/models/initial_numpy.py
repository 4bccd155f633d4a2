"""Initial weights as NumPy arrays: the same bits in every runtime for one seed."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from hybrid.models.config import ModelConfig
from hybrid.models.parameters import ParameterSpec, parameter_specs
from hybrid.random.initial_numpy import normal_part


def initial_values(cfg: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of `parameter_specs` by name, float32, from the streams `init/<tensor>` of the seed."""
    return {spec.name: initial_rows(spec, seed, 0, spec.shape[0]) for spec in parameter_specs(cfg)}


def initial_rows(spec: ParameterSpec, seed: int, first: int, last: int) -> NDArray[np.float32]:
    """The rows first..last-1 (of dimension 0) of one tensor."""
    shape = (last - first, *spec.shape[1:])
    if spec.init == "normal":
        row = prod(shape[1:])
        return normal_part(seed, spec.name, first * row, prod(shape), spec.std).reshape(shape)
    return np.full(shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
