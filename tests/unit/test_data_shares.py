"""Every document belongs to exactly one island, whatever the islands' number and size, and none to evaluation too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from hf_diloco.apps.data.build import files_of_island, is_held_out, share_documents, text_hash, without_held_out
from hf_diloco.apps.lm import assemble
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.errors import FingerprintError
from hf_diloco.membership.facts import Facts, compare_facts

DOCUMENTS_PER_SHARD = 4


def read_shards(shards: list[int]) -> Iterator[dict[str, str]]:
    for shard in shards:
        yield from ({"text": f"{shard}-{number}"} for number in range(DOCUMENTS_PER_SHARD))


def stream(num_shards: int) -> IterableDataset:
    return IterableDataset.from_generator(read_shards, gen_kwargs={"shards": list(range(num_shards))})


def all_texts(num_shards: int) -> Counter[str]:
    return Counter(row["text"] for row in read_shards(list(range(num_shards))))


def read_by_ranks(share: IterableDataset, num_ranks: int) -> Iterator[str]:
    """What the ranks of one island read when accelerate divides the island's share among them."""
    for rank in range(num_ranks):
        options: dict[str, Any] = {"num_processes": num_ranks, "process_index": rank}
        loader = DataLoader(share, batch_size=None)
        for row in prepare_data_loader(
            loader, **options, put_on_device=False, dispatch_batches=False, even_batches=False
        ):
            yield row["text"]


def test_1024_shards_over_islands_of_8_2_and_2_ranks() -> None:
    """Cutting for all 12 ranks at once reads 684 of these documents twice and 682 never."""
    ranks = [8, 2, 2]
    read = Counter(
        text
        for island, num_ranks in enumerate(ranks)
        for text in read_by_ranks(share_documents(stream(1024), island, len(ranks)), num_ranks)
    )
    assert read == all_texts(1024)


@pytest.mark.parametrize(("num_shards", "num_islands"), [(8, 2), (8, 3), (8, 8), (1, 1)])
def test_streams_are_cut_by_shards(num_shards: int, num_islands: int) -> None:
    shares = [share_documents(stream(num_shards), island, num_islands) for island in range(num_islands)]
    assert sum(share.num_shards for share in shares) == num_shards, "no island reads another's files"
    assert Counter(row["text"] for share in shares for row in share) == all_texts(num_shards)


@pytest.mark.parametrize(("num_shards", "num_islands"), [(1, 2), (2, 3), (3, 5)])
def test_streams_of_few_shards_are_cut_by_documents(num_shards: int, num_islands: int) -> None:
    with pytest.warns(UserWarning, match=f"{num_shards} files? cannot be divided among {num_islands} islands"):
        shares = [share_documents(stream(num_shards), island, num_islands) for island in range(num_islands)]
    assert Counter(row["text"] for share in shares for row in share) == all_texts(num_shards)


@given(num_documents=st.integers(0, 50), num_islands=st.integers(1, 8))
def test_finite_data_is_cut_by_documents(num_documents: int, num_islands: int) -> None:
    documents = Dataset.from_dict({"text": [str(number) for number in range(num_documents)]})
    shares = [share_documents(documents, island, num_islands)["text"] for island in range(num_islands)]
    assert Counter(text for share in shares for text in share) == Counter(documents["text"])
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(num_files=st.integers(0, 20), num_islands=st.integers(1, 8))
def test_domain_files(num_files: int, num_islands: int) -> None:
    files = [str(number) for number in range(num_files)]
    shares = [files_of_island(files, island, num_islands) for island in range(num_islands)]
    assert sorted(file for share in shares for file in share) == sorted(files)
    for island, share in enumerate(shares):
        assert all(int(file) % num_islands == island for file in share)


def test_held_out_documents_are_the_rest_of_the_stream() -> None:
    training = Counter(row["text"] for row in without_held_out(stream(300), 0.1))
    held_out = Counter(text for text in all_texts(300) if is_held_out(text, 0.1))
    assert training + held_out == all_texts(300)
    assert 0.05 < held_out.total() / all_texts(300).total() < 0.15


@given(st.text())
def test_hash_depends_on_the_text_alone(text: str) -> None:
    assert text_hash(text) == text_hash(text[:] + "")
    assert 0 <= text_hash(text) < 2**64
    assert is_held_out(text, 1.0)
    assert not is_held_out(text, 0.0)


def test_hash_is_the_same_on_every_machine() -> None:
    assert text_hash("naïve") == 0xBEF26892EEEB4CDC


def test_islands_that_share_in_other_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "tokenizer_hash", lambda _: "t")

    def facts(shares: str) -> Facts:
        run = RunFile.model_validate({"name": "x", "training": {"max_steps": 1}, "data": {"shares": shares}})
        data: Any = SimpleNamespace(eval_hash="e")
        return assemble.facts_of(run, data, data)

    with pytest.raises(FingerprintError, match=r"data.shares differs \(island 0: iid, island 1: same\)"):
        compare_facts([facts("iid"), facts("same")])
