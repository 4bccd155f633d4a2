"""Numeric policies: what torch may trade for speed, under a name that is logged and belongs to the run's contract.

"exact" keeps every f32 product and every sum in f32 and picks kernels that repeat bit for bit. "fast" lets a GPU round
the factors of f32 products to TF32, sum products of half precision in less than f32, and choose kernels that add in
any order. On a CPU both compute the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hybrid.contracts.names import unknown_name
from hybrid.errors import ConfigError


@dataclass(frozen=True)
class NumericPolicy:
    """tf32: f32 products with factors of 10 bits. reduced_sums: half-precision products may be summed in less than f32.
    deterministic: only kernels that give the same bits each time."""

    name: str
    tf32: bool
    reduced_sums: bool
    deterministic: bool

    def apply(self, device: torch.device) -> None:
        """Set torch's global switches, as far as they concern `device`."""
        torch.set_float32_matmul_precision("high" if self.tf32 and device.type == "cuda" else "highest")
        if device.type != "cuda":
            return
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = self.reduced_sums
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.reduced_sums
        if self.deterministic:  # cuBLAS wants to be told through the environment, before its first product
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.deterministic)
        # Filling fresh memory with NaN finds bugs and costs bandwidth; kernels here write what they allocate.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tf32": self.tf32,
            "reducedPrecisionSums": self.reduced_sums,
            "deterministic": self.deterministic,
        }


POLICIES = {
    "exact": NumericPolicy("exact", tf32=False, reduced_sums=False, deterministic=True),
    "fast": NumericPolicy("fast", tf32=True, reduced_sums=True, deterministic=False),
}


def policy(name: str) -> NumericPolicy:
    """ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(unknown_name("numeric policy", name, POLICIES))
    return POLICIES[name]


def choose_device(name: str) -> torch.device:
    """The device that `backend.device` means here. ConfigError where there is none of that kind."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(unknown_name("torch device", name, ("auto", "cpu", "cuda")))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"backend.device = 'cuda': torch {torch.__version__} finds no CUDA device here; expected 'cpu' or 'auto', "
            "or a CUDA build of torch and a driver"
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
