"""The training runner in JavaScript writes the rows that Python's writes, judges resumes alike, and means the same by
a contract."""

from __future__ import annotations

import copy
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from differential.both import Node, agree, draw
from hybrid.backends.protocol import StepResult
from hybrid.checkpoint.manifest import Fingerprints, Progress
from hybrid.checkpoint.resume import check_resume
from hybrid.config.contract import contract
from hybrid.config.loading import to_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import model_config, resolve
from hybrid.config.tree import RunConfig
from hybrid.contracts.fingerprint import differences
from hybrid.contracts.metrics import OPTIONAL_FIELDS
from hybrid.contracts.stable_json import stable_hash, stable_json
from hybrid.data.loader import BatchPlan
from hybrid.errors import HybridError
from hybrid.models.parameters import count_parameters
from hybrid.training.entries import Entries, StepPlace
from hybrid.training.meter import Meter
from hybrid.training.saved_run import check_place, saved_config
from hybrid.training.start import Services
from training.micro import NOT_IN_A_TAB, Recorder

pytestmark = pytest.mark.node

OWN = ("environment_metadata", "memory_stats")  # what each runtime says about itself


class Clock:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def random_config(random: Random, **sections: dict[str, Any]) -> RunConfig:
    """A resolved configuration of a small run."""
    kind = random.choice(["constant", "step_decay", "cosine", "cosine_to_min", "wsd"])
    tree: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2, "dropout": random.choice([0.0, 0.1])},
        "data": {"batchSize": random.choice([2, 4]), "sequenceLength": 8},
        "optimizer": {"lr": random.choice([1e-3, 3e-4]), "weightDecay": random.choice([0.0, 0.1])},
        "schedule": {"type": kind, "warmupSteps": random.choice([0, 3]), "stepSize": 4, "gamma": 0.5, "minLr": 1e-5},
        "precision": {"type": random.choice(["f32", "mixed-f16"])},
        "run": {"steps": random.choice([None, 20]), "epochs": random.choice([1, 3]), "logEvery": random.choice([1, 4])},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return resolve(parse_config(tree), 256, 40)


def test_meters(node: Node) -> None:
    random = draw("meter")

    def calls(depth: int = 0) -> list[Any]:
        kinds = ["wait", "step", "step"] + (["paused", "stopped"] if depth < 2 else [])
        chosen = [random.choice(kinds) for _ in range(random.randrange(1, 9))]
        values = {"wait": lambda: random.random() * 3, "step": lambda: random.randrange(500)}
        return [[kind, values[kind]() if kind in values else calls(depth + 1)] for kind in chosen]

    cases = [{"calls": [random.random() * 1e4, calls()], "window": random.choice([1, 3, 50])} for _ in range(150)]

    def python(case: dict[str, Any]) -> list[Any]:
        began, todo = case["calls"]
        clock = Clock(began)
        meter = Meter(clock, case["window"])
        seen: list[Any] = []

        def run(inner: list[Any]) -> None:
            for what, value in inner:
                if what == "wait":
                    clock.seconds += value
                elif what == "step":
                    meter.step(value)
                else:
                    with meter.paused() if what == "paused" else meter.stopped():
                        run(value)
                seen.append([meter.seconds, meter.training_seconds, meter.tokens_per_second, meter.step_milliseconds])
                seen.append(meter.eta_seconds(7))

        run(todo)
        return seen

    assert agree(node, "meter", cases, python) == {"value": 150}


