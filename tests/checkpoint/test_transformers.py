"""A checkpoint becomes a folder that transformers opens, and a folder that transformers wrote becomes the beginning of
a run; both compute the same logits. transformers is the judge in both directions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint import safetensors, transformers_folder, transformers_layout
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.transformers_folder import TransformersFolder
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HybridError
from hybrid.models.config import ModelConfig

pytestmark = pytest.mark.torch

LLAMA = ModelConfig(
    vocabulary_size=29, context_length=16, layers=2, width=8, heads=4, kv_heads=2, head_width=4,
    feed_forward_width=12, norm_eps=1e-6, rope_base=500.0,
)  # fmt: skip
GPT2 = replace(
    LLAMA, norm="layer_norm", positions="learned", activation="gelu", bias=True, kv_heads=4, head_width=2,
    tied_embeddings=True, rope_base=10000.0,
)  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied_embeddings=True),
    "llama-biased": replace(LLAMA, bias=True),
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tied_embeddings=False),
    "gpt2-without-biases": replace(GPT2, bias=False),
    "gpt2-relu2": replace(GPT2, activation="relu2", dropout=0.1),
    "gpt2-silu": replace(GPT2, activation="silu"),
}
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]


def save(folder: Path, cfg: ModelConfig, **changes: Any) -> Path:
    snapshot = examples.snapshot(1, cfg=cfg, **{"tokenizer_json": None, **changes})
    return CheckpointStore(folder, filesystem=examples.Unsynced()).save(snapshot)


def our_logits(cfg: ModelConfig, weights: dict[str, Any]) -> Any:
    """[T, V] of `IDS` by the model of this project, in float32."""
    import torch

    from hybrid.backends.torch.modules import make_root
    from hybrid.backends.torch.ops import TorchOps
    from hybrid.models.decoder import Inputs

    ids = torch.tensor(IDS)
    inputs = Inputs(ids, torch.arange(ids.shape[1])[None], torch.ones_like(ids))
    root = make_root(cfg, {name: torch.tensor(value) for name, value in weights.items()})
    with torch.no_grad():
        return root(TorchOps(), inputs, cfg, lambda ops, output, x, _: ops.linear(x, output))[0].numpy()


def their_logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits[0].float().numpy()


def agree(a: Any, b: Any) -> None:
    assert np.abs(a - b).max() <= 1e-4
    np.testing.assert_array_equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("cfg", SHAPES.values(), ids=SHAPES)
def test_transformers_computes_the_logits_of_an_exported_checkpoint(tmp_path: Path, cfg: ModelConfig) -> None:
    from transformers import AutoModelForCausalLM

    path, out = save(tmp_path, cfg), tmp_path / "out"
    facts = transformers_folder.export(path, out)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = examples.tensors(cfg, 1)[0]
    agree(their_logits(model), our_logits(cfg, weights))
    assert model.config.vocab_size == 29
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, None), "not the defaults of the family"
    assert facts["family"] == type(model).__name__.removesuffix("LMHeadModel").removesuffix("ForCausalLM").lower()

    # A tied table is stored once, and a file has the bytes that its numbers need.
    numbers = sum(p.numel() for p in model.parameters())
    length = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert facts["bytes"] == (out / "model.safetensors").stat().st_size == 8 + length + 4 * numbers
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("cfg", [SHAPES[name] for name in SHAPES if "without" not in name])
def test_an_exported_folder_reads_back_bit_for_bit(tmp_path: Path, cfg: ModelConfig) -> None:
    transformers_folder.export(save(tmp_path, cfg), tmp_path / "out")
    folder = TransformersFolder(tmp_path / "out")
    assert folder.model == replace(cfg, dropout=0.0)
    read = {name: np.frombuffer(b"".join(t.blocks()), "<f4") for name, t in folder.tensors().items()}
    for name, values in examples.tensors(cfg, 1)[0].items():
        np.testing.assert_array_equal(read[name], values.ravel())


def their_model(kind: str, **changes: Any) -> Any:
    """A random model of transformers with weights that are not all alike."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    if kind == "gpt2":
        shape = {"vocab_size": 29, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**{**shape, **changes}))
    else:
        shape = {
            "vocab_size": 29, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
        }  # fmt: skip
        model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


THEIRS = {
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-biased-wide-heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}, {}),
    "llama-in-several-files": ("llama", {}, {"max_shard_size": "2KB"}),
    "gpt2": ("gpt2", {}, {}),
    "gpt2-relu2": ("gpt2", {"activation_function": "relu2", "n_inner": 20}, {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}, {}),
}


