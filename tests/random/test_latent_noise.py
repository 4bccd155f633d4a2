"""The noise of the latent objectives is that of the golden vectors, in Python, in NumPy and as `ops.add_noise` adds it.
The schedule, which gives lambda, belongs to the objectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contracts.vectors import load
from hybrid.backends.reference.kernels import add_noise
from hybrid.random.latent_noise import levels, noise_seed, normal
from hybrid.random.latent_noise_numpy import normals

CASES = load("ul_noise")["cases"]
FULL = [case for case in CASES if case["kind"] == "full"]
SAMPLED = [case for case in CASES if case["kind"] == "sampled"]


def within_one_ulp(got: Any, expected: Any) -> bool:
    wanted = np.array(expected, np.float32)
    return bool((np.abs(np.float32(got) - wanted) <= np.spacing(np.abs(wanted))).all())


@pytest.mark.parametrize("case", FULL, ids=lambda case: f"{case['seed']}-{case['step']}-{case['shape']}")
def test_noise_and_noisy_latents_are_golden(case: dict[str, Any]) -> None:
    seed, clean = noise_seed(case["seed"], case["step"]), np.array(case["clean"])
    noise = normals(seed, clean.size)
    assert within_one_ulp(noise, case["noise"])
    assert within_one_ulp([normal(seed, i) for i in range(min(clean.size, 40))], case["noise"][:40])
    signal, sigma = levels(case["lambda"])
    np.testing.assert_allclose([signal, sigma], [case["alpha"], case["sigma"]], rtol=1e-12)
    assert within_one_ulp(add_noise(clean, noise, np.array([signal, sigma])), case["noisy"])
    # In float32, as a device computes it.
    got = add_noise(np.float32(clean), np.float32(noise), np.float32([signal, sigma]))
    np.testing.assert_allclose(got, case["noisy"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: str(case["step"]))
def test_far_elements_round_their_product_as_javascript_does(case: dict[str, Any]) -> None:
    seed = noise_seed(case["seed"], case["step"])
    assert seed == case["noise_seed"]
    assert 2 * max(case["indices"]) * 0x9E3779B9 > 2**53
    assert within_one_ulp([normal(seed, index) for index in case["indices"]], case["noise"])
    assert within_one_ulp([normals(seed, 1, index)[0] for index in case["indices"]], case["noise"])


def test_a_part_of_a_batch_has_its_part_of_the_noise() -> None:
    np.testing.assert_array_equal(normals(7, 30)[12:], normals(7, 18, first=12))


def test_it_is_nearly_standard_normal() -> None:
    """Nearly: one round of xorshift per number leaves a mean of a few hundredths, which parity makes us keep."""
    noise = normals(noise_seed(1337, 3), 200_000)
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03


def test_all_cases_are_there() -> None:
    assert (len(FULL), len(SAMPLED)) == (27, 2)
