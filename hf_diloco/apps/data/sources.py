"""Opens the text: embedded, from the Hub, or from files; always as a dataset with a single column `text`."""

from __future__ import annotations

import contextlib
import errno
import glob
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.utils.files import read_json
from hf_diloco.utils.settings import Block
from hf_diloco.utils.text import one_line

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Documents: TypeAlias = Dataset | IterableDataset


class DataBlock(Block):
    """The text, and which part of it an island sees."""

    source: Literal["embedded", "c4", "hub", "files"] = Field(
        "embedded",
        description="embedded: English text that comes with Python; c4: allenai/c4; hub: any dataset; files",
    )
    path: str | None = Field(None, description="source hub: the dataset's id or folder")
    name: str | None = Field(None, description="sources hub and c4: the configuration of the dataset (c4: en)")
    split: str = Field("train", description="sources hub and c4: the split to train on")
    eval_split: str | None = Field(
        None,
        description="sources hub and c4: the split to evaluate on (c4: validation); null: a held-out part of split",
    )
    files: list[str] = Field(
        [], description="source files: globs of .parquet files, or .json, .jsonl, .csv or .txt, also compressed"
    )
    eval_files: list[str] = Field([], description="globs of files to evaluate on; empty: a held-out part of the data")
    text_column: str = Field("text", description="sources c4, hub and files: the column that holds the text")
    streaming: bool = Field(False, description="read while training, without a copy on disk (c4: true)")
    sequence_length: int = Field(256, ge=2, description="tokens of one training example; documents are packed to it")
    num_eval_sequences: int = Field(64, ge=1, description="examples held out for evaluation, the same on all islands")
    shares: Literal["iid", "domains", "same"] = Field(
        "iid", description="iid: every M-th document of M islands; domains: file k for island k % M; same: all for all"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        is_c4 = values.get("source") == "c4"
        filled = {"streaming": is_c4, "name": "en" if is_c4 else None, "eval_split": "validation" if is_c4 else None}
        return {**values, **{key: value for key, value in filled.items() if values.get(key) is None}}

    @model_validator(mode="after")
    def _check(self) -> DataBlock:
        uses = {"path": ("hub",), "files": ("files",), **dict.fromkeys(("name", "split", "eval_split"), ("hub", "c4"))}
        changed = self.changed()
        for key, sources in uses.items():
            if key in changed and self.source not in sources:
                raise ValueError(f"{key} belongs to source {' or '.join(sources)}, but source is {self.source}")
        if self.source == "embedded" and self.text_column != "text":
            raise ValueError(f"text_column: the embedded text has no columns; leave out {self.text_column!r}")
        if self.source == "hub" and not self.path:
            raise ValueError("path is missing: source hub needs the id of a dataset, as in path: allenai/c4")
        if self.source == "hub" and self.eval_split and self.eval_files:
            raise ValueError("eval_split has no effect beside eval_files: leave one of them out")
        if self.source == "files" and not self.files:
            raise ValueError("files is missing: source files needs globs, as in files: [corpus/*.jsonl.gz]")
        if self.source == "embedded" and self.streaming:
            raise ValueError("streaming: the embedded text is in memory and cannot be streamed; set it to false")
        if self.shares == "domains" and self.source != "files":
            raise ValueError(f"shares: domains needs source files (one domain a file), but source is {self.source}")
        return self


C4 = "allenai/c4"

# reader of `datasets`, and its options, by file extension
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {"batch_size": 1000}),  # by default that of the first row group, which may be empty
    ".txt": ("text", {"sample_by": "paragraph"}),  # documents are separated by blank lines
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def open_documents(data: DataBlock, files: Sequence[str] | None = None) -> Documents:
    """Opens the training text, before splitting and sharing; with source files and `files` given, only these files.

    Raises `ConfigError` if the text cannot be opened; the message has the reason and the remedy.
    """
    if data.source == "embedded":
        from datasets import Dataset

        return Dataset.from_dict({"text": embedded_documents()})
    if data.source == "files":
        return open_files(files or data.files, data.text_column, data.streaming)
    return _open_hub(data, data.split, data.streaming)


def open_evaluation(data: DataBlock) -> list[Documents]:
    """Opens the evaluation text as streams, one per file; returns none if it is held out from the training text."""
    if data.eval_files:
        return [open_files([file], data.text_column, streaming=True) for file in data.eval_files]
    if data.eval_split is not None:
        return [_open_hub(data, data.eval_split, streaming=True)]
    return []


def open_files(files: Sequence[str], text_column: str = "text", streaming: bool = False) -> Documents:
    """Opens files of one format (.parquet, or .csv, .json, .jsonl or .txt, also compressed) as one dataset.

    Raises `ConfigError` if the format is unknown or mixed, a file is unreadable, or the column is missing.
    """
    formats = {_format(file) for file in files}
    if len(formats) != 1 or not formats <= _READERS.keys():
        raise ConfigError(
            f"data.files: one format of {', '.join(_READERS)} is needed, also compressed ({', '.join(_COMPRESSED)}), "
            f"got {', '.join(sorted(formats))}"
        )
    reader, options = _READERS[formats.pop()]
    if reader == "parquet" and (packed := [file for file in files if file.endswith(_COMPRESSED)]):
        raise ConfigError(
            f"data.files: {packed[0]}: .parquet is compressed inside, and read as it is: unpack the file"
        )
    if reader == "csv":
        return _open_csv(files, text_column, streaming)
    return _load_files(reader, files, text_column, streaming, **options)


