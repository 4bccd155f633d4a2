"""A checkpoint whose hashes are all right, and whose content no run can have come to, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.digests import digest_bytes
from hybrid.checkpoint.loading import load, read_manifest
from hybrid.checkpoint.manifest import CONFIG_FILE, MANIFEST_NAME, Manifest
from hybrid.errors import CheckpointCorrupt
from hybrid.training.saved import SavedModel
from training.micro import run

Change = Callable[[Manifest], Manifest]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    run(tmp_path, "run.steps=4")
    yield tmp_path / "run" / "checkpoints" / "step-00000004"
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step-00000004"), "the manifest itself was in order"


def config_with(manifest: Manifest, section: str, **values: Any) -> Manifest:
    return replace(manifest, config={**manifest.config, section: {**manifest.config[section], **values}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: replace(m, cursor={**m.cursor, "samples": 10**12}),
            "dataCursor is .* after step 4 the data stands at",
        ),
        (lambda m: replace(m, cursor={}), "dataCursor is {}"),
        (
            lambda m: replace(m, progress=replace(m.progress, samples=99)),
            "progress.samples is 99: after step 4 it is 16",
        ),
        (lambda m: replace(m, progress=replace(m.progress, epoch=2**53 - 1)), "progress.epoch"),
        (lambda m: replace(m, progress=replace(m.progress, target_tokens=2**53 - 1)), "progress.targetTokens"),
        (lambda m: replace(m, optimizer_step=5), "optimizerStep is 5: expected at most the step, 4"),
        (
            lambda m: replace(m, scaler={"scale": 1, "growthCounter": 2**40}),
            "lossScaler.growthCounter is 1099511627776",
        ),
        (lambda m: replace(m, seed=m.seed + 1), "seed is 1338: config.run.seed is 1337"),
        (lambda m: replace(m, config={}), "config: model.vocabularySize is null"),
        (lambda m: replace(m, config={"x": 1}), "config: unknown configuration key x"),
        (lambda m: config_with(m, "data", microbatchSize=None), "config: data.microbatchSize is null"),
        (lambda m: config_with(m, "model", layers=9), "config: model.schedule never runs"),
        (lambda m: config_with(m, "optimizer", lr=0.5), "config.optimizer.lr is 0.5: fingerprints.contract has 0.003"),
        (lambda m: replace(m, session={"telemetry": 5, "elapsedMs": 1}), "telemetry state is 5"),
        (lambda m: replace(m, session={"elapsedMs": "x"}), "session.elapsedMs is 'x'"),
        (lambda m: replace(m, session={"elapsedMs": -1}), "session.elapsedMs is -1"),
    ],
)
def test_a_resume_believes_no_impossible_place(folder: Path, change: Change, message: str) -> None:
    (folder / MANIFEST_NAME).write_bytes(change(read_manifest(folder)).render())
    with pytest.raises(CheckpointCorrupt, match=message):
        run(folder.parents[2], "run.steps=6")


@pytest.mark.parametrize(("name", "value"), [("window", 4), ("rope_base", 50000.0), ("norm", "layer_norm")])
def test_config_json_and_the_settings_describe_one_model(folder: Path, name: str, value: object) -> None:
    path = folder / CONFIG_FILE
    document = json.loads(path.read_text())
    document["hybrid"][name] = value
    path.write_text(json.dumps(document))
    manifest = read_manifest_of_changed(folder)
    (folder / MANIFEST_NAME).write_bytes(manifest.render())
    assert load(folder), "the checkpoint's own checks cannot know"
    for use in (lambda: SavedModel.open(folder), lambda: run(folder.parents[2], "run.steps=6")):
        with pytest.raises(CheckpointCorrupt, match=rf"config.json: hybrid.{name} is .*, but the settings of the run"):
            use()


def read_manifest_of_changed(folder: Path) -> Manifest:
    """The manifest with the digest that config.json has now."""
    from hybrid.checkpoint import manifest as manifests

    manifest = manifests.parse("checkpoint.json", (folder / MANIFEST_NAME).read_bytes())
    return replace(manifest, files={**manifest.files, CONFIG_FILE: digest_bytes((folder / CONFIG_FILE).read_bytes())})
