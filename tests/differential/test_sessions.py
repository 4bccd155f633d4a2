"""The host's part of a session: batches, sampling, states and plans are judged alike in both languages."""

import base64
import copy
import hashlib
from random import Random
from typing import Any

import numpy as np
import pytest

from differential.both import Node, agree, draw
from hybrid.backends.protocol import GenerateOptions, SessionState
from hybrid.backends.row_index import row_index
from hybrid.backends.sampling import generate, sample_token, uniform
from hybrid.backends.state_check import check_state
from hybrid.backends.validate import validate_batch
from hybrid.data.batch import IGNORE, Batch
from hybrid.errors import ConfigError
from hybrid.plan.document import BoundSlice, Plan, access_conflict, check_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile


def test_row_indices(node: Node) -> None:
    random = draw("row index")
    cases = [
        [random.choice([0, 1, random.randrange(50), random.randrange(2**32)]) for _ in range(random.randrange(1, 90))]
        for _ in range(200)
    ]

    def python(values: list[int]) -> list[Any]:
        found = row_index(np.array(values, np.uint32))
        return [found[n].tolist() for n in ("row_order", "row_starts", "row_ids")] + [int(found["row_count"][0])]

    assert agree(node, "row_index", cases, python) == {"value": 200}


def random_batch(random: Random) -> dict[str, Any]:
    """Mostly a good batch of up to 4 x 12 tokens, with up to two faults in it."""
    rows, columns = random.randrange(1, 5), random.randrange(1, 13)
    size = rows * columns
    vocabulary, context = 20, 12
    segments = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < columns:
            row += [len(set(row)) + 1] * random.randrange(1, columns + 1)
        segments += row[:columns]
    batch = {
        "shape": [rows, columns],
        "ids": [random.randrange(vocabulary) for _ in range(size)],
        "targets": [random.choice([IGNORE, random.randrange(vocabulary)]) for _ in range(size)],
        "positions": [random.randrange(context) for _ in range(size)],
        "segment_ids": segments,
        "sample_ids": random.sample(range(9), rows),
    }
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        name = random.choice(["ids", "targets", "positions", "segment_ids", "sample_ids"])
        batch[name][random.randrange(len(batch[name]))] = random.choice([0, 1, 19, 20, 2**32 - 1, 12, 11])
    shape = [rows, columns] if random.random() < 0.9 else [rows, columns + 1]
    return {"batch": batch, "vocabulary": vocabulary, "context": context, "shape": shape}


def test_batches(node: Node) -> None:
    random = draw("batches")

    def python(case: dict[str, Any]) -> int:
        given = case["batch"]
        shaped = {
            n: np.array(given[n], np.uint32).reshape(given["shape"]) for n in given if n not in ("shape", "sample_ids")
        }
        batch = Batch(**shaped, sample_ids=np.array(given["sample_ids"], np.uint32))
        validate_batch(batch, case["vocabulary"], case["context"], tuple(case["shape"]))
        return batch.target_tokens

    counts = agree(node, "validate_batch", [random_batch(random) for _ in range(600)], python)
    assert counts["value"] > 100 and counts["DataContractError"] > 100


def test_uniform_numbers(node: Node) -> None:
    random = draw("uniform")
    cases = [
        {"seed": random.randrange(2**53), "index": random.choice([0, 1, random.randrange(2**40)])} for _ in range(100)
    ]
    assert agree(node, "uniform", cases, lambda case: uniform(case["seed"], case["index"])) == {"value": 100}


def random_options(random: Random) -> dict[str, Any]:
    return {
        "tokens": random.randrange(40),
        "temperature": random.choice([0, 0.5, 0.8, 1.5]),
        "topK": random.choice([0, 1, 3, 100]),
        "topP": random.choice([1, 0.9, 0.3]),
        "seed": random.randrange(2**32),
        "stopIds": random.sample(range(20), random.choice([0, 0, 2])),
    }


def python_options(options: dict[str, Any]) -> GenerateOptions:
    return GenerateOptions(
        options["tokens"],
        options["temperature"],
        options["topK"],
        options["topP"],
        options["seed"],
        tuple(options["stopIds"]),
    )


def test_sampled_tokens(node: Node) -> None:
    random = draw("sampling")
    cases = []
    for _ in range(300):
        logits = [float(np.float32(random.gauss(0, 3))) for _ in range(random.randrange(1, 60))]
        if random.random() < 0.3:
            logits = [round(x) for x in logits]  # ties
        if random.random() < 0.1:
            logits[0] = 10**400  # infinity in JavaScript
        cases.append({"logits": logits, "options": random_options(random), "index": random.randrange(1000)})

    def python(case: dict[str, Any]) -> int:
        logits = np.array([float("inf") if x == 10**400 else x for x in case["logits"]], np.float32)
        return sample_token(logits, python_options(case["options"]), case["index"])

    counts = agree(node, "sample_token", cases, python)
    assert counts["value"] > 200 and counts["NonFiniteError"] > 5