def random_run(random: Random) -> dict[str, Any]:
    """A run's settings and what its steps report: overflows, lost times, alerts, a state to go on from."""
    fail = random.random() < 0.2
    thresholds = {"maxGradientNorm": 8.0, "maxNaNCount": 3, "minEffectiveLr": 1e-7, "maxStepTimeMs": 90.0}
    telemetry = {
        "mode": random.choice(["step", "window", "epoch"]),
        "windowSize": random.randrange(1, 5),
        "emitNaNInfCounters": random.random() < 0.8,
        "alerts": {
            "enabled": fail or random.random() < 0.5,
            "failOnAlert": fail,
            "thresholds": {name: value for name, value in thresholds.items() if random.random() < 0.6},
        },
    }
    config = random_config(random, telemetry=telemetry)
    first = random.randrange(1, 10)
    steps, done = [], first - 1
    scale = 1024.0
    for step in range(first, first + random.randrange(1, 12)):
        overflow = random.random() < 0.2
        lost = overflow and random.random() < 0.5
        done += not overflow
        after = scale / 2 if overflow else scale
        timed = random.random() < 0.5
        times = [40.0, 12.5, 20.25, 3.0] if timed else [None] * 4
        loss = 3.4028234663852886e38 if lost else random.random() * 6
        result = {
            "dataStep": step,
            "loss": loss,
            "nll": loss if lost else loss * 0.99,
            "targetTokens": random.randrange(1, 33),
            "gradNorm": None if overflow and random.random() < 0.5 else random.random() * 10,
            "clipFactor": random.choice([1, 0.25]),
            "lossScale": scale,
            "lossScaleAfter": after,
            "growthCounter": 0,
            "overflow": overflow,
            "lossOverflow": lost,
            "nanCount": random.randrange(6) if overflow else 0,
            "infCount": random.randrange(6) if overflow else 0,
            "optimizerStep": done,
            "stepTimeMs": times[0],
            "forwardMs": times[1],
            "backwardMs": times[2],
            "optimizerMs": times[3],
            "timingSource": "device" if timed else "none",
        }
        scale = after
        where = {
            "epoch": step // 5,
            "batch": step % 5 + 1,
            "ignoredTargets": random.randrange(5),
            "tokensPerSecond": random.choice([0, 1234.5]),
            "stepMilliseconds": random.random() * 100,
        }
        memory = {"params": 4096, "total": 8192}
        steps.append({"result": result, "where": where, "memory": memory, "wait": random.random()})
    windows = {"loss": [2.5, 2.25], "stepTimeMs": [10.0, 11.0], "observed": 7, "epoch": 1}
    state = random.choice(
        [
            {},
            {"elapsedMs": 1234.5, "telemetry": windows},
            {"elapsedMs": -0.5},
            {"telemetry": {**windows, "loss": "x"}},
            {"telemetry": {**windows, "observed": None}},
        ]
    )
    settings = to_settings(config)
    job = {
        "config": settings,
        "steps": 20,
        "parameters": count_parameters(model_config(config)),
        "provenance": {"commitHash": None, "buildId": "7", "buildTimestamp": None},
    }
    describe = random.choice([{"backend": "browser", "kernel_path": "wgsl-f32"}, {"backend": "browser"}])
    case = {"job": job, "describe": describe, "state": state, "began": random.random() * 1e5, "steps": steps}
    return {**case, "failOnAlert": fail}


def python_entries(case: dict[str, Any]) -> list[str]:
    said: list[Any] = []
    clock = Clock(case["began"])
    config = parse_config(case["job"]["config"])
    view = Recorder(lambda kind, facts: said.append([kind, measured_in_a_tab(facts)]))
    services = Services(view=view, clock=clock, now=lambda: clock.seconds + 1e9)
    log = SimpleNamespace(append=lambda row: said.append(measured_in_a_tab(row)))
    prepared: Any = SimpleNamespace(config=config, model=model_config(config), steps=case["job"]["steps"])
    meter = Meter(clock)
    try:
        entries = Entries(prepared, services, log, meter, case["describe"], case["state"], ())  # type: ignore[arg-type]
        entries._facts = entries._facts.__class__(
            **{**vars(entries._facts), "build_provenance": case["job"]["provenance"]}
        )
        for step in case["steps"]:
            result, where = step["result"], step["where"]
            entries.begin(
                result["dataStep"],
                StepPlace(
                    where["epoch"], where["batch"], where["ignoredTargets"], where["tokensPerSecond"],
                    where["stepMilliseconds"],
                ),
                step["memory"],
            )  # fmt: skip
            clock.seconds += step["wait"]
            made = StepResult(**{_snake(name): value for name, value in result.items()})
            if case["failOnAlert"]:
                entries.judge(made)
            meter.step(made.target_tokens)
            entries.record([made])
        said.append(entries.state())
    except HybridError as error:
        said.append([type(error).__name__, str(error)])
    return [stable_json(one) for one in said]


def measured_in_a_tab(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in (*OWN, *OPTIONAL_FIELDS, *NOT_IN_A_TAB)}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def test_the_same_step_results_give_the_same_entries_and_summaries(node: Node) -> None:
    random = draw("entries")
    cases = [random_run(random) for _ in range(250)]
    assert agree(node, "entries", cases, python_entries) == {"value": 250}
    endings = [stable for case in cases for stable in python_entries(case) if stable.startswith('["')]
    assert any('"AlertRaised"' in ending for ending in endings)
    assert any('"CheckpointCorrupt"' in ending for ending in endings)


