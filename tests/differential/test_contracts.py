"""Random inputs mean the same to the contracts of both languages, messages included."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import asdict
from typing import Any

import pytest

from contracts.entries import RUN, step
from contracts.vectors import load
from differential.both import agree, draw
from differential.inputs import (
    INFINITE,
    TEXTS,
    junk,
    number,
    plain_number,
    scalar,
    settings,
    text,
    value,
)
from hybrid import errors
from hybrid.checkpoint import canonical, strict_json
from hybrid.contracts import (
    environment,
    fingerprint,
    identity,
    memory,
    names,
    progress,
    provenance,
    record,
    seed,
    telemetry,
)
from hybrid.contracts.javascript import optional_text, parse_time, to_number
from hybrid.contracts.loss_scaler import DEFAULTS, DynamicLossScaler
from hybrid.contracts.metrics import GENERATIONS, RunFacts, StepFacts, build_entry, entry_error
from hybrid.contracts.stable_json import stable_hash, stable_json
from hybrid.errors import HybridError

pytestmark = pytest.mark.node


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def camel_keys(document: dict[str, Any]) -> dict[str, Any]:
    return {camel(name): item for name, item in document.items()}


def test_errors_have_the_same_names_and_exit_codes(node):
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HybridError)]
    assert agree(node, "errors", [None], lambda _: {one.__name__: one.exit_code for one in classes}) == {"value": 1}
    assert len(classes) == 12


def test_stable_json(node):
    random = draw("stable_json")
    cases = [value(random) for _ in range(1500)]
    cases += [{"a": {"__proto__": number(random)}}]
    counts = agree(node, "stable_json", cases, lambda case: [stable_json(case), stable_hash(case)])
    assert counts == {"value": 1500, "ConfigError": 1}


def test_the_one_text_of_a_document(node):
    random = draw("canonical")
    cases = [value(random, 4, random.choice(("abc", "0123", "Aa1é😀"))) for _ in range(400)]
    assert agree(node, "canonical", cases, lambda case: canonical.render(case).decode()) == {"value": 400}


def test_values_in_messages(node):
    random = draw("repr")
    cases = []
    for _ in range(600):
        nested = [junk(random), {"k": junk(random)}]
        item = random.choice((junk(random), plain_number(random), text(random, 12), nested))
        cases.append({"value": item, "longest": random.randrange(1, 12)})
    assert agree(
        node,
        "repr",
        cases,
        lambda case: [repr(case["value"]), repr(case["value"])[: case["longest"]], type(case["value"]).__name__],
    ) == {"value": 600}


def test_the_nearest_name(node):
    random = draw("unknown_name")
    known = [*DEFAULTS, "cosine", "cosine_to_min", "constant", "step_decay", "wsd", "weightDecay", "warmupSteps"]
    cases = []
    for _ in range(800):
        name = random.choice(known)
        for _ in range(random.randrange(6)):
            at = random.randrange(len(name) + 1)
            name = name[:at] + random.choice(("", "e", "S", "_", "x")) + name[at + random.randrange(2) :]
        cases.append({"name": name, "known": random.sample(known, random.randrange(1, 8))})
    assert agree(node, "unknown_name", cases, lambda case: names.unknown_name("thing", **case)) == {"value": 800}


def test_numbers_texts_and_dates(node):
    random = draw("values")
    cases = []
    for _ in range(800):
        cases.append(random.choice((scalar(random), f" {random.choice(TEXTS)}\n", str(number(random))[:30])))
    for _ in range(400):
        day = f"{random.randrange(10000):04}-{random.randrange(1, 14):02}-{random.randrange(1, 33):02}"
        clock = f"T{random.randrange(26):02}:{random.randrange(62):02}:{random.randrange(61):02}"
        clock += random.choice(("", f".{random.randrange(999)}", ".1234567890"))
        zone = random.choice(("", "Z", "+05:45", "-11:00", "z", "+5"))
        cases.append(random.choice((day, day + clock + zone, day[:4], day[:7] + clock)))

    def python(case):
        number = to_number(case)
        return [None if number != number else number, optional_text(case), parse_time(case)]

    assert agree(node, "values", cases, python) == {"value": 1200}


def test_the_loss_scaler(node):
    random = draw("loss_scaler")
    numbers = [name for name, default in DEFAULTS.items() if not isinstance(default, bool)]
    cases = []
    for _ in range(400):
        config = settings(random, numbers, lambda _: random.choice((None, 0.25, 0.5, 1, 2, 3, 7.5, 64, 1e6)), 0.4)
        config["enabled"] = random.choice((True, True, True, False, None, 1, "", "yes"))
        if random.random() < 0.15:
            config[random.choice((*numbers, "scale", "minscale", "growthinterval"))] = junk(random)
        restored = {"scale": random.choice((8, 2.5)), "growthCounter": random.randrange(3)}
        if random.random() < 0.3:
            restored[random.choice(("scale", "growthCounter"))] = junk(random)
        cases.append(
            {
                "config": config,
                "restored": random.choice((None, restored)),
                "overflow": [random.random() < 0.3 for _ in range(random.randrange(40))],
            }
        )

    def python(case):
        scaler = DynamicLossScaler(case["config"])
        if case["restored"]:
            scaler.restore(case["restored"])
        trace = []
        for overflow in case["overflow"]:
            used = scaler.step_scale()
            scaler.update(overflow)
            trace.append([used, scaler.state()])
        return [scaler.powers_of_two(), trace]

    assert set(agree(node, "loss_scaler", cases, python)) == {"value", "ConfigError", "CheckpointCorrupt"}


def test_the_validator_of_entries(node):
    random = draw("entry_error")
    originals = [case["entry"] for case in load("metrics_entries")["cases"] if isinstance(case["entry"], dict)]
    fields = sorted({name for entry in originals for name in entry})
    special = ("epoch", "stage_a", "stage_b", "stage1_joint", "stage2_base", "kd", "triplet", "cross_entropy")
    cases: list[Any] = [junk(random) for _ in range(20)]
    for _ in range(3000):
        entry = copy.deepcopy(random.choice(originals))
        for _ in range(random.randrange(3)):
            name = random.choice(fields)
            if random.random() < 0.2:
                entry.pop(name, None)
            else:
                entry[name] = random.choice((junk(random), number(random), random.choice(special), 101, INFINITE))
        cases.append(entry)

    def python(entry):
        return [entry_error(entry, generation) for generation in GENERATIONS]

    assert agree(node, "entry_error", finite(cases), python) == {"value": 3020}
    verdicts = {message for entry in cases for message in python(entry)}
    assert len(verdicts) > 100 and None in verdicts


def finite(item: Any) -> Any:
    """Infinities of the vectors as the integer that stands for them."""
    if isinstance(item, dict):
        return {name: finite(inner) for name, inner in item.items()}
    if isinstance(item, list):
        return [finite(inner) for inner in item]
    return INFINITE if item == float("inf") else item


def random_settings(random):
    return {
        "mode": random.choice(("step", "window", "epoch", "other", None)),
        "windowSize": random.choice((1, 2, 3, 7, "4", 2.9, 0, -1, None, "x")),
        "emitNaNInfCounters": random.choice((True, False, None)),
        "alerts": random.choice(
            (
                None,
                {
                    "enabled": random.choice((True, True, False, 1)),
                    "failOnAlert": random.choice((True, None)),
                    "thresholds": settings(random, [rule[0] for rule in telemetry.RULES], scalar),
                },
            )
        ),
    }


def test_telemetry(node):
    random = draw("telemetry")
    cases = []
    for _ in range(300):
        state = {"loss": [1, 2.5], "stepTimeMs": [3, 4, 5, 6], "observed": 4, "epoch": 1}
        if random.random() < 0.2:
            state[random.choice(list(state))] = random.choice((None, "x", True, [True], ["1"], 1.5, {"a": 1}))
        cases.append(
            {
                "settings": random_settings(random),
                "entries": [settings(random, [rule[1] for rule in telemetry.RULES], scalar) for _ in range(5)],
                "steps": [
                    [random.choice((None, random.uniform(0, 9))), random.uniform(1, 50), random.randrange(1, 3)]
                    for _ in range(12)
                ],
                "restored": random.choice((None, state)),
            }
        )

    def python(case):
        resolved = telemetry.TelemetrySettings.resolve(case["settings"])
        watch = telemetry.Telemetry(resolved)
        if case["restored"]:
            watch.restore(case["restored"])
        raised = [telemetry.alerts(resolved, entry) for entry in case["entries"]]
        seen = [watch.observe(*one) for one in case["steps"]]
        return [resolved.to_dict(), raised, seen, watch.state()]

    assert set(agree(node, "telemetry", cases, python)) == {"value", "CheckpointCorrupt"}


def snapshots(context, points):
    return [
        progress.snapshot(
            context,
            number,
            elapsed_ms=times["elapsedMs"],
            executed=times["executed"],
            process_ms=times["processMs"],
            now_ms=times["nowMs"],
        )
        for number, times in points
    ]


def random_times(random):
    return {
        "elapsedMs": random.uniform(-10, 1e6),
        "executed": random.randrange(20),
        "processMs": random.uniform(-10, 1e5),
        "nowMs": random.choice((0, 1_767_225_600_000, random.uniform(0, 2e12), 2.5e14)),
    }


def test_progress(node):
    random = draw("progress")

    def count(random):
        return random.choice((None, 1, 2, 3, 4, 10, 1000, 2.5, 0, "3", True))

    cases = [
        {
            "options": settings(random, ("maxSteps", "distillShardIndex", "distillShardCount"), count),
            "distill": random.choice((None, settings(random, ("shardIndex", "shardCount"), count))),
            "points": [[random.randrange(1, 12), random_times(random)] for _ in range(4)],
        }
        for _ in range(500)
    ]

    def python(case):
        context = progress.ProgressContext.resolve(case["options"], case["distill"])
        return [state.metrics() for state in snapshots(context, case["points"])]

    assert set(agree(node, "progress", cases, python)) == {"value", "ConfigError"}


def test_entries_that_are_made(node):
    random = draw("build_entry")
    cases = []
    for _ in range(150):
        steps = []
        for position in range(1, 5):
            overflow = random.random() < 0.3
            facts = asdict(
                step(
                    step=position,
                    total_loss=random.choice((random.uniform(0, 9), None)),
                    step_time_ms=random.uniform(1, 99),
                    grad_norm=random.choice((random.uniform(0, 9), None)),
                    clip_factor=random.choice((1, random.random())),
                    overflow=overflow,
                    epoch=position // 3,
                    nan_count=random.randrange(3),
                    forward_ms=random.choice((None, 1.5)),
                    nll=random.choice((None, 2.25)),
                    memory_stats=random.choice((None, {"a": 1})),
                    target_tokens=random.choice((250, 250, 250, 0)),
                )
            )
            extra = random.choice(("z_loss", "loss_kd", "lambda", "lr", "telemetry_alerts", "step"))
            facts["objective_metrics"] = random.choice(({}, {}, {"z_loss": 0.5}, {extra: 1.5}))
            steps.append(facts)
        cases.append(
            {
                "run": camel_keys(asdict(RUN)),
                "steps": [camel_keys(facts) for facts in steps],
                "settings": random_settings(random),
                "context": {"maxSteps": random.choice((None, 4, 10))},
                "times": random_times(random),
            }
        )
    facts_of = {camel(name): name for name in StepFacts.__dataclass_fields__}
    run_of = {camel(name): name for name in RunFacts.__dataclass_fields__}

    def python(case):
        watch = telemetry.Telemetry(telemetry.TelemetrySettings.resolve(case["settings"]))
        context = progress.ProgressContext.resolve(case["context"])
        run = RunFacts(**{run_of[name]: item for name, item in case["run"].items()})
        entries = []
        for facts in case["steps"]:
            (state,) = snapshots(context, [(facts["step"], case["times"])])
            entries.append(build_entry(run, StepFacts(**{facts_of[k]: v for k, v in facts.items()}), state, watch))
        return entries

    assert set(agree(node, "build_entry", cases, python)) == {"value", "ContractMismatch"}


def test_seed_provenance_environment_and_memory(node):
    random = draw("facts")
    variables = [*provenance.COMMIT_VARIABLES, *provenance.ID_VARIABLES, *provenance.TIMESTAMP_VARIABLES]
    build = ("commitHash", "buildId", "buildTimestamp", "buildCommitHash")
    heap = ("usedJSHeapSize", "totalJSHeapSize", "jsHeapSizeLimit")

    def fact(random):
        return random.choice((scalar(random), junk(random), random.choice(TEXTS)))

    def seed_of(random):
        return random.choice((None, "", "x", "7", 3, 2.5, -1.5, 0, True, "0x10", " 5 ", 2**53 - 1))

    def optional(item):
        return random.choice((None, item))

    def adapter(random):
        return settings(random, (*environment.ADAPTER_FIELDS, "adapterName", "serial"), fact, 0.3)

    cases = []
    for _ in range(500):
        options = settings(random, (*build, "command", "surface"), fact)
        options |= {"buildProvenance": optional(settings(random, build, fact)), "seed": seed_of(random)}
        training = settings(random, ("seed",), seed_of)
        training |= {name: optional(settings(random, ("seed",), seed_of)) for name in ("distill", "ul")}
        info = adapter(random) | {"adapter": optional(adapter(random)), "gpu": random.choice((adapter(random), 5))}
        navigator = settings(random, ("userAgent", "hardwareConcurrency"), fact)
        process = settings(random, ("platform", "arch"), lambda r: r.choice(("linux", "x64")))
        process["versions"] = random.choice(({"node": "20.1.0"}, {"node": ""}, {}, None))
        cases.append(
            {
                "options": options,
                "training": training,
                "variables": settings(random, variables, lambda r: r.choice(TEXTS), 0.2),
                "info": random.choice((info, info, None, "text", {})),
                "process": optional(process),
                "navigator": optional(navigator),
                "memory": optional(settings(random, heap, fact)),
            }
        )

    def python(case):
        asked = {**case["options"], "gpuAdapterInfo": case["info"]}
        return [
            seed.resolve_seed(case["options"], case["training"]),
            provenance.build_provenance(case["options"], case["variables"]),
            environment.gpu_adapter(case["info"]),
            environment.javascript_environment(asked, case["process"], case["navigator"]),
            memory.heap_stats(case["memory"]),
        ]

    assert agree(node, "facts", cases, python) == {"value": 500}


def test_identity_hashes(node):
    random = draw("identity")
    singles = ("modelId", "modelUrl", "distillDatasetId", "tokenizerHash", "runtimePreset", "kernelPathId")
    singles += ("trainingStage", "distillShardIndex", "optimizerStepCount", "strictPairContract", "forceResumeSource")
    lists = ("distillSourceLangs", "distillTargetLangs", "distillPairAllowlist")

    def languages(random):
        tags = ["tr", "TR", "en-US", "en_US", "en", "é", "ß", "z1", "z10", "Z", " de ", "", 5, None, "a-b", "a.b", "ab"]
        return random.choice((None, "tr", random.sample(tags, random.randrange(8))))

    def section(random):
        return random.choice((None, {}, {"stage": junk(random)}))

    cases = [
        {
            "options": settings(random, singles, junk)
            | settings(random, lists, languages)
            | settings(random, ("command", "surface"), lambda r: r.choice(("", " ", "bench", "node", None))),
            "training": settings(random, ("optimizer", "distill", "ul"), section),
        }
        for _ in range(300)
    ]

    def python(case):
        found = identity.checkpoint_identity(case["options"], case["training"])
        return [found, identity.compared_fields(found), identity.force_resume_source(case["options"])]

    assert agree(node, "identity", cases, python) == {"value": 300}


def test_fingerprints(node):
    random = draw("fingerprint")
    long = "long " * 20 + "😀"

    def changed(document):
        if not isinstance(document, dict):
            return random.choice((document, document, junk(random), long))
        kept = {name: changed(item) for name, item in document.items() if random.random() < 0.9}
        return kept | settings(random, "xy", junk, 0.1)

    cases = []
    for _ in range(500):
        members = ("dataset", "tokenizer", "contract")
        saved = {name: {k: value(random, 3, "abc") for k in "abc"[: random.randrange(4)]} for name in members}
        current = changed(saved)
        found = [field for field, _, _ in fingerprint.differences(saved, current)]
        accepted = [path.rsplit(".", random.randrange(3))[0] for path in found if random.random() < 0.7]
        cases.append({"saved": saved, "current": current, "accepted": accepted + ["b.c"] * (random.random() < 0.1)})

    def python(case):
        found = fingerprint.differences(case["saved"], case["current"])
        return [
            found,
            fingerprint.format_table(found),
            fingerprint.identity_hashes(case["saved"]),
            fingerprint.require_agreement(case["saved"], case["current"], case["accepted"]),
        ]

    assert set(agree(node, "fingerprint", cases, python)) == {"value", "ConfigError", "ContractMismatch"}


def test_checkpoint_records(node):
    random = draw("record")
    originals = [case["record"] for case in load("checkpoint_record")["cases"]]
    cases = []
    for _ in range(200):
        document = copy.deepcopy(random.choice(originals))
        params = document["trainingState"]["params"]
        if random.random() < 0.6:
            broken = {
                "dtype": random.choice(("f16", "f64", None, 5)),
                "shape": random.choice(([1, 2], [-1], [2.5], ["3"], 3, [True], [10**9])),
                "dataBase64": random.choice(("", "AAAA", "AAA=", "A", "====", "AA*A", None, "AAAA\n")),
            }
            tensor = params[random.choice(list(params))]
            tensor |= {name: broken[name] for name in random.sample(list(broken), 1)}
        if random.random() < 0.2:
            params["x"] = junk(random)
        if random.random() < 0.2:
            document["trainingState"]["optimizerSlots"] = random.choice((None, {}, {"k": 5}, {"k": {"m": 1}}))
        if random.random() < 0.1:
            document[random.choice(("metadata", "trainingState"))] = junk(random)
        names = ("configHash", "datasetHash", "tokenizerHash", "runtimePresetId", "runtimeProfileId", "kernelPathId")
        cases.append({"record": document, "expected": settings(random, names, lambda r: r.choice((None, "x")), 0.1)})

    def python(case):
        tensors = [
            [one.key, one.role, one.dtype, list(one.shape), base64.b64encode(one.data).decode()]
            for one in record.tensors(case["record"])
        ]
        record.require_expected(case["record"], case["expected"])
        return [record.checkpoint_hash(case["record"]), tensors]

    assert set(agree(node, "record", cases, python)) == {"value", "CheckpointCorrupt", "ContractMismatch"}


def test_strict_json(node):
    random = draw("strict_json")
    tokens = ('"a":1,', '"\\u0061":2,', "NaN", "-0", "1.0", "01", "1e999", '"\\ud800":1,', '"\\ud83d\\ude00"')
    tokens += (",", "}", "{", "]", "[")
    tokens += ("\ufeff", "\x01", "\\", '"', " ", "9" * 22, "-Infinity", "tru", "null", "\\u12", "1e5", "2.5E-3", "//")
    cases = []
    for _ in range(1500):
        document = value(random, 3, random.choice((None, "ab")))
        data = json.dumps(document, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
        if random.random() < 0.2:
            data = data.replace(b'{"', random.choice((b'{"a":1,"', b'{"\\u0061":{},"')), 1)
        for _ in range(random.randrange(3)):
            at = random.randrange(len(data) + 1)
            data = data[:at] + random.choice(tokens).encode() + data[at + random.randrange(3) :]
        if random.random() < 0.1:
            at = random.randrange(len(data) + 1)
            data = data[:at] + random.randbytes(1) + data[at:]
        cases.append(base64.b64encode(data).decode())

    def python(case):
        try:
            return {"value": strict_json.parse(base64.b64decode(case), doubles=True)}
        except strict_json.StrictJsonError as error:
            return {"refused": [error.kind, error.key]}

    assert agree(node, "strict_json", cases, python) == {"value": 1500}
    kinds = {next(iter(python(case).get("refused", ["read"]))) for case in cases}
    assert kinds == {"read", "utf8", "syntax", "duplicate"}
