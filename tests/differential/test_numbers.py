"""Randomness, schedules and the optimizer's table are the same numbers in both languages, to the last bit."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from differential.both import agree, draw
from differential.inputs import settings, text
from hybrid.backends.reference.kernels import dropout
from hybrid.optim.schedules import SHAPES, TYPES, learning_rate
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows
from hybrid.random import initial, philox, shuffle, shuffle_numpy, streams

pytestmark = pytest.mark.node

SEEDS = (0, 1, 1337, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -1, -(2**63))


def word(random):
    return random.choice((0, 1, 2**31, 2**32 - 1, random.getrandbits(32)))


def seed(random):
    """As text: a number of JSON would lose the last digits of 2^53 + 1."""
    return str(random.choice((*SEEDS, random.getrandbits(64), -random.getrandbits(63))))


def test_philox_blocks(node):
    random = draw("philox")
    cases = [{"counter": [word(random) for _ in range(4)], "key": [word(random), word(random)]} for _ in range(1500)]
    assert agree(node, "philox", cases, lambda case: philox.philox4x32(tuple(case["counter"]), tuple(case["key"]))) == {
        "value": 1500
    }


def test_stream_keys(node):
    random = draw("stream_key")
    cases = [{"seed": seed(random), "name": text(random, 30, lone=False)} for _ in range(600)]
    assert agree(node, "stream_key", cases, lambda case: streams.stream_key(int(case["seed"]), case["name"])) == {
        "value": 600
    }


def test_initial_weights(node):
    random = draw("initial")
    deviations = (0.02, 1.0, 0.0, 1e-5, 0.02 / 8**0.5)
    cases = [
        {
            "seed": seed(random),
            "name": f"model.layers.{random.randrange(99)}.mlp.up_proj.weight",
            "count": random.randrange(40),
            "std": random.choice((*deviations, random.random())),
        }
        for _ in range(300)
    ]

    def python(case):
        values = initial.normal(int(case["seed"]), case["name"], case["count"], case["std"])
        return base64.b64encode(values.tobytes()).decode()

    assert agree(node, "initial", cases, python) == {"value": 300}


def size(random):
    return random.choice(
        (1, 2, 3, 4, 5, random.randrange(1, 300), 2 ** random.randrange(49), random.randrange(1, 2**48))
    )


def test_permutations(node):
    random = draw("permute")
    cases = []
    for _ in range(600):
        n = size(random)
        indices = [random.choice((0, n - 1, random.randrange(n))) for _ in range(5)]
        if random.random() < 0.05:
            n, indices = random.choice(((n, [n]), (n, [-1]), (0, [0]), (2**48 + 1, [0])))
        cases.append({"n": n, "key": [word(random), word(random)], "indices": indices})
    kinds = agree(
        node,
        "permute",
        cases,
        lambda case: [shuffle.permute(index, case["n"], tuple(case["key"])) for index in case["indices"]],
    )
    assert set(kinds) == {"value", "DataContractError", "LimitExceeded"}


def test_the_order_of_samples(node):
    random = draw("samples")
    cases = [
        {
            "seed": seed(random),
            "first": random.randrange(500),
            "count": random.randrange(60),
            "n": random.randrange(1, 90),
        }
        for _ in range(100)
    ]
    assert agree(
        node,
        "samples",
        cases,
        lambda case: shuffle_numpy.samples(int(case["seed"]), case["first"], case["count"], case["n"]).tolist(),
    ) == {"value": 100}


def test_dropout_masks(node):
    random = draw("dropout")
    cases = [
        {
            "seed": seed(random),
            "site": f"layers.{random.randrange(9)}.attention",
            "step": word(random),
            "sample": word(random),
            "rate": random.choice((0.0, 0.1, 0.5, random.random())),
            "count": random.randrange(1, 60),
        }
        for _ in range(150)
    ]

    def python(case):
        keys = np.array([streams.stream_key(int(case["seed"]), f"dropout/{case['site']}")], np.uint32)
        ones = np.ones((1, 1, case["count"]), np.float32)
        sample, step = (np.array([case[name]], np.uint32) for name in ("sample", "step"))
        return (dropout(ones, sample, step, keys, site=0, rate=case["rate"]).ravel() > 0).astype(int).tolist()

    assert agree(node, "dropout", cases, python) == {"value": 150}


def scheduler(random):
    def optional(*choices):
        return random.choice((None, *choices))

    given = {
        "enabled": optional(True, True, True, False),
        "type": random.choice(TYPES),
        "warmupSteps": optional(0, 1, 5, 7.5, random.randrange(50)),
        "stepSize": optional(1, 3, 10),
        "gamma": optional(0.95, 1, random.random()),
        "totalSteps": optional(1, 10, 77, random.randrange(1, 5000)),
        "minLr": optional(0, 1e-5, random.random() * 1e-3),
        "decayShare": optional(0, 0.29, 1, random.random()),
        "decayShape": optional(*SHAPES),
    }
    return {name: item for name, item in given.items() if random.random() < 0.8}


def test_learning_rates(node):
    random = draw("learning_rate")
    cases = []
    for _ in range(500):
        steps = [random.choice((random.randrange(1, 100), random.randrange(1, 10**6))) for _ in range(8)]
        optimizer = {"lr": random.choice((None, 3e-4, random.random())), "scheduler": scheduler(random)}
        if random.random() < 0.1:
            steps.append(0)
        if random.random() < 0.1:
            optimizer["scheduler"][random.choice(("type", "decayShape"))] = random.choice(("cosin", "lineer", "zz"))
        cases.append({"optimizer": optimizer, "steps": steps})
    kinds = agree(
        node,
        "learning_rate",
        cases,
        lambda case: [learning_rate(case["optimizer"], t) for t in case["steps"]],
    )
    assert set(kinds) == {"value", "ConfigError"}


def test_settings_and_the_optimizer_table(node):
    random = draw("optimizer_table")
    names = ("type", "lr", "beta1", "beta2", "eps", "weightDecay")
    cases = []
    for _ in range(500):
        optimizer = {
            "type": random.choice(("adam", "adamw", None)),
            "lr": random.choice((None, 1e-3, 0.25)),
            "beta1": random.choice((None, 0.9, 0, random.random())),
            "beta2": random.choice((None, 0.95, random.random())),
            "weightDecay": random.choice((None, 0.1)),
            "scheduler": random.choice((None, scheduler(random))),
        }
        if random.random() < 0.4:
            wrong = settings(random, names, lambda r: r.choice((-1, 2, 0.5, 0, -0.25)), 0.3)
            optimizer |= wrong | {"type": random.choice(("adam", "adamW", "sgd"))}
        if random.random() < 0.1:
            optimizer[random.choice(("weightdecay", "learning_rate", "betas"))] = 1
        if random.random() < 0.2:
            target = optimizer["scheduler"] or {}
            target[random.choice(("gamma", "minLr", "decayShare", "stepSize", "totalSteps", "warmup"))] = -0.5
            optimizer["scheduler"] = target
        cases.append({"optimizer": optimizer, "first": random.choice((1, 2, 100, 99_999, 0)), "count": 4})

    def python(case):
        checked = OptimizerSettings.from_dict(case["optimizer"])
        return [checked.to_dict(), rows(checked, case["first"], case["count"])]

    assert set(agree(node, "optimizer_table", cases, python)) == {"value", "ConfigError"}
