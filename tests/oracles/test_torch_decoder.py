"""The oracle itself, against `transformers`, `torch.optim.AdamW`, published Philox words, and its own promises."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: pip install 'hybrid[torch]'")

from oracles import torch_decoder as oracle  # noqa: E402

pytestmark = pytest.mark.torch
VECTORS = Path(__file__).resolve().parents[2] / "bridge" / "vectors"

LLAMA = {
    "vocabulary_size": 61,
    "context_length": 24,
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "feed_forward_width": 48,
    "norm": "rms_norm",
    "norm_eps": 1e-5,
    "positions": "rope",
    "rope_base": 10000.0,
    "activation": "swiglu",
    "bias": False,
    "tied_embeddings": False,
    "window": None,
    "dropout": 0.0,
    "schedule": (0, 1),
}
GPT2 = LLAMA | {
    "kv_heads": 4,
    "feed_forward_width": 128,
    "norm": "layer_norm",
    "positions": "learned",
    "activation": "gelu",
    "bias": True,
    "tied_embeddings": True,
}
LOOPED = LLAMA | {"schedule": (0, 1, 0, 1, 1), "tied_embeddings": True}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    c, f, d = config["width"], config["feed_forward_width"], config["head_width"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocabulary_size"], c)}
    if config["positions"] == "learned":
        found["model.embed_positions.weight"] = (config["context_length"], c)
    for i in range(config["layers"]):
        queries, keys = config["heads"] * d, config["kv_heads"] * d
        maps = {"q": (queries, c), "k": (keys, c), "v": (keys, c), "o": (c, queries)}
        linears = {f"self_attn.{name}_proj": shape for name, shape in maps.items()}
        if config["activation"] == "swiglu":
            linears["mlp.gate_proj"] = (f, c)
        linears |= {"mlp.up_proj": (f, c), "mlp.down_proj": (c, f)}
        for name, shape in linears.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
            if config["bias"]:
                found[f"model.layers.{i}.{name}.bias"] = shape[:1]
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(config["layers"]) for n in ("input", "post_attention")]
    for name in [*norms, "model.norm"]:
        found[f"{name}.weight"] = (c,)
        if config["bias"]:
            found[f"{name}.bias"] = (c,)
    if not config["tied_embeddings"]:
        found["lm_head.weight"] = (config["vocabulary_size"], c)
    return found


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Large enough that every part matters, norms away from 1 and biases away from 0."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(0, 0.2, shape) + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
        for name, shape in shapes(config).items()
    }


def batch(ids: np.ndarray, targets=None, segments=None, samples=None, positions=None) -> SimpleNamespace:
    b, t = ids.shape
    return SimpleNamespace(
        ids=ids.astype(np.uint32),
        targets=(ids if targets is None else targets).astype(np.uint32),
        positions=(np.tile(np.arange(t), (b, 1)) if positions is None else positions).astype(np.uint32),
        segment_ids=(np.ones((b, t)) if segments is None else segments).astype(np.uint32),
        sample_ids=(np.arange(b) if samples is None else samples).astype(np.uint32),
    )


def random_batch(config: dict, b: int = 3, t: int = 16, seed: int = 1) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, config["vocabulary_size"], (b, t))
    targets[rng.random((b, t)) < 0.3] = oracle.NO_TARGET
    return batch(rng.integers(0, config["vocabulary_size"], (b, t)), targets)


def logits(config: dict, weights: dict, of: SimpleNamespace) -> torch.Tensor:
    return oracle.Decoder(config, {name: torch.from_numpy(w) for name, w in weights.items()}).logits(of)


@pytest.mark.parametrize(("tied", "window"), [(False, None), (True, None), (False, 5)])
def test_llama_logits_are_those_of_transformers(tied: bool, window: int | None) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    config = LLAMA | {"tied_embeddings": tied, "window": window}
    weights = random_weights(config)
    arguments = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 24,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
    }
    if window:
        model = MistralForCausalLM(MistralConfig(**arguments, sliding_window=window))
    else:
        model = LlamaForCausalLM(LlamaConfig(**arguments))
    model = model.double()
    loaded = {name: torch.from_numpy(w) for name, w in weights.items()}
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    of = random_batch(config)
    with torch.no_grad():
        expected = model(torch.from_numpy(of.ids.astype(np.int64))).logits
    # transformers computes its rotary angles in float32 even in a float64 model
    torch.testing.assert_close(logits(config, weights, of), expected, rtol=0, atol=2e-5)


def test_gpt2_logits_are_those_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    weights = random_weights(GPT2)
    model = (
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=61,
                n_positions=24,
                n_embd=32,
                n_layer=2,
                n_head=4,
                layer_norm_epsilon=1e-5,
                attn_implementation="eager",
            )
        )
        .double()
        .eval()
    )
    state = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.wpe.weight": weights["model.embed_positions.weight"],
    }
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
        "attn.c_proj": "self_attn.o_proj",
    }
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = weights[f"model.norm.{kind}"]
        for i in range(2):
            ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
            for their_name, our_name in names.items():
                state[f"{theirs}.{their_name}.{kind}"] = weights[f"{ours}.{our_name}.{kind}"].T
            parts = [weights[f"{ours}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            state[f"{theirs}.attn.c_attn.{kind}"] = np.concatenate(parts).T
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(w) for k, w in state.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    of = random_batch(GPT2)
    with torch.no_grad():
        expected = model(torch.from_numpy(of.ids.astype(np.int64))).logits
    torch.testing.assert_close(logits(GPT2, weights, of), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("config", [LLAMA, GPT2, LOOPED], ids=["llama", "gpt2", "looped"])
def test_packed_documents_do_not_see_each_other(config: dict) -> None:
    rng = np.random.default_rng(4)
    weights = random_weights(config)
    first, second = rng.integers(0, 61, (1, 7)), rng.integers(0, 61, (1, 9))
    packed = batch(
        np.concatenate([first, second], axis=1),
        segments=np.array([[1] * 7 + [2] * 9]),
        positions=np.array([[*range(7), *range(9)]]),
    )
    together = logits(config, weights, packed)[0]
    torch.testing.assert_close(together[:7], logits(config, weights, batch(first))[0])
    torch.testing.assert_close(together[7:], logits(config, weights, batch(second))[0])


def test_a_loop_of_one_layer_is_two_layers_with_equal_weights() -> None:
    looped = LLAMA | {"layers": 1, "schedule": (0, 0)}
    weights = random_weights(looped)
    unrolled = dict(weights) | {
        name.replace("layers.0", "layers.1"): w for name, w in weights.items() if "layers.0" in name
    }
    of = random_batch(looped)
    torch.testing.assert_close(logits(looped, weights, of), logits(LLAMA, unrolled, of), rtol=0, atol=0)


def test_philox_gives_the_published_words() -> None:
    cases = json.loads((VECTORS / "philox.json").read_text())["cases"]
    assert cases

    def words(value: list[str]) -> list[int]:
        return [int(word, 16) for word in value]

    for case in cases:
        found = oracle.philox(np.array([words(case["ctr"])], np.uint64), tuple(words(case["key"])))
        assert found[0].tolist() == words(case["out"])


def test_dropout_keeps_its_rate_and_its_mean_and_depends_on_seed_step_site_and_sample() -> None:
    def mask(site="embed", seed=1, step=1, samples=(0, 1, 2, 3)) -> np.ndarray:
        return oracle.dropout_mask(site, 0.1, seed, step, np.array(samples), 64, 61)

    base = mask()
    assert set(np.unique(base)) == {0.0, float(np.float32(1 / 0.9))}
    assert abs((base == 0).mean() - 0.1) < 0.01
    assert not np.array_equal(base[0], base[1])
    assert np.array_equal(mask(samples=(2, 0))[0], base[2])
    for other in (mask(site="layers.0.mlp"), mask(seed=2), mask(step=2)):
        assert abs((base[other == 0] == 0).mean() - 0.1) < 0.02


def split(of: SimpleNamespace, sizes: list[int]) -> list[SimpleNamespace]:
    starts = np.cumsum([0, *sizes])
    return [SimpleNamespace(**{name: array[a:b] for name, array in vars(of).items()}) for a, b in pairwise(starts)]


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [1, 1, 1, 1]])
def test_any_split_of_a_batch_gives_the_same_gradients(sizes: list[int]) -> None:
    config = LLAMA | {"dropout": 0.1}
    whole = random_batch(config, b=4)
    whole.targets[0, 3:] = oracle.NO_TARGET
    settings = oracle.Settings(dtype=torch.float64, z_loss=1e-2)
    weights = random_weights(config)
    expected = oracle.train(config, weights, [[whole]], settings)
    found = oracle.train(config, weights, [split(whole, sizes)], settings)
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_targets_plus_the_z_loss() -> None:
    weights = random_weights(GPT2)
    of = random_batch(GPT2)
    rows = logits(GPT2, weights, of)
    targets = torch.from_numpy(of.targets.astype(np.int64))
    counted = targets != oracle.NO_TARGET
    nll = torch.nn.functional.cross_entropy(rows[counted], targets[counted])
    z = (rows[counted].logsumexp(-1) ** 2).mean()
    trace = oracle.train(GPT2, weights, [[of]], oracle.Settings(dtype=torch.float64, z_loss=0.05))
    assert trace.nlls[0] == pytest.approx(nll.item(), rel=1e-12)
    assert trace.losses[0] == pytest.approx((nll + 0.05 * z).item(), rel=1e-12)


def test_the_optimizer_is_adamw_with_clipping() -> None:
    """Twenty steps against torch.optim.AdamW and clip_grad_norm_, with a schedule and decay on matrices only."""
    weights = random_weights(GPT2)
    batches = [random_batch(GPT2, seed=s) for s in range(20)]
    rates = [1e-2 * (1 - t / 40) for t in range(20)]
    settings = oracle.Settings(lr=rates, weight_decay=0.3, max_norm=0.5, eps=1e-6, dtype=torch.float64)
    trace = oracle.train(GPT2, weights, [[b] for b in batches], settings)
    assert min(trace.clip_factors) < 1

    leaves = {name: torch.from_numpy(w.copy()).requires_grad_() for name, w in weights.items()}
    groups = [
        {"params": [w for w in leaves.values() if w.dim() >= 2], "weight_decay": 0.3},
        {"params": [w for w in leaves.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    model = oracle.Decoder(GPT2, leaves)
    for rate, of, norm in zip(rates, batches, trace.grad_norms, strict=True):
        optimizer.zero_grad()
        (model.losses(of)[0] / int((of.targets != oracle.NO_TARGET).sum())).backward()
        assert torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5).item() == pytest.approx(norm, rel=1e-9)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(trace.weights[name], leaf.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_an_overflowed_step_is_skipped_and_the_scale_backs_off() -> None:
    weights = random_weights(LLAMA)
    batches = [[random_batch(LLAMA, seed=s)] for s in range(6)]
    scaler = {
        "initialScale": 8.0,
        "minScale": 1.0,
        "maxScale": 16.0,
        "scaleFactor": 2.0,
        "backoffFactor": 0.5,
        "growthInterval": 2,
    }
    settings = oracle.Settings(scaler=scaler, overflow_steps=frozenset({3}), dtype=torch.float64)
    trace = oracle.train(LLAMA, weights, batches, settings)
    assert trace.loss_scales == [8, 8, 16, 8, 8, 16]
    assert trace.overflows == [False, False, True, False, False, False]
    assert trace.optimizer_steps == [1, 2, 2, 3, 4, 5]
    assert trace.grad_norms[2] is None
    assert trace.scaler == {"scale": 16.0, "growthCounter": 1}
    kept = [b for s, b in enumerate(batches, 1) if s != 3]
    without = oracle.train(LLAMA, weights, kept, oracle.Settings(dtype=torch.float64))
    for name, weight in without.weights.items():
        np.testing.assert_allclose(trace.weights[name], weight, rtol=1e-12, atol=1e-14)
