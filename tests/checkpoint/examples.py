"""A tiny model's state, and checkpoints of it, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.manifest import Fingerprints, Hashes, Progress
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs

TINY = ModelConfig(
    vocabulary_size=11,
    context_length=8,
    layers=1,
    width=4,
    heads=2,
    kv_heads=1,
    feed_forward_width=6,
    tied_embeddings=True,
)
TIME = 1_700_000_000.25  # seconds


def tensors(cfg: ModelConfig, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random weights of a model and two moments for each."""
    generator = np.random.default_rng(seed)
    model = {s.name: generator.standard_normal(s.shape, np.float32) for s in parameter_specs(cfg)}
    optimizer = {
        f"{slot}/{s.name}": generator.standard_normal(s.shape, np.float32)
        for slot in ("moment1", "moment2")
        for s in parameter_specs(cfg)
    }
    return model, optimizer


def snapshot(step: int = 5, seed: int | None = None, cfg: ModelConfig = TINY, **changes: Any) -> CheckpointSnapshot:
    """The state of a run at `step`; `seed` (by default the step) decides its numbers."""
    model, optimizer = tensors(cfg, step if seed is None else seed)
    return replace(
        CheckpointSnapshot(
            model=model,
            optimizer=optimizer,
            optimizer_step=step - 1,
            progress=Progress(step=step, batch=step, samples=4 * step, tokens=32 * step, target_tokens=31 * step),
            config={"model": cfg.to_dict(), "optimizer": {"learning_rate": 3e-4, "betas": [0.9, 0.95]}},
            model_config=cfg,
            seed=1337,
            run_id="run-a",
            runtime="reference",
            scaler={"enabled": True, "scale": 1024.0, "growthCounter": 3},
            cursor={"sample": 4 * step},
            hashes=Hashes(config_hash="c" * 64, dataset_hash="d" * 64, kernel_path_id="plan:f32"),
            fingerprints=Fingerprints(
                dataset={"documents": 3, "hash": "e" * 64}, tokenizer={"kind": "bytes"}, contract={"seed": 1337}
            ),
            environment={"runtime": "python", "cores": 2},
            provenance={"commitHash": None},
            session={"elapsedMs": 12.5, "windows": {"loss": [2.5, 2.25]}},
            tokenizer_json='{"version": "1.0"}',
        ),
        **changes,
    )


def same(found: dict[str, Any], expected: Any) -> bool:
    """Whether two sets of tensors are bitwise equal."""
    return {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in expected.items()
    }


class Unsynced(OsFilesystem):
    """For tests that do not pull the plug: a disk takes milliseconds for each sync."""

    def sync_file(self, file: BinaryIO) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def clock() -> float:
    return TIME


def flip(path: Path, position: int, bits: int = 1) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)