@pytest.mark.parametrize(("kind", "changes", "options"), THEIRS.values(), ids=THEIRS)
def test_we_compute_the_logits_of_a_model_that_transformers_saved(
    tmp_path: Path, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model = their_model(kind, **changes)
    model.save_pretrained(tmp_path, **options)
    if options:
        assert not (tmp_path / "model.safetensors").exists()
    folder = TransformersFolder(tmp_path)
    weights = {
        name: np.frombuffer(b"".join(tensor.blocks()), "<f4").reshape(tensor.shape)
        for name, tensor in folder.tensors().items()
    }
    agree(our_logits(folder.model, weights), their_logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_widened_exactly(tmp_path: Path, dtype: str) -> None:
    import torch

    model = their_model("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    read = np.frombuffer(b"".join(TransformersFolder(tmp_path).tensors()[name].blocks()), "<f4")
    np.testing.assert_array_equal(read, model.state_dict()[name].float().numpy().ravel())


def test_older_gpt2_folders_lack_the_prefix_and_hold_masks(tmp_path: Path) -> None:
    model = their_model("gpt2")
    state = {n.removeprefix("transformer."): v.numpy() for n, v in model.state_dict().items() if n != "lm_head.weight"}
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32),
        "h.1.attn.masked_bias": np.full((), -1e4, np.float32),
    }
    model.config.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        safetensors.write(file.write, {**state, **masks, "lm_head.weight": state["wte.weight"].copy()})
    weights = {
        name: np.frombuffer(b"".join(tensor.blocks()), "<f4").reshape(tensor.shape)
        for name, tensor in TransformersFolder(tmp_path).tensors().items()
    }
    agree(our_logits(TransformersFolder(tmp_path).model, weights), their_logits(model))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("\n adehlo")], ids=["bytes", "characters"])
def test_the_tokenizer_opens_there_too(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    cfg = replace(LLAMA, vocabulary_size=256)
    path = save(tmp_path, cfg, tokenizer_json=tokenizer.to_json(), special_tokens={"eos": 3})
    transformers_folder.export(path, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = [int(i) for i in tokenizer.encode("hello\na dad")]
    assert theirs("hello\na dad")["input_ids"] == ids
    assert theirs.decode(ids) == "hello\na dad"
    assert (theirs.model_max_length, theirs.eos_token_id) == (16, 3)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 4}, "window = 4"),
        ({"schedule": (0, 1, 0, 1)}, "schedule"),
        ({"activation": "relu2"}, "activation = 'relu2'"),
        ({"norm": "layer_norm"}, "positions = 'rope'"),
    ],
)
def test_a_model_that_transformers_lacks_is_refused_with_what_is_in_the_way(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = save(tmp_path, replace(LLAMA, **changes))
    with pytest.raises(ConfigError, match="no model that transformers has") as error:
        transformers_folder.export(path, tmp_path / "out")
    assert named in str(error.value)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_and_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = save(tmp_path, LLAMA)
    (tmp_path / "mine").mkdir()
    with pytest.raises(HybridError, match="there already"):
        transformers_folder.export(path, tmp_path / "mine")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        transformers_folder.export(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "mine"]


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    """A Llama folder with other members in its config.json; None removes one."""
    transformers_folder.export(save(tmp_path, LLAMA), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba': expected 'llama' or 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters: rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": "29"}, "vocab_size is '29'"),
        ({"num_key_value_heads": 3}, "kv_heads is 3"),
    ],
)
def test_a_variant_that_we_cannot_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        TransformersFolder(folder)
    assert message in str(error.value)
    assert "config.json" in str(error.value)


def test_weights_that_contradict_the_shape_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, intermediate_size=13)
    with pytest.raises(CheckpointCorrupt, match=r"down_proj.*\[8, 12\]: expected \[8, 13\]"):
        TransformersFolder(folder)


def write(folder: Path, tensors: dict[str, Any]) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        safetensors.write(file.write, tensors)


def test_missing_unknown_untied_and_infinite_tensors_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    whole = safetensors.read_file(folder / "model.safetensors").tensors
    name = "model.layers.0.mlp.up_proj.weight"
    write(folder, {key: value for key, value in whole.items() if key != name})
    with pytest.raises(CheckpointCorrupt, match=rf"{name}' of shape \[12, 8\] is missing"):
        TransformersFolder(folder)
    write(folder, {**whole, "score.weight": np.zeros((2, 8), np.float32)})
    with pytest.raises(CheckpointCorrupt, match=r"'score\.weight' is of no model"):
        TransformersFolder(folder)
    write(folder, {**whole, name: np.full((12, 8), np.nan, np.float32)})
    with pytest.raises(CheckpointCorrupt, match="NaN"):
        list(TransformersFolder(folder).tensors()[name].blocks())
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "tie_word_embeddings": True}))
    write(folder, whole)
    with pytest.raises(CheckpointCorrupt, match="differ, though"):
        TransformersFolder(folder)


def test_hostile_and_absent_files_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    weights = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFound, match=r"pytorch_model\.bin is a pickle"):
        TransformersFolder(folder)
    for file in ("../model.safetensors", "/etc/passwd", "a/b.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(CheckpointCorrupt, match="expected a file name"):
            TransformersFolder(folder)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "absent.safetensors"}}))
    with pytest.raises(CheckpointNotFound, match=r"absent\.safetensors"):
        TransformersFolder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        TransformersFolder(folder)
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        TransformersFolder(tmp_path / "nowhere")


def test_layouts_name_every_parameter_once() -> None:
    for cfg in SHAPES.values():
        parts = [part for stored in transformers_layout.layout(cfg) for part in stored.parts]
        assert sorted(parts) == sorted(transformers_layout.part_shapes(cfg))
