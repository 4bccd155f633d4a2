"""The job says everything that a runner in JavaScript needs, as the schema has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from bridge.replay import config_here
from hybrid.backends.webgpu.executor import device_profile
from hybrid.bridge.job import build_job, last_sequence, plan_settings
from hybrid.bridge.server.refusals import json_response
from hybrid.checkpoint.loading import read_manifest
from hybrid.contracts.stable_json import stable_hash, stable_json
from hybrid.plan.compiler import compile_plan
from hybrid.resources import resource
from hybrid.training.sessions import make_session
from hybrid.training.start import Prepared, Request, Services, prepare_run
from training import micro


def validator() -> Draft202012Validator:
    schemas = {
        name: json.loads(resource(f"bridge/schemas/{name}").read_text())
        for name in ("job.schema.json", "config.schema.json")
    }
    registry = Registry().with_resources([(name, Resource.from_contents(schema)) for name, schema in schemas.items()])
    return Draft202012Validator(schemas["job.schema.json"], registry=registry)


def job_of(folder: Path, run_dir: Path, *assignments: str, **request: Any) -> tuple[dict[str, Any], Prepared]:
    prepared, store = prepare_run(Request(config_here(folder, *assignments), run_dir, **request), Services())
    job = build_job(prepared, run_dir, "an-id", prepared.start, last_sequence(store))
    return json.loads(json.dumps(job, allow_nan=False)), prepared


@pytest.mark.parametrize("assignments", [(), ("run.steps=null", "run.epochs=2"), ("precision.type=mixed-f16",)])
def test_a_run_that_begins(tmp_path: Path, assignments: tuple[str, ...]) -> None:
    job, prepared = job_of(tmp_path, tmp_path / "run", *assignments)
    validator().validate(job)
    assert job["resume"] is None and job["lastSequence"] == 0 and job["lastValidation"] == 0
    assert job["steps"] == prepared.steps and job["trainSamples"] == len(prepared.data.train)
    assert (job["limit"] is None) == (job["config"]["run"]["steps"] is not None)


def test_a_run_that_goes_on(tmp_path: Path, recording: Path) -> None:
    job, _ = job_of(tmp_path, recording, "run.steps=30")
    validator().validate(job)
    newest = read_manifest(recording / "checkpoints" / "step-00000020")
    assert job["resume"] == {
        "step": 20, "checkpointHash": newest.checkpoint_hash, "sequence": 4, "name": "step-00000020",
    }  # fmt: skip
    assert job["lastSequence"] == 4 and job["lastValidation"] == 20
    older, _ = job_of(tmp_path, recording, resume=recording / "checkpoints" / "step-00000010")
    assert older["resume"]["name"] == "step-00000010"
    assert older["lastSequence"] == 4 and older["lastValidation"] == 10, "rows beyond the start will be cut"


def test_a_checkpoint_made_from_the_job_has_the_files_and_hashes_of_any_other(tmp_path: Path, recording: Path) -> None:
    job, _ = job_of(tmp_path, tmp_path / "run")
    folder = recording / "checkpoints" / "step-00000005"
    manifest = read_manifest(folder)
    for name, text in job["checkpointFiles"].items():
        assert text == (folder / name).read_text(), name
    assert set(manifest.files) == {*job["checkpointFiles"], "model.safetensors", "optimizer.safetensors"}
    hashes = manifest.hashes.to_json()
    assert {key: hashes[key] for key in job["hashes"]} == job["hashes"]
    assert stable_json(job["fingerprints"]) == stable_json(manifest.fingerprints.to_json())


def test_a_folder_whose_name_is_not_utf8_survives_the_way(tmp_path: Path) -> None:
    job, _ = job_of(tmp_path, tmp_path / "\udcff")
    assert json.loads(json_response(job).body)["runDir"] == str(tmp_path / "\udcff")


@pytest.mark.webgpu
def test_the_plan_is_the_one_that_a_session_here_would_compile(tmp_path: Path) -> None:
    _, prepared = job_of(tmp_path, tmp_path / "run")
    config = prepared.config.model_copy(
        update={"backend": prepared.config.backend.model_copy(update={"name": "webgpu", "device_profile": "default"})}
    )
    session = make_session(config)
    try:
        ours = compile_plan(plan_settings(prepared.config), device_profile(session.device))  # type: ignore[attr-defined]
        theirs = session.plan  # type: ignore[attr-defined]
    finally:
        session.close()
    assert stable_hash(ours.settings) == stable_hash(theirs.settings)
    assert ours.arenas == theirs.arenas and set(ours.programs) == set(theirs.programs)


def test_micro_runs_are_small(recording: Path) -> None:
    """The tests of this folder rest on it."""
    assert len(micro.entries(recording.parent)) == 20