def test_generation(node: Node) -> None:
    random = draw("generation")
    cases = []
    for _ in range(150):
        prompt = [random.randrange(-1 if random.random() < 0.1 else 0, 20) for _ in range(random.randrange(0, 15))]
        options = random_options(random)
        if random.random() < 0.1:
            options[random.choice(["temperature", "topK", "topP", "tokens"])] = -1
        cases.append({"prompt": prompt, "options": options, "vocabulary": 20, "context": random.choice([1, 2, 9, 50])})

    def python(case: dict[str, Any]) -> list[Any]:
        vocabulary = case["vocabulary"]
        calls: list[list[int]] = []

        def logits(token: int, position: int) -> np.ndarray:
            return np.array(
                [(token * 7 + position * 5 + n * 3) % vocabulary / 8 for n in range(vocabulary)], np.float32
            )

        def prefill(ids: list[int]) -> np.ndarray:
            calls.append(list(ids))
            return logits(ids[-1], len(ids) - 1)

        def decode(token: int, position: int) -> np.ndarray:
            calls.append([token, position])
            return logits(token, position)

        sizes = {"vocabulary_size": vocabulary, "context_length": case["context"]}
        return [list(generate(prefill, decode, case["prompt"], python_options(case["options"]), **sizes)), calls]

    counts = agree(node, "generate", cases, python)
    assert counts["value"] > 80 and counts["DataContractError"] > 5 and counts["ConfigError"] > 3


def test_states(node: Node) -> None:
    random = draw("states")
    shapes = {"a.weight": [2, 3], "b.bias": [4], "c": [1]}
    cases = []
    for _ in range(300):
        model = {
            n: {"shape": s, "values": [random.random() for _ in range(int(np.prod(s)))]} for n, s in shapes.items()
        }
        moments = {f"{slot}/{n}": copy.deepcopy(t) for slot in ("moment1", "moment2") for n, t in model.items()}
        case = {
            "model": model,
            "optimizer": moments,
            "step": random.choice([0, 7, 7, 7, -1, 1.5, None, True]),
            "shapes": shapes,
        }
        for _ in range(random.choice([0, 0, 1, 2])):
            tensors = case[random.choice(["model", "optimizer"])]
            if not tensors:
                continue
            name = random.choice(sorted(tensors))
            fault = random.choice(["drop", "extra", "shape", "nan"])
            if fault == "drop":
                del tensors[name]
            elif fault == "extra":
                tensors["more." + name] = {"shape": [1], "values": [0]}
            elif fault == "shape":
                tensors[name]["shape"] = [*tensors[name]["shape"], 1]
            else:
                tensors[name]["values"][0] = None
        cases.append(case)

    def python(case: dict[str, Any]) -> str:
        def read(tensors: dict[str, Any]) -> dict[str, Any]:
            return {n: np.array(t["values"], np.float32).reshape(t["shape"]) for n, t in tensors.items()}

        state = SessionState(read(case["model"]), read(case["optimizer"]), case["step"])
        check_state(state, {n: tuple(s) for n, s in case["shapes"].items()})
        return "fits"

    counts = agree(node, "check_state", cases, python)
    assert counts["value"] > 50 and counts["CheckpointCorrupt"] > 100


def test_access_conflicts(node: Node) -> None:
    random = draw("access")
    cases = []
    for _ in range(400):
        count = random.randrange(1, 6)
        bindings = [
            [random.choice("ab"), random.randrange(2), 256 * random.randrange(6), 128 * random.randrange(1, 5)]
            for _ in range(count)
        ]
        cases.append(
            {"accesses": [[i + 1, random.choice(["read", "read_write"])] for i in range(count)], "bindings": bindings}
        )

    def python(case: dict[str, Any]) -> str | None:
        accesses = tuple((number, access) for number, access in case["accesses"])
        return access_conflict(accesses, tuple(BoundSlice(*b) for b in case["bindings"]))

    assert agree(node, "access_conflict", cases, python) == {"value": 400}


