"""A plan written to a folder comes back as it was, and a damaged folder is refused."""

import pytest

from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.folder import read_plan, write_plan

MODEL = ModelConfig(vocabulary_size=40, context_length=16, layers=1, width=32, heads=4, feed_forward_width=48)


@pytest.fixture
def written(tmp_path):
    plan = compile_plan(PlanSettings(MODEL, 2, 16))
    write_plan(plan, tmp_path / "plan")
    return plan, tmp_path / "plan"


def test_a_plan_comes_back_as_it_was(written):
    plan, folder = written
    assert read_plan(folder) == plan
    assert {file.name for file in folder.iterdir()} == {"plan.json", *(f"{sha}.bin" for sha in plan.constant_data)}


def test_a_missing_document_a_missing_constant_and_a_changed_one_are_refused(written):
    plan, folder = written
    constant = folder / f"{next(iter(plan.constant_data))}.bin"
    constant.write_bytes(constant.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ConfigError, match="constant"):
        read_plan(folder)
    constant.unlink()
    with pytest.raises(ConfigError, match="constant"):
        read_plan(folder)
    (folder / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        read_plan(folder)
    (folder / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        read_plan(folder)
