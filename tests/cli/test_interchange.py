"""`checkpoint import` and `export`: a model of transformers becomes a run that trains here, and goes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybrid.cli.main import main

pytestmark = pytest.mark.torch

TINY = [
    *("--set", "data.sequenceLength=8", "--set", "data.batchSize=2", "--set", "run.steps=3"),
    *("--set", "checkpoint.every=0", "--set", "evaluation.every=0"),
]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "words.txt"
    path.write_text("the sea and the sand and the ship\n\n" * 40)
    return path


def save_gpt2(folder: Path, vocabulary: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    model.save_pretrained(folder)
    return model


def save_bpe(folder: Path, text: str) -> int:
    """A byte-level BPE tokenizer, trained on the text; the number of its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def test_a_model_from_there_trains_here_and_goes_back(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "there"
    source.mkdir()
    model = save_gpt2(source, save_bpe(source, text.read_text()))
    assert main(["checkpoint", "import", "there", "--set", f"data.source={text}", *TINY, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["runDir"] == str(Path("runs/there"))
    record = json.loads(Path("runs/there/run.json").read_text())
    assert (record["status"], record["step"], record["importedFrom"]) == ("stopped", 0, "there")

    # It is a checkpoint like any other, and goes back as it came.
    assert main(["checkpoint", "verify", "runs/there"]) == 0
    assert main(["checkpoint", "export", "runs/there", "back", "--format", "hf"]) == 0
    back = AutoModelForCausalLM.from_pretrained("back")
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    words = "the ship and the sea"
    assert AutoTokenizer.from_pretrained("back").decode(AutoTokenizer.from_pretrained("back")(words).input_ids) == words

    # `train` goes on from it, with the data and the settings that it was imported with, and without the folder.
    shutil.rmtree(source)
    assert main(["train", "--run-dir", "runs/there", "--backend", "reference", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    (begun,) = (event for event in events if event["event"] == "run")
    assert (begun["step"], begun["steps"]) == (0, 3)
    assert begun["resumedFrom"]["step"] == 0
    assert json.loads(Path("runs/there/run.json").read_text())["status"] == "finished"
    assert main(["checkpoint", "export", "runs/there", "trained"]) == 0
    trained = AutoModelForCausalLM.from_pretrained("trained").state_dict()
    assert not torch.equal(trained["transformer.wte.weight"], model.state_dict()["transformer.wte.weight"])


def test_an_import_says_what_does_not_fit(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "there"
    save_gpt2(source, 300)
    arguments = ["checkpoint", "import", "there", "--set", f"data.source={text}"]
    assert main([*arguments, "--set", "data.sequenceLength=64"]) == 2
    assert "--set data.sequenceLength=16 makes samples that fit" in capsys.readouterr().err
    interrupted = Path("runs/there/checkpoints/.tmp-step-00000000-1-2-3")  # of an import that was killed
    interrupted.mkdir(parents=True)
    assert main([*arguments, *TINY]) == 0 and not interrupted.exists()
    assert "there has no tokenizer.json: this run's text becomes 256 ids (bytes), of the 300" in capsys.readouterr().err
    assert main([*arguments, *TINY]) == 2
    assert "already holds checkpoints: choose another --run-dir" in capsys.readouterr().err
    assert main(["checkpoint", "import", "nowhere"]) == 1
    assert "nowhere: there is no such folder" in capsys.readouterr().err
