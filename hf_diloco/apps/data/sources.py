"""Opens the text: embedded, from the Hub, or from files; always as a dataset with the one column `text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.apps.data.settings import DataBlock
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Documents: TypeAlias = Dataset | IterableDataset

C4 = "allenai/c4"

# reader of `datasets`, and its options, by the end of the file's name
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "paragraph"}),  # documents are separated by blank lines
}
_COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}


def open_documents(data: DataBlock, files: Sequence[str] | None = None) -> Documents:
    """The training text, before any split or share.

    Args:
        data: the source.
        files: only these of its files (source files).

    Raises:
        ConfigError: when it cannot be opened, with the reason and the remedy.
    """
    if data.source == "embedded":
        from datasets import Dataset

        return Dataset.from_dict({"text": embedded_documents()})
    if data.source == "files":
        return open_files(files or data.files, data.text_column, data.streaming)
    return _open_hub(data, data.split, data.streaming)


def open_evaluation(data: DataBlock) -> list[Documents]:
    """The text to evaluate on as streams, one a file; none when it is to be a held-out part of the training text.

    Raises:
        ConfigError: as `open_documents`.
    """
    if data.eval_files:
        return [open_files([file], data.text_column, streaming=True) for file in data.eval_files]
    if data.eval_split is not None:
        return [_open_hub(data, data.eval_split, streaming=True)]
    return []


def open_files(files: Sequence[str], text_column: str = "text", streaming: bool = False) -> Documents:
    """Files of one format (.json, .jsonl, .parquet or .txt, also compressed) as one dataset.

    Raises:
        ConfigError: for an unknown or mixed format, an unreadable file, or a missing column.
    """
    formats = {_format(file) for file in files}
    if len(formats) != 1 or not formats <= _READERS.keys():
        raise ConfigError(
            f"data.files: one format of {', '.join(_READERS)} (also .gz) is needed, got {', '.join(sorted(formats))}"
        )
    reader, options = _READERS[formats.pop()]
    return _load(reader, text_column, streaming, data_files={"train": list(files)}, split="train", **options)


def texts(documents: Documents) -> Iterator[str]:
    """The documents one after the other, without the empty ones."""
    rows = iter(documents)
    for row in rows:
        if row["text"] and row["text"].strip():
            yield row["text"]


def alternate(sources: Sequence[Documents]) -> Iterator[str]:
    """One document from each source in turn, until all have ended."""
    active = [texts(source) for source in sources]
    while active:
        for iterator in list(active):
            text = next(iterator, None)
            if text is None:
                active.remove(iterator)
            else:
                yield text


def _format(file: str) -> str:
    suffixes = PurePosixPath(file).suffixes
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else "none"


def _open_hub(data: DataBlock, split: str, streaming: bool) -> Documents:
    path = C4 if data.source == "c4" else str(data.path)
    return _load(path, data.text_column, streaming, name=data.name, split=split)


def _load(path: str, text_column: str, streaming: bool, **options: Any) -> Documents:
    from datasets import load_dataset

    where = ", ".join(options["data_files"]["train"][:3]) if "data_files" in options else path
    try:
        documents = load_dataset(path, streaming=streaming, **options)
        columns = documents.column_names or _columns_of_first_row(documents)
    except Exception as error:  # of the Hub, the network, the file system or the parser
        raise ConfigError(
            f"data: cannot read {where}: {type(error).__name__}: {error}"
            + (
                ""
                if "data_files" in options
                else "; where the Hub cannot be reached, download the files and use source files"
            )
        ) from error
    if text_column not in columns:
        raise ConfigError(f"data.text_column: {where} has no column {text_column!r} (it has {', '.join(columns)})")
    documents = documents.select_columns([text_column])
    return documents if text_column == "text" else documents.rename_column(text_column, "text")


def _columns_of_first_row(documents: Any) -> list[str]:
    return list(next(iter(documents)))
