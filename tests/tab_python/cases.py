"""Plans that the tab must compile to the same bytes.

`PYTHONPATH=tests python -m tab_python.cases` prints, as JSON, what each is compiled for, the device, and the sha256 of
every file that `write_plan` writes here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters
from hybrid.optim.settings import OptimizerSettings, SchedulerSettings
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DEFAULT_LIMITS, MIB, DeviceProfile
from hybrid.training.parity.workload import MODELS

OPTIMIZER = OptimizerSettings(
    type="adamw", lr=3e-3, weight_decay=0.1, scheduler=SchedulerSettings(enabled=True, type="cosine", warmup_steps=3)
)
F16 = DeviceProfile(features=frozenset({"shader-f16"}))
PROFILES = {
    "default limits": F16,
    "subgroups on a GPU": replace(F16, features=F16.features | {"subgroups", "timestamp-query"}, subgroup_size=32),
    "subgroups on a CPU": replace(F16, features=F16.features | {"subgroups"}, subgroup_size=8, cpu=True),
    "small bindings": replace(
        F16, limits={**DEFAULT_LIMITS, "maxStorageBufferBindingSize": 5 * MIB // 4, "maxBufferSize": 2 * MIB}
    ),
    "large limits": replace(
        F16,
        limits={
            **DEFAULT_LIMITS,
            "maxStorageBufferBindingSize": 2048 * MIB - 4,
            "maxBufferSize": 4096 * MIB,
            "maxComputeInvocationsPerWorkgroup": 1024,
            "maxComputeWorkgroupStorageSize": 32 * 1024,
            "maxComputeWorkgroupSizeX": 1024,
        },
    ),
}
WIDE = ModelConfig(512, 256, 2, 192, 6, 512, kv_heads=2, head_width=48, rope_base=500_000.0)


def settings(model: ModelConfig, precision: str, **changes: Any) -> PlanSettings:
    chosen: dict[str, Any] = {
        "batch_size": 2,
        "sequence_length": model.context_length,
        "precision": precision,
        "optimizer": OPTIMIZER,
        "max_grad_norm": 0.25,
        "loss_scaling": {"enabled": precision == "mixed-f16", "initialScale": 256.0, "growthInterval": 4},
    }
    return PlanSettings(model, **{**chosen, **changes})


def cases() -> Iterator[tuple[str, PlanSettings, DeviceProfile]]:
    for name, model in MODELS.items():
        for precision in ("f32", "mixed-f16"):
            for recompute in (False, True):
                label = f"{name} in {precision}{', recomputed' if recompute else ''}"
                yield label, settings(model, precision, recompute=recompute), F16
    for name, profile in PROFILES.items():
        yield f"a wider model, {name}", settings(WIDE, "f32"), profile
    llama = MODELS["llama"]
    yield "every variant, to be tuned", settings(WIDE, "mixed-f16", tune=True), PROFILES["subgroups on a GPU"]
    yield "evaluation and sampling only", settings(llama, "f32", training=False), F16
    yield "no decoding", settings(llama, "f32", cache_length=0), F16
    yield "nothing but what must be said", PlanSettings(llama, 1, 8), DeviceProfile()


def request(chosen: PlanSettings) -> dict[str, Any]:
    """What a page asks for to get the plan of these settings."""
    return {
        "model": chosen.model.to_dict(),
        "batchSize": chosen.batch_size,
        "sequenceLength": chosen.sequence_length,
        "precision": chosen.precision,
        "optimizer": chosen.optimizer.to_dict(),
        "maxGradNorm": chosen.max_grad_norm,
        "lossScaling": chosen.loss_scaling,
        "recompute": chosen.recompute,
        "cacheLength": chosen.cache_length,
        "prefillTokens": chosen.prefill_tokens,
        "variants": dict(chosen.variants),
        "tune": chosen.tune,
        "training": chosen.training,
    }


def facts(profile: DeviceProfile) -> dict[str, Any]:
    """A profile as web/runtime/subgroups.js describes a device."""
    return {
        "limits": profile.limits,
        "features": sorted(profile.features),
        "subgroup_size": profile.subgroup_size,
        "cpu": profile.cpu,
    }


def expected(chosen: PlanSettings, profile: DeviceProfile) -> dict[str, Any]:
    plan = compile_plan(chosen, profile)
    with tempfile.TemporaryDirectory() as folder:
        write_plan(plan, Path(folder))
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}
    memory = {arena: sum(pages) for arena, pages in plan.arenas.items()}
    return {
        "files": files,
        "parameters": count_parameters(chosen.model),
        "memory": {**memory, "total": sum(memory.values())},
    }


def main() -> None:
    found = [
        {"name": name, "request": request(chosen), "profile": facts(profile), **expected(chosen, profile)}
        for name, chosen, profile in cases()
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
