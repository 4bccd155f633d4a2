"""Which files of golden vectors are run, where, and how many cases they hold. A file that nobody runs is named here."""

from __future__ import annotations

from contracts.vectors import FOLDER, load

RUN = {
    "philox": (35, "tests/random/test_philox.py"),
    "random": (164, "tests/random/test_golden.py"),
    "stable_json": (151, "tests/contracts/test_stable_json.py"),
    "loss_scaling": (20, "tests/contracts/test_loss_scaler.py"),
    "metrics_entries": (157, "tests/contracts/test_metrics.py"),
    "provenance_environment": (71, "tests/contracts/test_runner_contracts.py"),
    "checkpoint_record": (16, "tests/contracts/test_record.py"),
    "ngram": (32, "tests/ops/test_ngram_golden.py"),
    "lr_schedule": (20, "tests/optim/test_schedules.py"),
    "optimizer_table": (8, "tests/optim/test_table_golden.py"),
    "kd": (23, "tests/ops/test_objective_vectors.py"),
    "triplet": (17, "tests/ops/test_objective_vectors.py"),
    "ul_noise": (29, "tests/random/test_latent_noise.py"),
    "safetensors_bad": (None, "tests/checkpoint"),
}

# Vectors of artifacts, which do not exist yet.
NOT_RUN_YET = {"manifests"}


def cases(name):
    document = load(name)
    return sum(len(section) for section in document.values() if isinstance(section, list))


def test_every_file_of_vectors_is_run_or_named_as_not_run():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RUN) | NOT_RUN_YET


def test_no_file_has_lost_or_gained_cases():
    assert {name: cases(name) for name, (count, _) in RUN.items() if count} == {
        name: count for name, (count, _) in RUN.items() if count
    }


def test_each_named_test_exists():
    root = FOLDER.parents[1]
    for count, place in RUN.values():
        if count:
            assert (root / place).is_file()
