"""Settings of the data: where the text comes from, and which part of it an island sees."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hf_diloco.utils.settings import Block


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
    files: list[str] = Field([], description="source files: globs of .json, .jsonl or .txt files, also .gz")
    eval_files: list[str] = Field([], description="globs of files to evaluate on; empty: a held-out part of the data")
    text_column: str = Field("text", description="sources c4, hub and files: the column that holds the text")
    streaming: bool = Field(False, description="read while training, without a copy on disk (c4: true)")
    sequence_length: int = Field(256, ge=2, description="tokens of one training example; documents are packed to it")
    num_eval_sequences: int = Field(64, ge=1, description="examples held out for evaluation, the same on all islands")
    shares: Literal["iid", "domains", "same"] = Field(
        "iid", description="iid: disjoint random shares; domains: file k for island k % islands; same: all for all"
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
        uses = {"path": ("hub",), "name": ("hub", "c4"), "eval_split": ("hub", "c4"), "files": ("files",)}
        for key, sources in uses.items():
            if getattr(self, key) and self.source not in sources:
                raise ValueError(f"{key} belongs to source {' or '.join(sources)}, but source is {self.source}")
        if self.source == "embedded" and self.text_column != "text":
            raise ValueError(f"text_column: the embedded text has no columns; leave out {self.text_column!r}")
        if self.source == "hub" and not self.path:
            raise ValueError("path is missing: source hub needs the id of a dataset, as in path: allenai/c4")
        if self.source == "files" and not self.files:
            raise ValueError("files is missing: source files needs globs, as in files: [corpus/*.jsonl.gz]")
        if self.source == "embedded" and self.streaming:
            raise ValueError("streaming: the embedded text is in memory and cannot be streamed; set it to false")
        if self.shares == "domains" and self.source != "files":
            raise ValueError(f"shares: domains needs source files (one domain a file), but source is {self.source}")
        return self
