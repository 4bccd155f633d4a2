"""`hybrid eval`: the validation loss of a saved model."""

from __future__ import annotations

import argparse
import json
from math import log

from hybrid.cli.parser import Subparsers, add_backend_options, add_command, add_set_option, flags, path
from hybrid.cli.progress import ProgressLine


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "eval", "the validation loss of a saved model")
    parser.add_argument(
        "path", metavar="RUN|CHECKPOINT", type=path,
        help="a run folder (its newest checkpoint), a checkpoint folder, or a file *.hybrid",
    )  # fmt: skip
    parser.add_argument(
        "--batches", metavar="N", type=int, default=0, help="batches, spread over the split; 0: all of it (default)"
    )
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="which part of the data")
    add_set_option(parser)
    add_backend_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from hybrid.data.prepare import prepare
    from hybrid.errors import ConfigError, StopRequested
    from hybrid.training.evaluation import evaluate
    from hybrid.training.saved import SavedModel
    from hybrid.training.signals import StopFlag

    if arguments.batches < 0:
        raise ConfigError(f"--batches {arguments.batches}: expected at least 0")
    given = flags(arguments, backend="backend.name", adapter="backend.adapter")
    model = SavedModel.open(arguments.path, tuple(arguments.assignments), given)
    with StopFlag().installed() as stop, ProgressLine() as progress:
        data = prepare(model.config.data, progress=progress, should_stop=lambda: stop.requested)
        samples = data.train if arguments.split == "train" else data.validation
        if samples is None:
            raise ConfigError(
                "data.split.validationShare is 0: nothing is held out; --split train, or hold out a share"
            )
        if data.tokenizer.hash != model.tokenizer().hash:
            raise ConfigError(
                "the data was made with another tokenizer than the model, so its ids mean other text; give data.source "
                "and data.tokenizer as the run had them"
            )
        saved = model.checkpoint.manifest.fingerprints.dataset.get("fingerprint")
        if saved is not None and saved != data.fingerprint:
            progress.note("the data is not what the run was trained on (another fingerprint)")
        session = model.session(progress.note, progress)
        try:
            batch = model.config.data.microbatch_size or model.config.data.batch_size
            result = evaluate(session, samples, batch, arguments.batches, stop, progress)
        finally:
            session.close()
    if result is None:
        raise StopRequested(f"stopped ({stop.reason}) before the evaluation was done")
    step = model.checkpoint.manifest.progress.step
    report = {
        "checkpoint": str(model.checkpoint.path), "step": step, "split": arguments.split, **result,
        "bitsPerToken": result["loss"] / log(2),
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(report))
    else:
        print(
            f"step {step}, {arguments.split}: loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
            f"{report['bitsPerToken']:.4f} bits a token, over {result['targetTokens']:,} tokens"
            + ("; not the loss of the model, for a value overflowed" if result.get("overflow") else "")
        )
    return 0
