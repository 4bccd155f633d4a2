"""Models in the folders of `transformers`: our checkpoints written as such, and such folders read.

config.json, weights in safetensors (in one file, or in several with an index), tokenizer.json. Tensors are converted
one at a time, so neither direction holds a model in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid.checkpoint import loading, safetensors, transformers_layout
from hybrid.checkpoint.filesystem import fresh
from hybrid.checkpoint.huggingface import generation_document, token_ids
from hybrid.checkpoint.manifest import CONFIG_FILE, GENERATION_FILE, MODEL_FILE, TOKENIZER_FILE
from hybrid.checkpoint.safetensors import Header, LateTensor, TensorEntry
from hybrid.checkpoint.transformers_layout import Stored, part_shapes
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import OUTPUT, TOKENS, parameter_specs

INDEX_FILE: Final = "model.safetensors.index.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
NUMBERS: Final = ("F32", "F16", "BF16", "F64")

_PREFIX = "transformer."  # GPT-2 folders may lack it
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)\Z")  # of older versions; not parameters
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors\Z")


@dataclass(frozen=True)
class Made:
    """Implements `safetensors.LateTensor`: float32 values that are made when they are written."""

    shape: tuple[int, ...]
    make: Callable[[], NDArray[np.float32]]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return 4 * int(np.prod(self.shape, dtype=np.int64))

    def blocks(self) -> Iterator[memoryview]:
        """Errors: those of making the values."""
        yield from safetensors.blocks_of(self.make())


# --- writing ---------------------------------------------------------------------------------------------------------


def export(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Write the model of a checkpoint, which is verified first, as a folder that transformers opens.

    checkpoint: its folder. folder: must not exist; it appears when it is whole. The result has `family`, `tensors`
    and `bytes` (of the weights). Errors: ConfigError for a model that transformers has no family for,
    CheckpointNotFound, CheckpointCorrupt; HybridError when the folder exists or the disk refuses.
    """
    whole = loading.examine(checkpoint)
    cfg = whole.model_config
    tensors = {stored.name: _theirs(stored, checkpoint / MODEL_FILE, cfg) for stored in transformers_layout.layout(cfg)}
    ids = json.loads((checkpoint / GENERATION_FILE).read_text(encoding="utf-8"))
    special = {name.removesuffix("_token_id"): ids[name] for name in ids if name.endswith("_token_id")}
    special = {role: token for role, token in special.items() if token is not None}
    texts = {
        CONFIG_FILE: _json(transformers_layout.config_document(cfg, token_ids(special))),
        GENERATION_FILE: _json(generation_document(special)),
    }
    if whole.tokenizer_json is not None:
        texts[TOKENIZER_FILE] = whole.tokenizer_json
        texts[TOKENIZER_CONFIG_FILE] = _json(_tokenizer_config(whole.tokenizer_json, cfg, special))
    with fresh(folder) as temporary:
        temporary.mkdir()
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        with (temporary / MODEL_FILE).open("xb") as file:
            safetensors.write(file.write, tensors, {"format": "pt"})
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    return {"family": transformers_layout.family(cfg), "tensors": len(tensors), "bytes": size}


def _theirs(stored: Stored, path: Path, cfg: ModelConfig) -> Made:
    header = safetensors.read_header(path)
    own, shapes = {entry.name for entry in header.entries}, part_shapes(cfg)
    parts = [shapes[name] for name in stored.parts]

    def make() -> NDArray[np.float32]:
        values = [
            safetensors.read_tensor(path, header, name) if name in own else np.zeros(shape, np.float32)
            for name, shape in zip(stored.parts, parts, strict=True)
        ]
        whole = np.concatenate(values)
        return whole.T if stored.transposed else whole

    return Made(_stored_shape(stored, shapes), make)


