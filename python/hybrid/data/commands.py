"""What `hybrid data build|verify|inspect` do, as functions that return plain data, and the text for people."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.config.tree import DataSection
from hybrid.data import prepare
from hybrid.data.files import Progress, ShouldStop
from hybrid.data.packing import PackedDataset
from hybrid.data.samples import Ledger, SampleSet
from hybrid.data.split import TokenView
from hybrid.data.store import TokenStore
from hybrid.data.windows import WindowDataset
from hybrid.errors import DataContractError

PREVIEW_TOKENS = 40


def build(
    data: DataSection,
    out_dir: str | os.PathLike[str],
    *,
    replace: bool = False,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
) -> dict[str, Any]:
    """Build a store from `data.source` and `data.tokenizer`. Errors as in `prepare.build`."""
    report = prepare.build(data, Path(out_dir), replace=replace, progress=progress, should_stop=should_stop)
    return {
        "path": str(report.store.path),
        "documents": report.documents,
        "emptyDocuments": report.empty_documents,
        "tokens": report.tokens,
        "bytes": report.bytes_on_disk,
        "vocabularySize": report.store.vocabulary_size,
        "fingerprint": report.store.fingerprint,
    }


def verify(
    path: str | os.PathLike[str], *, progress: Progress | None = None, should_stop: ShouldStop | None = None
) -> dict[str, Any]:
    """Check every byte of a store. DataContractError names what is wrong and where."""
    return TokenStore.open(path).verify(progress=progress, should_stop=should_stop)


def inspect(path: str | os.PathLike[str], *, sequence_length: int | None = None, documents: int = 3) -> dict[str, Any]:
    """What a store holds: counts, document lengths, splits, the first documents; with `sequence_length` also the
    ledgers of windows and of packing."""
    store = TokenStore.open(path)
    lengths = np.diff(store.offsets)
    quartiles = np.percentile(lengths, (0, 25, 50, 75, 100), method="nearest")
    return {
        "path": str(store.path),
        "documents": store.document_count,
        "tokens": store.token_count,
        "tokenType": store.manifest["tokenType"],
        "vocabularySize": store.vocabulary_size,
        "endOfText": store.manifest["endOfText"],
        "tokenizer": store.manifest["tokenizer"],
        "source": store.manifest["source"],
        "fingerprint": store.fingerprint,
        "documentLengths": dict(zip(("min", "q25", "median", "q75", "max"), map(int, quartiles), strict=True)),
        "splits": [_split(store, name, sequence_length) for name in ("train", "validation")],
        "preview": [_preview(store, index) for index in range(min(documents, store.document_count))],
    }


def inspect_text(report: dict[str, Any]) -> str:
    """The report of `inspect` for people."""
    lengths = report["documentLengths"]
    lines = [
        f"{report['path']}",
        f"{report['tokens']:,} tokens ({report['tokenType']}) in {report['documents']:,} documents",
        f"document lengths: {', '.join(f'{name} {value:,}' for name, value in lengths.items())}",
        f"tokenizer: {report['tokenizer']['kind']}, vocabulary of {report['vocabularySize']:,}",
        f"fingerprint: {report['fingerprint']}",
    ]
    for split in report["splits"]:
        if "problem" in split:
            lines.append(f"{split['name']}: {split['problem']}")
            continue
        rule = split["split"]
        share = f"by {rule['by']}, validation share {rule['validationShare']:g}"
        lines.append(f"{split['name']}: {split['tokens']:,} tokens in {split['documents']:,} documents ({share})")
        for mode, ledger in split.get("ledgers", {}).items():
            lines.append(f"  {mode}:")
            lines.extend(f"    {line}" for line in ledger["text"].splitlines())
    for preview in report["preview"]:
        lines.append(f"document {preview['document']} ({preview['tokens']:,} tokens): {preview['text']!r}")
    return "\n".join(lines)


def _split(store: TokenStore, name: str, sequence_length: int | None) -> dict[str, Any]:
    try:
        view: TokenView = store.split(name)
        report = view.describe()
        if sequence_length is not None:
            sets: dict[str, SampleSet] = {
                "windows": WindowDataset(view, sequence_length),
                "packed": PackedDataset(view, sequence_length),
            }
            report["ledgers"] = {mode: _ledger(samples.ledger) for mode, samples in sets.items()}
        return report
    except DataContractError as error:
        return {"name": name, "problem": str(error)}


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {**ledger.to_json(), "text": ledger.text()}


def _preview(store: TokenStore, index: int) -> dict[str, Any]:
    ids = store.document(index)
    return {
        "document": index,
        "tokens": len(ids),
        "ids": ids[:PREVIEW_TOKENS].tolist(),
        "text": store.tokenizer.decode(ids[:PREVIEW_TOKENS]),
    }