def _open_csv(files: Sequence[str], text_column: str, streaming: bool) -> Documents:
    """Opens CSV files; reads only the text column, and as text: a text may look like a number, or be "None"."""
    only = {"usecols": [text_column], "converters": {text_column: str}, "keep_default_na": False}
    try:
        return _load_files("csv", files, text_column, streaming, **only)
    except ConfigError as error:
        if "Usecols do not match" in str(error):
            _load_files("csv", files, text_column, streaming=True)  # says which columns there are, in the first file
        raise


def _load_files(reader: str, files: Sequence[str], text_column: str, streaming: bool, **options: Any) -> Documents:
    # `datasets` treats local file names as patterns: `a[1].txt` would match `a1.txt`.
    options["data_files"] = {"train": [file if "://" in file else glob.escape(file) for file in files]}
    return _load(reader, text_column, streaming, _names(files), split="train", **options)


def texts(documents: Documents) -> Iterator[str]:
    """Yields the documents, without empty ones."""
    for row in documents:
        if row["text"] and row["text"].strip():
            yield row["text"]


def read_first(data: DataBlock) -> None:
    """Raises `ConfigError` unless a first document can be read; does not copy the data to disk."""
    with reading(data):
        if next(texts(open_documents(data.model_copy(update={"streaming": True}))), None) is None:
            raise ConfigError(f"data: {_place(data)} holds no text")


def alternate(sources: Sequence[Documents]) -> Iterator[str]:
    """Yields one document from each source in turn, until all have ended."""
    rounds = zip_longest(*map(texts, sources))
    return (text for texts_of_round in rounds for text in texts_of_round if text is not None)


def _format(file: str) -> str:
    suffixes = PurePosixPath(file).suffixes
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else "none"


def _open_hub(data: DataBlock, split: str, streaming: bool) -> Documents:
    path = C4 if data.source == "c4" else str(data.path)
    saved = [folder for folder in (Path(path), Path(path, split)) if (folder / _SAVED).is_file()]
    if not saved:
        return _load(path, data.text_column, streaming, remedy=_ELSEWHERE, name=data.name, split=split)
    if saved[0] == Path(path) and split != "train":
        raise ConfigError(f"data: {path} holds one dataset and no split {split!r}: leave split and eval_split out")
    listed = read_json(saved[0] / _SAVED).get("_data_files", [])  # the folder may also have files that `map` cached
    if not listed:
        raise ConfigError(f"data: {saved[0]} holds no text")
    return _load_files("arrow", [str(saved[0] / file["filename"]) for file in listed], data.text_column, streaming)


_SAVED = "state.json"
"""A file in a folder of `Dataset.save_to_disk`, and in each split's folder of `DatasetDict.save_to_disk`."""


def _load(
    path: str, text_column: str, streaming: bool, where: str = "", remedy: str = "", **options: Any
) -> Documents:
    from datasets import load_dataset
    from datasets.arrow_writer import SchemaInferenceError

    where = where or path
    try:
        documents = load_dataset(path, streaming=streaming, **options)
        features = documents.features or next(iter(documents))  # of a stream, an example
    except StopIteration:
        raise ConfigError(f"data: {where} holds no text") from None
    except Exception as error:  # of the Hub, the network, the file system or the parser
        reason = _reason(error)
        if isinstance(reason, SchemaInferenceError) or "corresponds to no data" in str(reason):  # not one example
            raise ConfigError(f"data: {where} holds no text") from error
        raise _unreadable(where, error, remedy) from error
    if text_column not in features:
        names = one_line(", ".join(features))
        raise ConfigError(f"data.text_column: {where} has no column {text_column!r} (it has {names})")
    if not _is_text(features[text_column]):
        raise ConfigError(f"data.text_column: {where} holds something other than text in {text_column!r}")
    documents = documents.select_columns([text_column])
    return documents if text_column == "text" else documents.rename_column(text_column, "text")


_ELSEWHERE = "; where the Hub cannot be reached, download the files and use source files"


@contextlib.contextmanager
def reading(data: DataBlock) -> Iterator[None]:
    """Turns errors of libraries while reading opened text into `ConfigError`, with the reason."""
    try:
        yield
    except DiLoCoError:
        raise
    except Exception as error:  # of the network, the file system, the parser or the decoder
        raise _unreadable(_place(data), error, "" if data.files else _ELSEWHERE) from error


def _place(data: DataBlock) -> str:
    return _names([*data.files, *data.eval_files]) or data.path or data.source


def _names(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")


def _reason(error: Exception) -> BaseException:
    """Returns the cause of an error of `datasets`, without its wrapper."""
    from datasets.exceptions import DatasetGenerationError

    return error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error


def _unreadable(where: str, error: Exception, remedy: str) -> ConfigError:
    reason = _reason(error)
    said = one_line(reason)
    if "zstd not supported" in said:
        remedy = "; run `pip install zstandard`"
    if isinstance(reason, OSError):
        from datasets.config import HF_DATASETS_CACHE

        goes_to = f"; the copy that is read goes to {HF_DATASETS_CACHE}: "
        if reason.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"{goes_to}make room there, or set HF_DATASETS_CACHE"
        elif reason.filename and _is_along(Path(str(reason.filename)), Path(HF_DATASETS_CACHE)):
            remedy = f"{goes_to}see to its permissions, or set HF_DATASETS_CACHE to a folder that can be written to"
    return ConfigError(f"data: cannot read {where}: {type(reason).__name__}: {said}{remedy}")


def _is_along(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder, or one of those that contain it and may have to be made first."""
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _is_text(value: Any) -> bool:
    """Whether a column's type or value is text or null; documents may be null."""
    return value is None or isinstance(value, str) or getattr(value, "dtype", "") in ("string", "large_string", "null")
