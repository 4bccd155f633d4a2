"""`hybrid checkpoint show|verify|diff|list|pack|unpack|export|import`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli.parser import Subparsers, add_command, add_group, add_set_option, path

if TYPE_CHECKING:
    from hybrid.checkpoint.manifest import Manifest

CHECKPOINT = "a run folder (its newest checkpoint), a checkpoint folder, or a file *.hybrid"

EXPORT = """\
Write the model of a checkpoint (a run folder means its newest) as a folder that transformers opens: Llama's
family for RMS norm, rotary positions and SwiGLU, GPT-2's for layer norm and learned positions. Weights are
float32; the optimizer's state is not part of it. The checkpoint is verified first."""

IMPORT = """\
Make a run folder whose step 0 has the weights of a folder that transformers wrote: config.json of a Llama or
GPT-2 model, safetensors in any floating type, and tokenizer.json. The model's shape is the folder's; all other
settings are those of `hybrid train`, and so is the data. Then `hybrid train --run-dir DIR` trains it, and
`hybrid sample DIR` lets it write."""


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    group = add_group(subparsers, "checkpoint", "show, verify, compare and list checkpoints")
    for name, summary, run in (
        ("show", "what a checkpoint says about itself", show),
        ("verify", "read every byte of a checkpoint, and check that all of it agrees", verify),
        ("list", "the checkpoints of a run, whole and broken ones", list_all),
    ):
        parser = add_command(group, name, summary)
        if name == "list":
            parser.add_argument("path", metavar="RUN", type=path, help="a run folder")
        else:
            parser.add_argument("path", metavar="RUN|CHECKPOINT", type=path, help=CHECKPOINT)
        _json_option(parser)
        parser.set_defaults(run=run)
    parser = add_command(group, "diff", "in which settings, counters and tensors two checkpoints differ")
    parser.add_argument("a", metavar="A", type=path, help=CHECKPOINT)
    parser.add_argument("b", metavar="B", type=path, help="another one")
    _json_option(parser)
    parser.set_defaults(run=diff)
    parser = add_command(group, "pack", "one file of a checkpoint, to carry it elsewhere (into a browser, say)")
    parser.add_argument("path", metavar="RUN|CHECKPOINT", type=path, help=CHECKPOINT)
    parser.add_argument(
        "archive", metavar="FILE.hybrid", nargs="?", type=path,
        help="the new file (default: RUN-step-STEP.hybrid in the current folder)",
    )  # fmt: skip
    _json_option(parser)
    parser.set_defaults(run=pack)
    parser = add_command(group, "unpack", "the checkpoint folder of such a file")
    parser.add_argument("archive", metavar="FILE.hybrid", type=path, help="a packed checkpoint")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=path, help="the new folder (default: FILE in the current folder)"
    )
    _json_option(parser)
    parser.set_defaults(run=unpack)
    parser = add_command(group, "export", "the model of a checkpoint as a folder for another library", EXPORT)
    parser.add_argument("path", metavar="RUN|CHECKPOINT", type=path, help=CHECKPOINT)
    parser.add_argument("folder", metavar="FOLDER", type=path, help="the new folder")
    _format_option(parser)
    _json_option(parser)
    parser.set_defaults(run=export)
    parser = add_command(group, "import", "begin a run with the model of another library's folder", IMPORT)
    parser.add_argument("folder", metavar="FOLDER", type=path, help="with config.json, *.safetensors, tokenizer.json")
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=path, help="settings: a .toml or .json file")
    parser.add_argument("--preset", metavar="NAME", help="what the settings start from (default: stdlib-tiny)")
    parser.add_argument("--run-dir", metavar="DIR", type=path, help="the run's folder (default: runs/FOLDER)")
    add_set_option(parser)
    _format_option(parser)
    _json_option(parser)
    parser.set_defaults(run=import_model)


def _format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("hf",), default="hf", help="hf: of Hugging Face transformers (default)")


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def show(arguments: argparse.Namespace) -> int:
    """`checkpoint show`."""
    from hybrid.checkpoint import diff as reports
    from hybrid.checkpoint.manifest import MODEL_FILE

    report = reports.show(arguments.path)
    if arguments.json:
        print(json.dumps(report))
        return 0
    manifest = report["manifest"]
    progress, lineage = manifest["progress"], manifest["lineage"]
    _facts(
        {
            "checkpoint": report["path"],
            "step": f"{progress['step']:,} ({progress['tokens']:,} tokens; epoch {progress['epoch']})",
            "parameters": f"{report['parameters']:,} in {len(report['tensors'][MODEL_FILE])} tensors",
            "run": f"{lineage['runId']}, checkpoint {lineage['sequence']}, made by {lineage['runtime']}",
            "trained from": lineage["previousCheckpointHash"] or "nothing",
            "stateHash": manifest["stateHash"],
            "checkpointHash": manifest["checkpointHash"],
            **{name: value for name, value in manifest["hashes"].items() if value is not None},
            "accepted changes": ", ".join(audit["field"] for audit in manifest["resumeAudits"]) or "none",
            **({"not listed": ", ".join(report["unlisted"])} if report["unlisted"] else {}),
        }
    )
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """`checkpoint verify`."""
    from hybrid.checkpoint import diff as reports
    from hybrid.training.saved_run import check_checkpoint
    from hybrid.training.view import bytes_text

    report = reports.verify(arguments.path, check_checkpoint)
    if arguments.json:
        print(json.dumps(report))
    else:
        size = bytes_text(sum(file["size"] for file in report["files"].values()))
        facts = f"{report['tensors']} tensors, {size}"
        print(f"{report['path']}: every byte is what was saved, and all of it agrees ({facts})")
    return 0