WGSL = "@compute @workgroup_size(1) fn main() {}"
TABLE = bytes(range(64))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def small_plan() -> dict[str, Any]:
    """A plan that means nothing and breaks no rule."""
    kernel = {
        "source": sha(WGSL.encode()),
        "entry": "main",
        "constants": {},
        "bindings": [[1, "read"], [2, "read_write"]],
        "uniforms": "uf",
    }
    command = {
        "choices": [{"kernel": "copy", "uniforms": [3, 0.5], "workgroups": [1, 2, 3]}],
        "bindings": [["tables", 0, 0, 64], ["activations", 1, 256, 128]],
        "label": "layers.0.copy",
        "phase": "forward",
    }
    return {
        "format": "hybrid.plan",
        "version": 1,
        "requires": {"features": [], "limits": {"maxBufferSize": 1024}},
        "model": {"vocabulary_size": 4},
        "shape": {"B": 1, "T": 2},
        "precision": "f32",
        "settings": {
            "optimizer": {},
            "groups": [],
            "initial": {},
            "lossScaling": None,
            "dropoutSites": [],
            "ringRows": 256,
            "scheduleRows": 1024,
            "prefillTokens": 1,
        },
        "arenas": {"tables": {"pages": [256]}, "activations": {"pages": [256, 1024]}},
        "tensors": {
            "table": {"arena": "tables", "page": 0, "offset": 0, "shape": [4, 4], "dtype": "f32"},
            "x": {"arena": "activations", "page": 1, "offset": 256, "shape": [32], "dtype": "u32"},
        },
        "kernels": {"copy": kernel},
        "sources": {sha(WGSL.encode()): WGSL},
        "constants": {"table": {"sha256": sha(TABLE), "bytes": 64}},
        "programs": {
            "begin": [{"clear": "activations"}, command],
            "forward_backward": [],
            "evaluate": [],
            "optimizer_stats": [],
            "optimizer_apply": [],
        },
    }


def damage(random: Random, document: dict[str, Any], profile: dict[str, Any]) -> None:
    """One fault that both languages must name in the same words."""
    dispatch = document["programs"]["begin"][1]
    binding, choice, kernel = (
        dispatch["bindings"][random.randrange(2)],
        dispatch["choices"][0],
        document["kernels"]["copy"],
    )
    tensor = document["tensors"]["x"]
    faults = [
        lambda: document.update(version=random.choice([0, 2, None, "1"])),
        lambda: document.update(format=random.choice(["hybrid", None])),
        lambda: document["requires"].update(features=["shader-f16", "subgroups"]),
        lambda: document["arenas"]["activations"].update(pages=[256, 2**40]),
        lambda: tensor.update(arena="nowhere"),
        lambda: tensor.update(page=random.choice([2, 9])),
        lambda: tensor.update(offset=random.choice([1024, 128, 4])),
        lambda: kernel.update(source="0" * 64),
        lambda: kernel.update(uniforms=random.choice(["ux", "u", "uff"])),
        lambda: kernel["bindings"].__setitem__(0, [1, random.choice(["write", "read_write"])]),
        lambda: kernel.update(bindings=[[n, "read"] for n in range(1, random.choice([4, 12]))]),
        lambda: binding.__setitem__(2, random.choice([4, 512, 1 << 20])),
        lambda: binding.__setitem__(3, random.choice([0, 1 << 20, 300])),
        lambda: binding.__setitem__(0, "nowhere"),
        lambda: choice.update(kernel="other"),
        lambda: choice.update(uniforms=[1]),
        lambda: choice.update(workgroups=[1, random.choice([0, 70_000]), 1]),
        lambda: document["sources"].update({sha(WGSL.encode()): WGSL + " "}),
        lambda: document["constants"]["table"].update(sha256="1" * 64),
        lambda: profile["limits"].update(maxStorageBufferBindingSize=32),
        lambda: dispatch.update(bindings=[["activations", 1, 256, 64], ["activations", 1, 512, 64]]),
    ]
    random.choice(faults)()


def test_plans(node: Node) -> None:
    random = draw("plans")
    cases = []
    for _ in range(500):
        document, profile = small_plan(), {"limits": dict(DEFAULT_LIMITS), "features": ["timestamp-query"]}
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            damage(random, document, profile)
        constants = {sha(TABLE): base64.b64encode(TABLE).decode()}
        cases.append({"document": document, "constants": constants, "profile": profile})

    def python(case: dict[str, Any]) -> str:
        data = {key: base64.b64decode(text) for key, text in case["constants"].items()}
        plan = Plan.from_json(case["document"], data)
        profile = case["profile"]
        check_plan(plan, DeviceProfile(profile["limits"], frozenset(profile["features"])))
        return plan.hash()

    counts = agree(node, "check_plan", cases, python)
    assert counts["value"] > 50 and counts["ConfigError"] > 100 and counts["LimitExceeded"] > 30


def test_malformed_plans_are_refused_by_both(node: Node) -> None:
    """Every member of a small plan, taken away or replaced by something else: no error may be anything but typed."""

    def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(p for key, item in items for p in paths(item, (*path, key)))]

    cases = []
    for path in paths(small_plan())[1:]:
        for replacement in (None, "text", -1, [], {}):
            document = small_plan()
            parent: Any = document
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = replacement
            cases.append(
                {
                    "document": document,
                    "constants": {sha(TABLE): base64.b64encode(TABLE).decode()},
                    "profile": {"limits": dict(DEFAULT_LIMITS), "features": []},
                }
            )
    kinds = [
        next(iter(answer)) if "value" in answer else answer["error"][0] for answer in node.ask("check_plan", cases)
    ]
    assert set(kinds) <= {"value", "ConfigError", "LimitExceeded"}
    assert kinds.count("ConfigError") > 200
    with pytest.raises(ConfigError):
        Plan.from_json(cases[0]["document"], {})
