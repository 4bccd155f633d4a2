"""A model from elsewhere as the beginning of a run: a checkpoint of step 0 that `train` goes on from."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hybrid.backends.state_check import SLOTS
from hybrid.checkpoint.manifest import TOKENIZER_FILE, Progress
from hybrid.checkpoint.safetensors import LateTensor
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.transformers_folder import Made, TransformersFolder
from hybrid.config.loading import to_settings
from hybrid.contracts.javascript import iso_time
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.errors import ConfigError, HybridError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters
from hybrid.training.lock import locked
from hybrid.training.run_files import RunFile, check_place
from hybrid.training.start import Prepared, Request, Services, prepare_run, run_facts, settings_of

RUNTIME = "reference"  # nothing was computed


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """The settings, by dotted key, that give a run this model."""
    return {
        "model.vocabularySize": model.vocabulary_size,
        "model.contextLength": model.context_length,
        "model.layers": model.layers,
        "model.width": model.width,
        "model.heads": model.heads,
        "model.kvHeads": model.kv_heads,
        "model.headWidth": model.head_width,
        "model.feedForwardWidth": model.feed_forward_width,
        "model.norm": model.norm,
        "model.normEps": model.norm_eps,
        "model.positions": model.positions,
        "model.ropeBase": model.rope_base,
        "model.activation": model.activation,
        "model.bias": model.bias,
        "model.tiedEmbeddings": model.tied_embeddings,
        "model.window": model.window,
        "model.schedule": None,
        "model.initializerRange": model.initializer_range,
    }


def import_run(source: TransformersFolder, request: Request, services: Services) -> dict[str, Any]:
    """Make the run folder of `request`, whose settings are those of `model_settings`, with the weights of `source`.

    The result has `runDir`, `checkpoint`, `parameters` and `tensors`. Errors: ConfigError for a folder that has
    checkpoints already; those of `prepare_run`; CheckpointCorrupt for weights that are no numbers; HybridError when
    the disk refuses.
    """
    check_place(request.run_dir)
    request.run_dir.mkdir(parents=True, exist_ok=True)
    with services.view, services.stop.installed(services.note), locked(request.run_dir):
        request = _with_own_tokenizer(source, request)
        prepared, store = prepare_run(replace(request, resume="never"), services)
        if replace(prepared.model, dropout=source.model.dropout) != source.model:
            raise ConfigError(f"the settings describe another model than {source.folder} has")
        _note_tokenizer(prepared, source, services)
        services.phase("save")
        store.clean()
        tensors = source.tensors()
        run_id = secrets.token_hex(8)
        path = store.save(_snapshot(prepared, tensors, run_id))
        now = iso_time(services.now() * 1000)
        facts = {
            **run_facts(prepared, run_id, prepared.start),
            "status": "stopped",
            "message": f"the weights of {source.folder}, not trained yet",
            "step": 0,
            "importedFrom": str(source.folder),
            "createdAt": now,
            "updatedAt": now,
        }
        RunFile(request.run_dir).update(**facts)
    return {
        "runDir": str(request.run_dir),
        "checkpoint": str(path),
        "parameters": count_parameters(prepared.model),
        "tensors": len(tensors),
    }


def _with_own_tokenizer(source: TransformersFolder, request: Request) -> Request:
    """The run has a copy of the tokenizer that it begins with, and so needs the folder no more."""
    data = request.config.data
    if source.tokenizer is None or data.tokenizer.path != str(source.tokenizer):
        return request
    place = (request.run_dir / TOKENIZER_FILE).absolute()
    whole = place.with_name(f".{place.name}")
    try:
        shutil.copyfile(source.tokenizer, whole)
        whole.replace(place)
    except OSError as error:
        raise HybridError(f"{place}: the tokenizer cannot be copied there: {error.strerror or error}") from error
    tokenizer = data.tokenizer.model_copy(update={"path": str(place)})
    config = request.config.model_copy(update={"data": data.model_copy(update={"tokenizer": tokenizer})})
    return replace(request, config=config)


def _note_tokenizer(prepared: Prepared, source: TransformersFolder, services: Services) -> None:
    tokenizer = prepared.data.tokenizer
    if source.tokenizer is None:
        services.note(
            f"{source.folder} has no tokenizer.json: this run's text becomes {tokenizer.vocabulary_size} ids "
            f"({tokenizer.kind}), of the {source.model.vocabulary_size} that the model has; data.tokenizer.path names "
            "another tokenizer"
        )


def _snapshot(prepared: Prepared, tensors: Mapping[str, LateTensor], run_id: str) -> CheckpointSnapshot:
    """Step 0 of a run with these weights: moments are zero, and nothing has been read of the data."""
    tokenizer, config = prepared.data.tokenizer, prepared.config
    return CheckpointSnapshot(
        model=tensors,
        optimizer={f"{slot}/{name}": _zeros(tensor.shape) for slot in SLOTS for name, tensor in tensors.items()},
        optimizer_step=0,
        progress=Progress(step=0),
        config=settings_of(prepared),
        model_config=prepared.model,
        seed=config.run.seed,
        run_id=run_id,
        runtime=RUNTIME,
        scaler=DynamicLossScaler(to_settings(config)["lossScaling"]).state(),
        cursor=prepared.plan.cursor(0),
        hashes=prepared.hashes,
        fingerprints=prepared.fingerprints,
        tokenizer_json=tokenizer.to_json(),
        special_tokens={} if tokenizer.end_of_text is None else {"eos": tokenizer.end_of_text},
    )


def _zeros(shape: tuple[int, ...]) -> Made:
    return Made(shape, lambda: np.zeros(shape, np.float32))