def _stored_shape(stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    parts = [shapes[name] for name in stored.parts]
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    return shape[::-1] if stored.transposed else shape


def _tokenizer_config(tokenizer_json: str, cfg: ModelConfig, special: Mapping[str, int]) -> dict[str, Any]:
    document = json.loads(tokenizer_json)
    vocabulary = {index: token for token, index in document["model"]["vocab"].items()}
    vocabulary |= {token["id"]: token["content"] for token in document.get("added_tokens") or ()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": cfg.context_length,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": vocabulary[token] for role, token in special.items() if token in vocabulary},
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


# --- reading ---------------------------------------------------------------------------------------------------------


class TransformersFolder:
    """A folder that transformers wrote. model: its shape. tokenizer: the path of its tokenizer.json, if it has one.

    Errors: CheckpointNotFound (no folder, no config.json, no safetensors), ConfigError (a model that we cannot
    compute), CheckpointCorrupt (files that contradict each other or themselves; a tensor that is missing or unknown).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / CONFIG_FILE
        if not folder.is_dir():
            raise CheckpointNotFound(f"{folder}: there is no such folder")
        self.model = transformers_layout.model_config(str(config), loading.read_json(config))
        path = folder / TOKENIZER_FILE
        self.tokenizer = path if path.is_file() else None
        self._places = self._find()
        self._layout = transformers_layout.layout(self.model)
        self._check()

    def tensors(self) -> dict[str, LateTensor]:
        """The weights under our names, float32; each is read when it is asked for. A value that is not finite is
        CheckpointCorrupt then."""
        shapes = part_shapes(self.model)
        made: dict[str, LateTensor] = {}
        for stored in self._layout:
            row = 0
            for name in stored.parts:
                rows = slice(row, row + shapes[name][0])
                made[name] = Made(shapes[name], partial(self._part, stored, rows))
                row = rows.stop
        return {spec.name: made[spec.name] for spec in parameter_specs(self.model)}

    def _part(self, stored: Stored, rows: slice) -> NDArray[np.float32]:
        whole = self._read(stored.name)
        return np.ascontiguousarray((whole.T if stored.transposed else whole)[rows])

    def _read(self, name: str) -> NDArray[np.float32]:
        path, header, entry = self._places[name]
        values = safetensors.read_tensor(path, header, entry.name).astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointCorrupt(f"{path}: tensor {entry.name!r} has values that float32 cannot hold, or NaN")
        return values

    def _find(self) -> dict[str, tuple[Path, Header, TensorEntry]]:
        """Where each tensor lies, by its name with the prefix: file, its header, and the entry in it."""
        listed: dict[str, str] | None = None
        files = [MODEL_FILE]
        if not (self.folder / MODEL_FILE).exists() and (self.folder / INDEX_FILE).exists():
            listed = self._index()
            files = sorted(set(listed.values()))
        elif not (self.folder / MODEL_FILE).exists():
            pickled = [name for name in PICKLED if (self.folder / name).exists()]
            reason = f"; {pickled[0]} is a pickle, which can run code and is never read" if pickled else ""
            raise CheckpointNotFound(f"{self.folder}: there is no {MODEL_FILE}, and no {INDEX_FILE}{reason}")
        places = {}
        for file in files:
            path = self.folder / file
            header = safetensors.read_header(path)
            for entry in header.entries:
                if listed is not None and listed.get(entry.name) != file:
                    raise CheckpointCorrupt(f"{path}: tensor {entry.name!r:.200} is not what {INDEX_FILE} says")
                places[_full(entry.name)] = (path, header, entry)
        if missing := sorted(name for name in listed or () if _full(name) not in places):
            raise CheckpointCorrupt(f"{self.folder / INDEX_FILE}: no file has tensor {missing[0]!r:.200}")
        return places

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        document = loading.read_json(path)
        listed = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise CheckpointCorrupt(f"{path}: weight_map must be an object that names the file of each tensor")
        for name, file in listed.items():
            if not isinstance(file, str) or not _FILE.match(file):
                raise CheckpointCorrupt(f"{path}: tensor {name!r:.200} lies in {file!r:.200}: expected a file name")
        return listed

    def _check(self) -> None:
        """Exactly the tensors of the model are there, in its shapes."""
        shapes = part_shapes(self.model)
        expected = {stored.name: _stored_shape(stored, shapes) for stored in self._layout}
        for name, shape in expected.items():
            if name not in self._places:
                raise CheckpointCorrupt(f"{self.folder}: tensor {name!r} of shape {list(shape)} is missing")
        for name, (path, _, entry) in self._places.items():
            if name not in expected:
                self._check_extra(name, path)
            elif entry.shape != expected[name] or entry.dtype not in NUMBERS:
                raise CheckpointCorrupt(
                    f"{path}: tensor {entry.name!r} is {entry.dtype} {list(entry.shape)}: expected "
                    f"{list(expected[name])} of {', '.join(NUMBERS)}, as {CONFIG_FILE} says"
                )

    def _check_extra(self, name: str, path: Path) -> None:
        if _BUFFERS.match(name):
            return
        if name != OUTPUT or not self.model.tied_embeddings:
            raise CheckpointCorrupt(f"{path}: tensor {name!r:.200} is of no model that {CONFIG_FILE} describes")
        table = next(stored.name for stored in self._layout if stored.parts == (TOKENS,))
        if not np.array_equal(self._read(OUTPUT), self._read(table)):
            raise CheckpointCorrupt(
                f"{path}: {OUTPUT} and {table} differ, though {CONFIG_FILE} says that they are tied "
                "(tie_word_embeddings)"
            )


def _full(name: str) -> str:
    """A GPT-2 name with its prefix; other names as they are."""
    return f"{_PREFIX}{name}" if name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name
