"""Everything that can be checked without a step: data, settings, resume, and whether it fits on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid.config.size import size_of
from hybrid.config.tree import RunConfig
from hybrid.models.parameters import count_parameters
from hybrid.training.evaluation import prompt_ids
from hybrid.training.run_files import check_place
from hybrid.training.sessions import choose_backend
from hybrid.training.start import Request, Services, prepare_run, settings_of
from hybrid.training.view import bytes_text

LARGE = 2**32  # bytes of a run that a dry run does not set up on the device
Look = Callable[[RunConfig], tuple[dict[str, Any], dict[str, int]]]


def dry_run(request: Request, services: Services, look: Look | None = None) -> dict[str, Any]:
    """What a run would begin with. Builds missing data, sets a session up and closes it; the run folder is left alone.

    A run of 4 GiB and more is not set up; its memory is the least that it needs, by closed formulas.

    look: says what a session describes itself as, and its memory, where none can be set up here.
    Errors: those that the run itself would meet before its first step.
    """
    check_place(request.run_dir)
    prepared, _ = prepare_run(request, services)
    if prepared.config.sampling.every:
        prompt_ids(prepared.data.tokenizer, prepared.config.sampling.prompt)
    describe, memory = look(prepared.config) if look is not None else _look(prepared.config, services)
    data = prepared.data
    return {
        "runDir": str(request.run_dir),
        "step": prepared.start.step,
        "steps": prepared.steps,
        "resumesFrom": prepared.start.parent,
        "acceptedChanges": [audit["field"] for audit in prepared.audits],
        "backend": describe,
        "parameters": count_parameters(prepared.model),
        "memory": memory,
        "data": {
            "store": str(data.store.path),
            "train": data.train.describe(),
            "validation": None if data.validation is None else data.validation.describe(),
            "fingerprint": data.fingerprint,
        },
        "hashes": prepared.hashes.to_json(),
        "config": settings_of(prepared),
    }


def _look(config: RunConfig, services: Services) -> tuple[dict[str, Any], dict[str, int]]:
    size = size_of(config)
    if size.device >= LARGE:
        backend = choose_backend(config, services.note)
        services.check_fit(config)
        services.note("not set up on the device, which would take minutes at this size: the memory is from a formula")
        weights = size.parameters * 4
        arenas = dict.fromkeys(("params", "grads", "moment1", "moment2"), weights)
        memory = {**arenas, "activations": size.activations, "total": size.device}
        return {"backend": backend, "precision": config.precision.type, "adapter": None}, memory
    session = services.new_session(config)
    try:
        return session.describe(), session.memory()
    finally:
        session.close()


def dry_run_text(facts: dict[str, Any]) -> str:
    """The report for people."""
    resumed = facts["resumesFrom"]
    backend, train, validation = facts["backend"], facts["data"]["train"], facts["data"]["validation"]
    held_out = "none" if validation is None else f"{validation['ledger']['rows']:,} samples"
    arenas = ", ".join(f"{name} {bytes_text(size)}" for name, size in facts["memory"].items() if name != "total")
    lines = [
        f"run folder: {facts['runDir']}",
        f"start: step {facts['step']} of {facts['steps']}" + (f", from {resumed['path']}" if resumed else ""),
        f"model: {facts['parameters']:,} parameters",
        f"data: {train['ledger']['rows']:,} training samples in {facts['data']['store']}; validation: {held_out}",
        f"backend: {backend['backend']}, {backend['precision']}",
        f"memory: {bytes_text(facts['memory']['total'])} ({arenas})",
        "all checks passed; nothing was trained",
    ]
    return "\n".join(lines)