def test_other_lengths_seeds_and_batches_are_other_contracts(node: Node) -> None:
    random = draw("contract")
    cases = []
    for _ in range(100):
        config = random_config(random)
        fingerprints = {"dataset": {"samples": 40}, "tokenizer": {}, "contract": contract(config)}
        settings = to_settings(config)
        changed = {
            **settings,
            "data": {**settings["data"], "batchSize": random.choice([2, 8])},
            "run": {**settings["run"], "seed": random.randrange(9), "steps": random.choice([None, 5]), "epochs": 2},
        }
        cases.append({"job": {"fingerprints": fingerprints, "hashes": {}}, "config": changed})

    def python(case: dict[str, Any]) -> list[Any]:
        agreed = contract(parse_config(case["config"]))
        return [agreed, stable_hash(agreed)]

    assert agree(node, "with_config", cases, python) == {"value": 100}


def random_manifest(random: Random) -> dict[str, Any]:
    """What a checkpoint says of its place, mostly right, with up to one fault."""
    config = random_config(random, run={"steps": random.choice([None, 20]), "seed": 7})
    settings, samples, step = to_settings(config), 40, random.randrange(0, 10)
    limit = config.run.epochs * samples if config.run.steps is None else None
    cursor = BatchPlan(samples, config.data.batch_size, 7, limit).cursor(step)
    document: dict[str, Any] = {
        "config": settings,
        "dataCursor": cursor,
        "seed": 7,
        "optimizerStep": max(0, step - 1),
        "lossScaler": {"scale": 1024, "growthCounter": 0},
        "progress": {
            "step": step,
            "epoch": cursor["epoch"],
            "batch": cursor["position"] // config.data.batch_size,
            "samples": cursor["samples"],
            "tokens": cursor["samples"] * config.data.sequence_length,
            "targetTokens": 0,
        },
        "fingerprints": {"dataset": {"samples": samples}, "tokenizer": {}, "contract": contract(config)},
        "resumeAudits": [],
    }
    faults: list[tuple[tuple[str, ...], Any]] = [
        (("dataCursor", "position"), 1_000_003),
        (("dataCursor",), {}),
        (("progress", "epoch"), 99),
        (("progress", "tokens"), 1),
        (("progress", "targetTokens"), 10**7),
        (("optimizerStep",), 77),
        (("seed",), 8),
        (("lossScaler", "growthCounter"), 78),
        (("lossScaler",), {}),
        (("fingerprints", "dataset", "samples"), 0),
        (("fingerprints", "contract", "data", "batchSize"), 3),
        (("config", "optimizer", "lr"), 0.5),
    ]
    if random.random() < 0.7:
        path, value = random.choice(faults)
        document = copy.deepcopy(document)
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    return document


def test_a_checkpoint_that_contradicts_itself(node: Node) -> None:
    random = draw("check place")

    def python(document: dict[str, Any]) -> str:
        progress = {_snake(name): value for name, value in document["progress"].items()}
        manifest: Any = SimpleNamespace(
            config=document["config"],
            cursor=document["dataCursor"],
            seed=document["seed"],
            optimizer_step=document["optimizerStep"],
            scaler=document["lossScaler"],
            progress=Progress(**progress),
            fingerprints=Fingerprints(**document["fingerprints"]),
            resume_audits=(),
        )
        folder: Any = FakeFolder()
        check_place(folder, manifest, saved_config(folder, manifest))
        return "fits"

    counts = agree(node, "check_place", [random_manifest(random) for _ in range(300)], python)
    assert counts["value"] > 50 and counts["CheckpointCorrupt"] > 100


class FakeFolder:
    """Names a file in a folder as JavaScript does, on every system."""

    def __truediv__(self, name: str) -> str:
        return f"folder/{name}"


def test_what_a_resume_accepts_and_records(node: Node) -> None:
    random = draw("agree")
    values = [1, 2, "a", None]
    cases = []
    for _ in range(200):
        saved, current = (
            {name: {key: random.choice(values) for key in "xy"} for name in ("dataset", "tokenizer", "contract")}
            for _ in range(2)
        )
        if random.random() < 0.3:
            current = copy.deepcopy(saved)
        force = random.choice([None, {"reason": "why not", "source": "a:b", "operator": None}])
        cases.append(
            {"saved": {"fingerprints": saved, "resumeAudits": []}, "current": current, "audits": [], "force": force}
        )

    def python(case: dict[str, Any]) -> list[Any]:
        saved, current = Fingerprints(**case["saved"]["fingerprints"]), Fingerprints(**case["current"])
        force = case["force"]
        found = differences(saved.to_json(), current.to_json())
        accepted = {field: force["reason"] for field, _, _ in found} if force else {}
        source = force["source"] if force else "nobody"
        return list(check_resume(saved, current, accepted, source=source, now=lambda: 1.7e9))

    counts = agree(node, "agree", cases, python)
    assert counts["value"] > 50 and counts["ContractMismatch"] > 50