def list_all(arguments: argparse.Namespace) -> int:
    """`checkpoint list`."""
    from hybrid.checkpoint import diff as reports
    from hybrid.contracts.javascript import iso_time
    from hybrid.training.view import bytes_text

    report = reports.list_checkpoints(arguments.path)
    if arguments.json:
        print(json.dumps(report))
        return 0
    rows = []
    for entry in report:
        whole = entry["status"] == "complete"
        size = bytes_text(entry["size"]) if whole else ""
        saved = iso_time(entry["timestamp_ms"]) if whole else ""
        rows.append((entry["step"], entry["status"], saved, size, entry["path"] if whole else entry["detail"]))
    if not rows:
        print(f"{arguments.path}: no checkpoints")
        return 0
    _table(("step", "status", "saved", "size", "where"), rows)
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """`checkpoint diff`."""
    from hybrid.checkpoint import diff as reports

    report = reports.diff(arguments.a, arguments.b)
    if arguments.json:
        print(json.dumps(report))
        return 0
    print("same state" if report["same_state"] else "different states")
    for what, found in {"settings and counters": report["values"], **report["tensors"]}.items():
        if found:
            largest = max(
                (facts.get("max_abs_diff") or 0.0 for facts in found.values() if isinstance(facts, dict)), default=0.0
            )
            print(f"  {what}: {len(found)} differ" + (f", by {largest:.3g} at most" if largest else ""))
    if report["values"]:
        _table(("field", "a", "b"), [(name, *map(json.dumps, pair)) for name, pair in report["values"].items()])
    rows = [
        (file, name, ", ".join(_difference(key, value) for key, value in facts.items()))
        for file, tensors in report["tensors"].items()
        for name, facts in tensors.items()
    ]
    if rows:
        _table(("file", "tensor", "difference"), rows)
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """`checkpoint pack`."""
    from hybrid.checkpoint import archive, finding

    place = finding.resolve(arguments.path).path.resolve()
    inside = place.parent.name == finding.CHECKPOINTS_FOLDER
    name = f"{place.parent.parent.name}-{place.name}" if inside else place.name
    target: Path = arguments.archive or Path(f"{name}{archive.SUFFIX}")
    _tell(arguments, target, archive.pack(place, target))
    return 0


def unpack(arguments: argparse.Namespace) -> int:
    """`checkpoint unpack`."""
    from hybrid.checkpoint import archive

    folder: Path = arguments.folder or Path(arguments.archive.stem)
    _tell(arguments, folder, archive.unpack(arguments.archive, folder))
    return 0


def export(arguments: argparse.Namespace) -> int:
    """`checkpoint export`."""
    from hybrid.checkpoint import finding, transformers_folder
    from hybrid.training.view import bytes_text

    place = finding.resolve(arguments.path).path
    facts = transformers_folder.export(place, arguments.folder)
    if arguments.json:
        print(json.dumps({"path": str(arguments.folder), **facts}))
    else:
        size = bytes_text(facts["bytes"])
        print(f"{arguments.folder}: a {facts['family']} model for transformers, {facts['tensors']} tensors, {size}")
    return 0


def import_model(arguments: argparse.Namespace) -> int:
    """`checkpoint import`."""
    from hybrid.checkpoint.transformers_folder import TransformersFolder
    from hybrid.cli.progress import ProgressLine
    from hybrid.config.loading import load_config, plain_name
    from hybrid.training.importing import import_run, model_settings
    from hybrid.training.run_files import RUNS
    from hybrid.training.start import Request, Services
    from hybrid.training.view import QuietView

    source = TransformersFolder(arguments.folder)
    # The folder's own tokenizer, unless a setting says another.
    own = [f"run.name={json.dumps(plain_name(arguments.folder.resolve().name))}"]
    if source.tokenizer is not None:
        own += ['data.tokenizer.type="bpe"', f"data.tokenizer.path={json.dumps(str(source.tokenizer))}"]
    config = load_config(
        arguments.config, arguments.preset, (*own, *arguments.assignments), model_settings(source.model)
    )
    run_dir: Path = arguments.run_dir or RUNS / config.run.name
    with ProgressLine() as line:

        class Line(QuietView):
            def event(self, kind: str, facts: dict[str, Any]) -> None:
                if kind == "progress":
                    line(facts["stage"], facts["done"], facts["total"])
                elif kind == "note":
                    line.note(facts["text"])

        facts = import_run(source, Request(config, run_dir, "never", command="import"), Services(view=Line()))
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"{facts['checkpoint']}: {facts['parameters']:,} parameters of {arguments.folder}, not trained here yet")
        print(f"train it: hybrid train --run-dir {run_dir}; sample from it: hybrid sample {run_dir}")
    return 0


def _tell(arguments: argparse.Namespace, target: Path, manifest: Manifest) -> None:
    step, checkpoint_hash = manifest.progress.step, manifest.checkpoint_hash
    if arguments.json:
        print(json.dumps({"path": str(target), "step": step, "checkpointHash": checkpoint_hash}))
    else:
        print(f"{target}: the checkpoint of step {step:,}, every byte verified")


def _difference(key: str, value: Any) -> str:
    if key == "only_in":
        return f"only in {value}"
    if key == "shape":
        return f"shape {value[0]} and {value[1]}"
    return "not a number" if value is None else f"by {value:.3g}"


def _facts(facts: dict[str, Any]) -> None:
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    from hybrid.cli.tables import print_table

    print_table(columns, rows)
