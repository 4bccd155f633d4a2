"""From the `data` section of a configuration to samples: find or build the store, check it, cut it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.config.tree import DataSection
from hybrid.contracts.stable_json import stable_hash
from hybrid.data.bpe import BpeTokenizer, train_bpe
from hybrid.data.corpus import Document, Source, open_source
from hybrid.data.files import Progress, ShouldStop, stop_if
from hybrid.data.manifest import VERSION
from hybrid.data.packing import PackedDataset
from hybrid.data.samples import SampleSet
from hybrid.data.split import SplitRule, TokenView
from hybrid.data.store import BuildReport, TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer
from hybrid.data.windows import WindowDataset
from hybrid.errors import ConfigError, DataContractError
from hybrid.resources import cache_folder


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on. validation is None when nothing is held out."""

    store: TokenStore
    train: SampleSet
    validation: SampleSet | None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.store.tokenizer

    @property
    def fingerprint(self) -> str:
        """The run's `datasetHash`: the training samples, wherever they came from."""
        return self.train.fingerprint


def prepare(
    data: DataSection,
    *,
    verify: bool = True,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
) -> PreparedData:
    """Everything between the configuration and the loader.

    verify: hash the whole store first (about a second for each gigabyte). progress: stages "documents", "tokens",
    "verify". Errors: DataContractError for the data, ConfigError for the settings, StopRequested.
    """
    store = open_or_build(data, progress=progress, should_stop=should_stop)
    if verify:
        store.verify(progress=progress, should_stop=should_stop)
    rule = split_rule(data)
    validation = None
    if rule.validation_share > 0:
        # Without a stride, whatever training has: each target of the validation text counts once.
        validation = make_samples(store.split("validation", rule), data, stride=None)
    return PreparedData(store, make_samples(store.split("train", rule), data, stride=data.samples.stride), validation)


def make_samples(view: TokenView, data: DataSection, *, stride: int | None) -> SampleSet:
    """The samples of `data.samples` and `data.sequenceLength`."""
    if data.samples.mode == "packed":
        return PackedDataset(view, data.sequence_length)
    isolate = data.samples.isolate_documents
    return WindowDataset(view, data.sequence_length, stride=stride, isolate_documents=isolate)


def open_or_build(
    data: DataSection, *, progress: Progress | None = None, should_stop: ShouldStop | None = None
) -> TokenStore:
    """The store that `data.store` names, or the one made of `data.source`, built at its first use and then kept in
    the cache.

    A cached store is found by what it was made from: the source's files, the tokenizer's settings and this version of
    the format. One that is there but cannot be opened is an error, never silently made again.
    """
    if data.store is not None:
        return TokenStore.open(data.store)
    source = open_source(data.source, max_bytes=data.max_bytes, field=data.field)
    folder = cache_folder("data") if data.cache_dir is None else Path(data.cache_dir)
    target = folder / f"tokens-{_request_hash(data, source)[:20]}"
    if not target.exists():
        try:
            return build(data, target, progress=progress, should_stop=should_stop).store
        except (OSError, DataContractError):
            if not target.exists():  # else another process was faster
                raise
    try:
        return TokenStore.open(target)
    except DataContractError as error:
        raise DataContractError(f"{error} (a cached store: remove the folder {target} to have it made again)") from None


def build(
    data: DataSection,
    out_dir: Path,
    *,
    replace: bool = False,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
) -> BuildReport:
    """Build the store of `data.source` and `data.tokenizer` in `out_dir`; `data.store` and `data.cacheDir` play no
    part."""
    source = open_source(data.source, max_bytes=data.max_bytes, field=data.field)
    tokenizer = make_tokenizer(data, source, progress=progress, should_stop=should_stop)
    return build_store(
        source.documents(),
        tokenizer,
        out_dir,
        split=split_rule(data),
        source=source.describe(),
        replace=replace,
        progress=progress,
        should_stop=should_stop,
    )


def make_tokenizer(
    data: DataSection, source: Source, *, progress: Progress | None = None, should_stop: ShouldStop | None = None
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` describes, trained on the source where it has to be."""
    settings = data.tokenizer
    if settings.path is not None:
        if settings.type != "bpe":
            raise ConfigError(
                f'data.tokenizer.path goes with data.tokenizer.type "bpe", '
                f'not with "{settings.type}": remove one of the two'
            )
        return BpeTokenizer(_read_tokenizer(Path(settings.path).expanduser()))
    if settings.type == "bytes":
        return ByteTokenizer()
    texts = (document.text for document in _counted(source.documents(), progress, should_stop))
    if settings.type == "characters":
        return CharacterTokenizer.from_texts(texts)
    return train_bpe(texts, settings.vocabulary_size)


def split_rule(data: DataSection) -> SplitRule:
    """The rule of `data.split`. It does not depend on the run's seed: runs with different seeds share their
    validation."""
    return SplitRule(by=data.split.by, validation_share=data.split.validation_share)


def _counted(
    documents: Iterator[Document], progress: Progress | None, should_stop: ShouldStop | None
) -> Iterator[Document]:
    for number, document in enumerate(documents, start=1):
        stop_if(should_stop, "reading the corpus")
        if progress is not None:
            progress("documents", number, None)
        yield document


def _read_tokenizer(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataContractError(f"{path}: the tokenizer cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataContractError(f"{path}: not UTF-8 at offset {error.start}") from None


def _request_hash(data: DataSection, source: Source) -> str:
    tokenizer: dict[str, Any] = {"type": data.tokenizer.type}
    if data.tokenizer.path is not None:
        tokenizer["document"] = _read_tokenizer(Path(data.tokenizer.path).expanduser())
    elif data.tokenizer.type == "bpe":
        tokenizer["vocabularySize"] = data.tokenizer.vocabulary_size
    return stable_hash({"version": VERSION, "source": source.digest(), "tokenizer": tokenizer})
