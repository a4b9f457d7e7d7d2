"""From settings to blocks: disjoint shares, an evaluation set that is the same everywhere and never trained on."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Value, load_from_disk

from hf_diloco.apps.data.build import Datasets, build_datasets, sample_texts
from hf_diloco.apps.data.packing import PackedDataset
from hf_diloco.apps.data.sources import DataBlock, alternate, open_documents, open_files, read_first, reading, texts
from hf_diloco.apps.data.stream import PackedStream
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe
from hf_diloco.errors import ConfigError

TOKENIZER = train_byte_level_bpe(["document number of file"], 300)
NUM_FILES = 4
DOCUMENTS_PER_FILE = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for file in range(NUM_FILES):
        lines = [json.dumps({"text": name(file, number)}) for number in range(DOCUMENTS_PER_FILE)]
        (folder / f"part-{file}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def name(file: int, number: int) -> str:
    return f"document {file}-{number:03}"


def settings(folder: Path, **values: Any) -> DataBlock:
    files = sorted(str(path) for path in folder.glob("part-*"))
    defaults = {"source": "files", "files": files, "sequence_length": 8, "num_eval_sequences": 4}
    return DataBlock(**{**defaults, **values})


def build(data: DataBlock, num_islands: int) -> list[Datasets]:
    return [build_datasets(data, TOKENIZER, island, num_islands) for island in range(num_islands)]


def documents_in(blocks: PackedDataset | PackedStream, limit: int = 10**9) -> list[str]:
    """The whole documents that lie in the blocks."""
    tokens: list[int] = []
    for number, block in zip(range(limit), blocks, strict=False):  # type: ignore[arg-type]
        del number
        tokens += block["input_ids"].tolist()
    decoded = str(TOKENIZER.decode(tokens)).split(TOKENIZER.eos_token or "")
    return [text for text in decoded if len(text) == len(name(0, 0)) and text.startswith("document")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shares", ["iid", "domains"])
@pytest.mark.parametrize("num_islands", [2, 3])
def test_shares_are_disjoint_and_evaluation_is_apart(
    folder: Path, streaming: bool, shares: str, num_islands: int
) -> None:
    islands = build(settings(folder, streaming=streaming, shares=shares), num_islands)
    evaluation = documents_in(islands[0].evaluation)
    assert evaluation
    assert {island.eval_hash for island in islands} == {islands[0].eval_hash}
    trained = []
    for island in islands:
        # one pass of a stream of 1,600 documents at most is fewer blocks than this, and two passes never
        limit = 500 if streaming else 10**9
        trained.append(set(documents_in(island.train, limit)))
    for number, mine in enumerate(trained):
        assert len(mine) > 100
        assert mine.isdisjoint(evaluation)
        assert all(mine.isdisjoint(other) for other in trained[number + 1 :])
        if shares == "domains":
            assert {int(text.split()[1].split("-")[0]) % num_islands for text in mine} == {number}


def test_finite_shares_lose_nothing_but_evaluation_and_tails(folder: Path) -> None:
    islands = build(settings(folder), 3)
    trained = [text for island in islands for text in documents_in(island.train)]
    assert len(trained) == len(set(trained))
    whole = NUM_FILES * DOCUMENTS_PER_FILE
    assert whole - 20 < len(trained) < whole


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_was_edited_is_noticed(tmp_path: Path, streaming: bool) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, file in enumerate(files):
        file.write_text("\n\n".join(name(number, document) for document in range(100)))
    data = settings(tmp_path, files=list(map(str, files)), eval_files=[str(files[0])], streaming=streaming)
    before = build_datasets(data, TOKENIZER, 0, 1).train_hash
    files[1].write_text(files[1].read_text().replace(name(1, 50), "short"))
    assert build_datasets(data, TOKENIZER, 0, 1).train_hash != before


def test_same_gives_all_islands_everything(folder: Path) -> None:
    one, two = build(settings(folder, shares="same"), 2)
    assert documents_in(one.train) == documents_in(two.train)
    assert len(documents_in(one.train)) > NUM_FILES * DOCUMENTS_PER_FILE - 20


def test_evaluation_does_not_depend_on_the_number_of_islands(folder: Path) -> None:
    hashes = {build_datasets(settings(folder), TOKENIZER, 0, number).eval_hash for number in (1, 2, 4)}
    assert len(hashes) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_evaluation_files(folder: Path, tmp_path: Path, streaming: bool) -> None:
    for number in range(2):
        lines = [json.dumps({"text": name(9, 2 * index + number)}) for index in range(50)]
        (tmp_path / f"eval-{number}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"eval-{number}.jsonl") for number in range(2)]
    islands = build(settings(folder, eval_files=files, streaming=streaming), 2)
    evaluation = documents_in(islands[0].evaluation)
    assert evaluation == [name(9, number) for number in range(len(evaluation))], "the files take turns"
    assert islands[0].eval_hash == islands[1].eval_hash
    if not streaming:
        trained = {text for island in islands for text in documents_in(island.train)}
        assert len(trained) > NUM_FILES * DOCUMENTS_PER_FILE - 10, "nothing else is held out"


def test_tokenizer_sample_is_bounded_and_covers_all_files(folder: Path) -> None:
    for streaming in (False, True):
        sample = list(sample_texts(settings(folder, streaming=streaming), max_megabytes=0.001))
        assert 1000 <= sum(map(len, sample)) < 1020
        assert len({text.split("-")[0] for text in sample}) == NUM_FILES


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_eval_sequences": 100_000}, "not 100000; lower it, give more text"),
    ({"num_eval_sequences": 1000}, "more than half; lower it"),
    ({"text_column": "body"}, "has no column 'body' (it has text)"),
    ({"streaming": True, "text_column": "body"}, "has no column 'body' (it has text)"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=str)
def test_wrong_settings(folder: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_datasets(settings(folder, **values), TOKENIZER, 0, 1)
    assert message in str(caught.value)


def test_share_without_a_whole_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"text {number}" for number in range(8)))
    (tmp_path / "b.txt").write_text("many other words " * 20)
    data = settings(
        tmp_path, files=[str(tmp_path / "a.txt")], eval_files=[str(tmp_path / "b.txt")], sequence_length=30
    )
    with pytest.raises(ConfigError, match=r"island 1's share has .* too few for one sequence of 30"):
        build_datasets(data, TOKENIZER, 1, 8)


class TestFiles:
    def test_text_is_cut_at_blank_lines(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one\nstill one\n\n\ntwo\n")
        documents = list(texts(open_files([str(tmp_path / "a.txt")], streaming=True)))
        assert [document.strip() for document in documents] == ["one\nstill one", "two"]

    def test_parquet_files_without_rows_hold_nothing(self, tmp_path: Path) -> None:
        files = [str(tmp_path / f"{number}.parquet") for number in (0, 1)]
        for file, rows in zip(files, ([], ["one", "two"]), strict=True):
            Dataset.from_dict({"text": rows}, features=Features({"text": Value("string")})).to_parquet(file)
        for streaming in (False, True):
            assert list(texts(open_files(files, streaming=streaming))) == ["one", "two"]

    @pytest.mark.parametrize(
        ("code", "path", "remedy"),
        [
            (errno.ENOSPC, "/the/cache/text", "make room there"),
            (errno.EROFS, "/the/cache/text", "see to its permissions"),
            (errno.EACCES, "/the", "see to its permissions"),
        ],
    )
    def test_a_cache_that_takes_no_more_is_named(
        self, code: int, path: str, remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/the/cache")
        with (
            pytest.raises(ConfigError, match=rf"{os.strerror(code)}.*goes to /the/cache: {remedy}"),
            reading(DataBlock()),
        ):
            raise OSError(code, os.strerror(code), path)

    def test_other_columns(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(
            '{"body": "one", "id": 1}\n{"body": null, "id": 2}\n{"body": "two", "id": 3}\n'
        )
        for streaming in (False, True):
            assert list(texts(open_files([str(tmp_path / "a.jsonl")], "body", streaming))) == ["one", "two"]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_what_datasets_has_saved_to_disk(self, tmp_path: Path, streaming: bool) -> None:
        Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
        data = DataBlock(source="hub", path=str(tmp_path / "saved"), streaming=streaming)
        assert list(texts(open_documents(data))) == ["one", "two"]
        with pytest.raises(ConfigError, match="no split 'validation'"):
            open_documents(data.model_copy(update={"split": "validation"}))

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("split", ["train", "validation"])
    def test_a_split_of_what_datasets_has_saved_to_disk(self, tmp_path: Path, split: str, streaming: bool) -> None:
        """Without what `map` keeps beside it, in files of the same kind."""
        parts = {name: Dataset.from_dict({"text": [name, "more"]}) for name in ("train", "validation")}
        DatasetDict(parts).save_to_disk(tmp_path)
        load_from_disk(tmp_path / split).map(lambda row: {"text": row["text"].upper()})
        assert list((tmp_path / split).glob("cache-*.arrow"))
        whole = DataBlock(source="hub", path=str(tmp_path), split=split, streaming=streaming)
        one = DataBlock(source="hub", path=str(tmp_path / split), streaming=streaming)
        for data in (whole, one):
            assert list(texts(open_documents(data))) == [split, "more"]

    def test_what_datasets_has_saved_without_one_example(self, tmp_path: Path) -> None:
        Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "saved")
        with pytest.raises(ConfigError, match="saved holds no text"):
            open_documents(DataBlock(source="hub", path=str(tmp_path / "saved")))

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_csv_file(self, tmp_path: Path, streaming: bool) -> None:
        (tmp_path / "a.csv").write_text('id,body\n1,"one, two\nthree"\n2,NA\n3,\n')
        found = list(texts(open_files([str(tmp_path / "a.csv")], "body", streaming)))
        assert found == ["one, two\nthree", "NA"]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_csv_files_whose_other_columns_differ_and_whose_texts_are_numbers(
        self, tmp_path: Path, streaming: bool
    ) -> None:
        (tmp_path / "a.csv").write_text("score,body\n1,2024\n")
        (tmp_path / "b.csv").write_text("body,score,more\none,,x\n007,2.5,\n")
        files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
        assert list(texts(open_files(files, "body", streaming))) == ["2024", "one", "007"]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_csv_file_without_the_column(self, tmp_path: Path, streaming: bool) -> None:
        (tmp_path / "a.csv").write_text(f"id,{'long ' * 1000}\n1,2\n")
        with pytest.raises(ConfigError, match=r"has no column 'text' \(it has id, long ") as failure:
            open_files([str(tmp_path / "a.csv")], streaming=streaming)
        assert len(str(failure.value)) < 1000

    def test_a_csv_file_with_nothing_but_names(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("id,text\n")
        with pytest.raises(ConfigError, match=r"a\.csv holds no text"):
            open_files([str(tmp_path / "a.csv")])

    def test_mixed_formats(self) -> None:
        with pytest.raises(ConfigError, match=r"one format .* got \.jsonl, \.txt"):
            open_files(["a.jsonl.gz", "b.txt"])

    def test_unknown_format(self) -> None:
        with pytest.raises(ConfigError, match=r"one format .* got \.pdf"):
            open_files(["a.pdf"])

    def test_compressions_are_named_and_parquet_has_its_own(self) -> None:
        with pytest.raises(ConfigError, match=r"also compressed \(\.gz, \.zst, \.xz, \.bz2\)"):
            open_files(["a.pdf"])
        with pytest.raises(ConfigError, match=r"b\.parquet\.xz: .* unpack the file"):
            open_files(["a.parquet", "b.parquet.xz"])

    def test_broken_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl.gz").write_bytes(b"not compressed")
        with pytest.raises(ConfigError, match=r"cannot read .*a\.jsonl\.gz"):
            open_files([str(tmp_path / "a.jsonl.gz")])

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
    def test_files_without_text(self, name: str, streaming: bool, tmp_path: Path) -> None:
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=rf"{name} holds no text"):
            open_files([str(tmp_path / name)], streaming=streaming)

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("value", [7, {"a": "b"}, ["a"]])
    def test_a_column_of_something_else(self, value: object, streaming: bool, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": value}))
        with pytest.raises(ConfigError, match="something other than text in 'text'"):
            open_files([str(tmp_path / "a.jsonl")], streaming=streaming)

    def test_a_torn_line_is_the_reason(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "tw')
        with pytest.raises(ConfigError, match=r"a\.jsonl: ArrowInvalid: JSON parse error"):
            open_files([str(tmp_path / "a.jsonl")])

    @pytest.mark.parametrize("streaming", [False, True])
    def test_what_shows_only_when_it_is_read(self, streaming: bool, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        lines = [json.dumps({"text": name(0, number)}) for number in range(DOCUMENTS_PER_FILE)]
        file.write_bytes("\n".join(lines).encode() + b'\n{"text": "caf\xe9"}\n')  # Arrow takes it for UTF-8
        data = settings(tmp_path, files=[str(file)], streaming=streaming)
        expected = r"data: cannot read .*a\.jsonl: UnicodeDecodeError: "
        with pytest.raises(ConfigError, match=expected):
            list(sample_texts(data, 1.0))
        with pytest.raises(ConfigError, match=expected):
            build_datasets(data.model_copy(update={"num_eval_sequences": 3000}), TOKENIZER, 0, 1)

    def test_the_first_document(self, tmp_path: Path) -> None:
        lines = {"a.jsonl": '{"text": null}\n', "b.jsonl": '{"text": "one"}\n'}
        for file, line in lines.items():
            (tmp_path / file).write_text(line)
        read_first(settings(tmp_path, files=[str(tmp_path / "b.jsonl")]))
        with pytest.raises(ConfigError, match=r"a\.jsonl holds no text"):
            read_first(settings(tmp_path, files=[str(tmp_path / "a.jsonl")]))
        with pytest.raises(ConfigError, match=r"data: cannot read .*TypeError: Couldn't cast"):
            read_first(settings(tmp_path, files=[str(tmp_path / file) for file in lines]))

    @pytest.mark.parametrize("streaming", [False, True])
    def test_names_are_no_patterns(self, streaming: bool, tmp_path: Path) -> None:
        for name in ("a[1]", "a1", "b*", "bc"):
            (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
        files = [str(tmp_path / f"{name}.jsonl") for name in ("a[1]", "b*")]
        assert list(texts(open_files(files, streaming=streaming))) == ["a[1]", "b*"]

    def test_alternate(self, tmp_path: Path) -> None:
        for file in "abc":
            (tmp_path / f"{file}.txt").write_text("\n\n".join(f"{file}{number}" for number in range(ord(file) - 96)))
        sources = [open_files([str(tmp_path / f"{file}.txt")], streaming=True) for file in "abc"]
        assert list(alternate(sources)) == ["a0", "b0", "c0", "b1", "c1", "c2"]


def test_real_c4_files_stream_and_divide(shared_data: Path) -> None:
    files = sorted(str(path) for path in (shared_data / "c4" / "en").glob("c4-train.*.json.gz"))
    validation = [str(shared_data / "c4" / "en" / "c4-validation.00000-of-00001.json.gz")]
    data = DataBlock(source="files", files=files, eval_files=validation, streaming=True, sequence_length=256)
    islands = build(data, 3)
    assert [island.train.documents.num_shards for island in islands if isinstance(island.train, PackedStream)] == [
        3,
        3,
        2,
    ]
    firsts = {tuple(next(iter(island.train))["input_ids"].tolist()) for island in islands}
    assert len(firsts) == 3
    assert len(islands[0].evaluation) == 64
