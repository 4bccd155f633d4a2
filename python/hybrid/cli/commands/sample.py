"""`hybrid sample`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import json
import sys

from hybrid.cli.parser import Subparsers, add_backend_options, add_command, flags, path
from hybrid.cli.progress import ProgressLine
from hybrid.training.view import printable


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "sample", "continue a text with a trained model")
    parser.add_argument(
        "path", metavar="RUN|CHECKPOINT", type=path,
        help="a run folder (its newest checkpoint), a checkpoint folder, or a file *.hybrid",
    )  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue (default: the run's sampling.prompt)")
    parser.add_argument("--tokens", metavar="N", type=int, help="tokens to generate")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 always takes the most likely token")
    parser.add_argument("--top-k", metavar="K", type=int, help="sample among the K most likely tokens; 0: all")
    parser.add_argument(
        "--top-p", metavar="P", type=float, help="sample among the tokens that together reach probability P"
    )
    parser.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same text")
    add_backend_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from hybrid.backends.protocol import GenerateOptions
    from hybrid.training.evaluation import prompt_ids
    from hybrid.training.saved import SavedModel

    given = flags(
        arguments, backend="backend.name", adapter="backend.adapter", prompt="sampling.prompt",
        tokens="sampling.tokens", temperature="sampling.temperature", top_k="sampling.topK", top_p="sampling.topP",
        seed="sampling.seed",
    )  # fmt: skip
    # The session is for one text at a time; it need not hold a training batch.
    model = SavedModel.open(arguments.path, flags={**given, "data.batchSize": 1, "data.microbatchSize": 1})
    settings, tokenizer = model.config.sampling, model.tokenizer()
    end = tokenizer.end_of_text
    options = GenerateOptions(
        settings.tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.seed,
        () if end is None else (end,),
    )
    prompt = prompt_ids(tokenizer, settings.prompt)
    with ProgressLine() as progress:
        session = model.session(progress.note, progress)
    stream = tokenizer.stream()
    pieces: list[str] = []
    count = 0
    try:
        _show(settings.prompt, arguments.json)
        for token in session.generate(prompt, options):
            count += 1
            if token != end:
                pieces.append(stream.push(token))
                _show(pieces[-1], arguments.json)
    finally:
        session.close()
    pieces.append(stream.finish())
    if arguments.json:
        facts = {"checkpoint": str(model.checkpoint.path), "step": model.checkpoint.manifest.progress.step}
        print(json.dumps({**facts, "prompt": settings.prompt, "text": "".join(pieces), "tokens": count}))
    else:
        print(pieces[-1])
    return 0


def _show(text: str, as_json: bool) -> None:
    if not as_json:
        # A model can make any character; a terminal gets none that commands it, a file or pipe gets the text as it is.
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
