"""A checkpoint whose hashes are all right, and whose content no run can have come to, is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.checkpoint import state
from hybrid.checkpoint.digests import digest_bytes
from hybrid.checkpoint.loading import load, read_manifest
from hybrid.checkpoint.manifest import CONFIG_FILE, MANIFEST_NAME, TOKENIZER_FILE, Manifest
from hybrid.cli.main import main
from hybrid.data.tokenizers import CharacterTokenizer
from hybrid.errors import CheckpointCorrupt
from hybrid.training.saved import SavedModel
from hybrid.training.saved_run import check_checkpoint
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
def test_no_command_believes_an_impossible_place(
    folder: Path, change: Change, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(folder)
    changed = change(loaded.manifest)
    state_hash = state.state_hash(
        state.digests_of_arrays(loaded.model), state.digests_of_arrays(loaded.optimizer), scaler=changed.scaler,
        optimizer_step=changed.optimizer_step, progress=changed.progress.to_json(), cursor=changed.cursor,
    )  # fmt: skip
    (folder / MANIFEST_NAME).write_bytes(replace(changed, state_hash=state_hash).render())
    assert load(folder), "every hash is right"
    for use in (lambda: SavedModel.open(folder), lambda: run(folder.parents[2], "run.steps=6")):
        with pytest.raises(CheckpointCorrupt, match=message):
            use()
    for command in (["checkpoint", "verify"], ["sample"], ["eval"]):
        assert main([*command, str(folder)]) == 3
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("name", "value"), [("window", 4), ("rope_base", 50000.0), ("norm", "layer_norm")])
def test_config_json_and_the_settings_describe_one_model(
    folder: Path, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / CONFIG_FILE
    document = json.loads(path.read_text())
    document["hybrid"][name] = value
    path.write_text(json.dumps(document))
    manifest = read_manifest_of_changed(folder)
    (folder / MANIFEST_NAME).write_bytes(manifest.render())
    assert load(folder), "the checkpoint's own checks cannot know"
    refusal = rf"config.json: hybrid.{name} is .*, but the settings of the run"
    for use in (lambda: SavedModel.open(folder), lambda: run(folder.parents[2], "run.steps=6")):
        with pytest.raises(CheckpointCorrupt, match=refusal):
            use()
    assert main(["checkpoint", "verify", str(folder)]) == 3 and re.search(refusal, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (CharacterTokenizer("thensorlaigdfbypw ").to_json(), "tokenizer.json: another tokenizer .* than the run had"),
        (
            CharacterTokenizer([chr(0x4E00 + i) for i in range(300)]).to_json(),
            "300 ids, but the embedding .* 256 rows",
        ),
        ("{}", "tokenizer.json: "),
    ],
)
def test_the_tokenizer_is_that_of_the_run(
    folder: Path, tokenizer: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
    (folder / MANIFEST_NAME).write_bytes(read_manifest_of_changed(folder, TOKENIZER_FILE).render())
    with pytest.raises(CheckpointCorrupt, match=message):
        run(folder.parents[2], "run.steps=6")
    assert main(["checkpoint", "verify", str(folder)]) == 3 and re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda moments: moments.popitem(), "moment tensor 'moment2/model.norm.weight' is missing"),
        (lambda moments: moments["moment2/model.norm.weight"].fill(-1), "moment2/model.norm.weight' holds negative"),
        (
            lambda moments: moments["moment1/model.norm.weight"].fill(np.nan),
            "moment1/model.norm.weight' holds 16 ",
        ),
    ],
)
def test_a_state_that_no_session_takes_is_refused_by_verify(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    loaded = load(folder)
    change(loaded.optimizer)
    with pytest.raises(CheckpointCorrupt, match=message):
        check_checkpoint(loaded)


def read_manifest_of_changed(folder: Path, file: str = CONFIG_FILE) -> Manifest:
    """The manifest with the digest that the file has now."""
    from hybrid.checkpoint import manifest as manifests

    manifest = manifests.parse("checkpoint.json", (folder / MANIFEST_NAME).read_bytes())
    return replace(manifest, files={**manifest.files, file: digest_bytes((folder / file).read_bytes())})
