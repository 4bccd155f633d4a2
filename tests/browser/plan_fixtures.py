"""Small plans, batches and what training them must give: the input of the JavaScript tests.

`PYTHONPATH=tests python -m browser.plan_fixtures FOLDER` writes `<model>/plan.json` (float32) and
`<model>-mixed/plan.json`, each with its constants and a `run.json`; `wide`, whose products are large enough to have
variants; `llama-inference`, a plan that only evaluates and generates; and `kernels.json`, every kernel that these plans
could use on any device, and all others of the catalogue. The models and batches are those of the parity contract, with
the models made narrower; the expected numbers come from the reference session.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import GenerateOptions, StepResult
from hybrid.backends.reference.session import ReferenceSession
from hybrid.data.batch import Batch
from hybrid.models.initial_numpy import initial_values
from hybrid.models.parameters import parameter_specs
from hybrid.optim.groups import parameter_groups
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.document import PlanKernel
from hybrid.plan.folder import write_plan
from hybrid.plan.kernels.base import PRECISIONS, source_hash
from hybrid.plan.profile import DeviceProfile
from hybrid.training.parity.workload import MODELS, Workload
from shaders.catalogue import launches

STEPS = 10
OVERFLOW_STEP = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GENERATED = 40  # beyond the context: the prompt is 8 long and the context 32
SEED = 20_260


def fixtures() -> Iterator[Workload]:
    """Each model in float32, and in mixed precision with an overflow on the way; one that has variants to time."""
    for name, model in MODELS.items():
        small = replace(model, width=32, feed_forward_width=64)
        if name == "looped":
            small = replace(small, vocabulary_size=model.vocabulary_size + 1)  # no multiple of four
        yield Workload(name, small, STEPS)
        yield Workload(f"{name}-mixed", small, STEPS, "mixed-f16", overflow_step=OVERFLOW_STEP)
    yield Workload("wide", replace(MODELS["gpt2"], layers=1, schedule=(), width=128, feed_forward_width=128), steps=2)


def settings(workload: Workload, **changes: Any) -> dict[str, Any]:
    return {
        "batch_size": workload.microbatch_size,
        "sequence_length": workload.model.context_length,
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "max_grad_norm": workload.max_grad_norm,
        "loss_scaling": workload.loss_scaling,
        **changes,
    }


def write(folder: Path) -> None:
    for workload in fixtures():
        write_run(folder / workload.name, workload, DeviceProfile(features=frozenset({"shader-f16"})))
    llama = next(workload for workload in fixtures() if workload.name == "llama")
    inference = PlanSettings(llama.model, **settings(llama), training=False)
    write_plan(compile_plan(inference, DeviceProfile()), folder / "llama-inference")
    (folder / "kernels.json").write_text(json.dumps(kernels()), encoding="utf-8")


def write_run(folder: Path, workload: Workload, profile: DeviceProfile) -> None:
    """One fixture, with the plan as it is compiled for a device like `profile`."""
    write_plan(compile_plan(PlanSettings(workload.model, **settings(workload)), profile), folder)
    (folder / "run.json").write_text(json.dumps(run(workload)), encoding="utf-8")


def kernels() -> list[dict[str, Any]]:
    """Every kernel of every fixture in every variant and of the catalogue, once: what `Plan.to_json` says of it, with
    its WGSL."""
    profile = DeviceProfile(features=frozenset({"shader-f16", "subgroups"}), subgroup_size=8)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, kernel: dict[str, Any], wgsl: str, precision: str) -> None:
        needs = [*(["shader-f16"] if precision == "mixed-f16" else []), *kernel.get("features", ())]
        key = json.dumps([kernel["source"], kernel["constants"], kernel["bindings"]])
        found.setdefault(key, {**kernel, "name": name, "needs": needs, "wgsl": wgsl})

    for workload in fixtures():
        document = compile_plan(PlanSettings(workload.model, **settings(workload), tune=True), profile).to_json()
        for name, kernel in document["kernels"].items():
            add(name, kernel, document["sources"][kernel["source"]], workload.precision)
    for precision in PRECISIONS:
        for launch in launches(precision):
            wgsl = launch.kernel.source(precision)
            kernel = PlanKernel.of(launch.kernel, source_hash(wgsl), precision).to_json()
            add(launch.kernel.name, kernel, wgsl, precision)
    return list(found.values())


def run(workload: Workload) -> dict[str, Any]:
    """Batches and expected numbers of one workload."""
    session = ReferenceSession(workload.model, **settings(workload, seed=SEED))
    steps = []
    for data_step in range(1, workload.steps + 1):
        info, batches = workload.info(data_step), workload.microbatches(data_step)
        session.begin(info)
        for batch in batches:
            session.accumulate(batch)
        session.apply()
        steps.append(
            {
                "targetTokens": info.target_tokens,
                "zLoss": info.z_loss,
                "batches": [_arrays(batch) for batch in batches],
            }
        )
    batch = workload.microbatches(1)[0]
    document = {
        "seed": SEED,
        "precision": workload.precision,
        "steps": steps,
        "results": [_result(result) for result in session.poll_metrics(wait=True)],
        "initialSha256": _hash_of(workload, initial_values(workload.model, SEED)),
        "model": {name: array.ravel().tolist() for name, array in session.export_state().model.items()},
    }
    if workload.precision == "f32":
        document["evaluation"] = {"lossSum": session.evaluate(batch).loss_sum, "targetTokens": batch.target_tokens}
        document["prompt"] = PROMPT
        document["greedy"] = list(session.generate(PROMPT, GenerateOptions(tokens=GENERATED, temperature=0.0)))
        options = GenerateOptions(tokens=GENERATED, temperature=0.9, top_k=20, top_p=0.95, seed=7)
        document["sampled"] = list(session.generate(PROMPT, options))
    return document


def _arrays(batch: Batch) -> dict[str, list[int]]:
    return {
        "ids": batch.ids.ravel().tolist(),
        "targets": batch.targets.ravel().tolist(),
        "positions": batch.positions.ravel().tolist(),
        "segmentIds": batch.segment_ids.ravel().tolist(),
        "sampleIds": batch.sample_ids.tolist(),
    }


def _result(result: StepResult) -> dict[str, Any]:
    return {
        "dataStep": result.data_step,
        "loss": result.loss,
        "nll": result.nll,
        "targetTokens": result.target_tokens,
        "gradNorm": result.grad_norm,
        "lossScale": result.loss_scale,
        "lossScaleAfter": result.loss_scale_after,
        "growthCounter": result.growth_counter,
        "overflow": result.overflow,
        "optimizerStep": result.optimizer_step,
    }


def _hash_of(workload: Workload, tensors: dict[str, NDArray[np.float32]]) -> str:
    """sha256 of the raw bytes of all tensors, group by group, as the plan lists them."""
    digest = hashlib.sha256()
    for group in parameter_groups(parameter_specs(workload.model)):
        for name in group.names:
            digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the plans and expected numbers of the JavaScript tests.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
