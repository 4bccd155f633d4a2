"""Initial weights as NumPy arrays: the same bits in every runtime for one seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs
from hybrid.random.initial_numpy import normal


def initial_values(cfg: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of `parameter_specs` by name, float32, from the streams `init/<tensor>` of the seed."""
    fills = {"ones": np.ones, "zeros": np.zeros}
    return {
        spec.name: normal(seed, spec.name, spec.shape, spec.std)
        if spec.init == "normal"
        else fills[spec.init](spec.shape, np.float32)
        for spec in parameter_specs(cfg)
    }
