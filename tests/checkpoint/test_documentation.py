"""The worked example of docs/formats/checkpoint.md is what is really written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from checkpoint import examples
from hybrid.checkpoint import manifest
from hybrid.checkpoint.manifest import Fingerprints, Hashes, Progress
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats" / "checkpoint.md"
MODEL = ModelConfig(
    vocabulary_size=3, context_length=4, layers=1, width=2, heads=1, feed_forward_width=2, tied_embeddings=True
)


def documented() -> CheckpointSnapshot:
    """Parameter i of the model (in the order of its specification) is filled with i + 1; moments are 0.5 and 0.25."""
    shapes = {spec.name: spec.shape for spec in parameter_specs(MODEL)}
    return CheckpointSnapshot(
        model={name: np.full(shape, i + 1, np.float32) for i, (name, shape) in enumerate(shapes.items())},
        optimizer={
            f"{slot}/{name}": np.full(shape, value, np.float32)
            for slot, value in (("moment1", 0.5), ("moment2", 0.25))
            for name, shape in shapes.items()
        },
        optimizer_step=499,
        progress=Progress(step=500, epoch=1, batch=250, samples=2000, tokens=8000, target_tokens=7500),
        config={"run": {"seed": 1337}},
        model_config=MODEL,
        seed=1337,
        run_id="example",
        runtime="reference",
        scaler={"enabled": True, "scale": 1024.0, "growthCounter": 17},
        cursor={"sample": 2000},
        hashes=Hashes(
            config_hash="c0" * 32, dataset_hash="da" * 32, tokenizer_hash="70" * 32, optimizer_hash="09" * 32
        ),
        fingerprints=Fingerprints(
            dataset={"tokens": 8000}, tokenizer={"kind": "characters"}, contract={"run": {"seed": 1337}}
        ),
        environment={"runtime": "python"},
        session={"elapsedMs": 12500.5},
    )


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_is_what_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, clock=examples.clock, filesystem=examples.Unsynced())
    path = store.save(documented())
    written = (path / "checkpoint.json").read_text(encoding="utf-8")
    header, document = blocks("json")
    assert document == written
    text = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(text[:8], "little")
    assert header.rstrip("\n") == text[8 : 8 + length].decode().rstrip()
    assert f"`{text[:8].hex(' ')}`" in PAGE.read_text(encoding="utf-8")
    listing = {name: int(size) for size, name in re.findall(r"^ *(\d+)  ([a-z_.]+)$", blocks("text")[0], re.MULTILINE)}
    assert listing == {p.name: p.stat().st_size for p in path.iterdir()}


def test_the_page_names_every_rule_and_limit() -> None:
    page = PAGE.read_text(encoding="utf-8")
    source = Path(manifest.__file__).with_name("safetensors.py").read_text(encoding="utf-8")
    categories = set(re.findall(r'(?:refuse|SafetensorsError)\(\s*(?:source|str\(path\))?,?\s*"([a-z_0-9]+)"', source))
    categories |= set(re.findall(r'"(header_not_[a-z0-9]+|duplicate_name)"', source))
    assert len(categories) > 20
    assert not {category for category in categories if f"`{category}`" not in page}
    assert not {key for key in manifest._KEYS if f"`{key}`" not in page}
