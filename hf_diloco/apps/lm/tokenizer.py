"""The tokenizer: from the Hub, a folder or a file, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.apps.common.hub import loading
from hf_diloco.apps.data.build import sample_texts
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.model import find_source
from hf_diloco.apps.lm.runfile import RunFile, TrainTokenizer
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_diloco.inner.island import IslandGroup

END_OF_TEXT = "<|endoftext|>"
MASK = "<mask>"
_MASK_NAMES = (MASK, "[MASK]")
_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<|im_end|>")


def build_tokenizer(run: RunFile, island: IslandGroup) -> PreTrainedTokenizerBase:
    """Loads or trains the run's tokenizer, equal on all islands, with end-of-text and padding tokens.

    The island's leader trains it for all ranks. Raises `ConfigError` if the tokenizer cannot be loaded, or lacks an
    end-of-text token, or a mask token if needed.
    """
    if run.tokenizer.train is None and (path := run.tokenizer.path or run.model.path):
        tokenizer = load_tokenizer(path)
    else:
        settings = run.tokenizer.train or TrainTokenizer()
        special = [END_OF_TEXT, MASK] if run.model.objective == "masked" else [END_OF_TEXT]
        from tokenizers import Tokenizer

        train = partial(train_tokenizer, run.data, settings, special)
        tokenizer = _wrap(Tokenizer.from_str(island.on_leader(lambda: str(train().backend_tokenizer.to_str()))))
    named = f"tokenizer.path: {run.tokenizer.path or run.model.path} names no"
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"{named} end-of-text (eos) token, which goes between documents; set eos_token in its "
            "tokenizer_config.json"
        )
    if run.model.objective == "masked" and tokenizer.mask_token is None:
        raise ConfigError(
            f"{named} mask token, which objective masked needs; set mask_token in its tokenizer_config.json, or train "
            "a tokenizer"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a Hub id, a folder (also with only vocab.json and merges.txt), a tokenizer.json or GGUF.

    Raises `ConfigError`, with the reason, if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder, source = Path(path), find_source(path, "tokenizer.path")
    with loading("tokenizer.path", path):
        if folder.suffix == ".json":
            from tokenizers import Tokenizer

            return _wrap(Tokenizer.from_file(path))
        if folder.is_file() and not source.options:
            raise ValueError("a file must be a tokenizer.json or a GGUF file")
        if folder.is_dir() and {file.name for file in folder.iterdir()} == {"vocab.json", "merges.txt"}:
            return _wrap(_byte_level(folder))
        return AutoTokenizer.from_pretrained(source.name, **source.options)


def train_tokenizer(
    data: DataBlock, settings: TrainTokenizer, special: Sequence[str] = (END_OF_TEXT,)
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE on the beginning of the corpus; equal text gives equal tokenizers on all islands."""
    return train_byte_level_bpe(sample_texts(data, settings.max_megabytes), settings.vocab_size, special)


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = (END_OF_TEXT,)
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE with special tokens: `<|endoftext|>`, and for masked models `<mask>`.

    It has at most `vocab_size` tokens; little text gives fewer. Special tokens never result from encoding text.
    """
    from tokenizers import pre_tokenizers, trainers

    tokenizer = _byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of everything that determines how the tokenizer encodes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps([tokenizer.eos_token_id, tokenizer.bos_token_id])
    return hashlib.sha256((content + special).encode()).hexdigest()[:16]


def _byte_level(folder: Path | None = None) -> Any:
    """Creates a byte-level BPE: untrained, or from a folder's vocab.json and merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    files = (str(folder / "vocab.json"), str(folder / "merges.txt")) if folder else None
    tokenizer = Tokenizer(models.BPE.from_file(*files) if files else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer: Any) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    vocabulary = tokenizer.get_vocab()
    end = next((name for name in _END_NAMES if name in vocabulary), None)
    mask = next((name for name in _MASK_NAMES if name in vocabulary), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token=end, pad_token=end, mask_token=mask
    )
