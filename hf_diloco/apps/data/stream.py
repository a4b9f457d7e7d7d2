"""An endless stream of packed blocks that can resume at any block, without reading the blocks before it again.

Its position is saved with every checkpoint of the Trainer.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.apps.data.packing import Encoder, Example, example
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.trainer.arguments import examples_per_step
from hf_diloco.trainer.frames import move_before_trackers
from hf_diloco.utils.files import write_whole

if TYPE_CHECKING:
    from datasets import IterableDataset

logger = logging.getLogger("hf_diloco")

DOCUMENTS_PER_READ = 64
READS_AHEAD = 4
FILE_NAME = "data_position.json"

T = TypeVar("T")


class Position(NamedTuple):
    """The position at which a block begins.

    Attributes:
        num_blocks: blocks before it since the beginning of the run.
        epoch: complete passes over the documents before it.
        documents: state of the document stream before the read with the block's first token; None: the beginning.
        skip: tokens of that read before the block.
    """

    num_blocks: int
    epoch: int
    documents: dict[str, Any] | None
    skip: int


class _Read(NamedTuple):
    """The tokens of one read of documents, and the position of the read."""

    epoch: int
    state: dict[str, Any] | None
    tokens: np.ndarray[Any, np.dtype[np.int32]]


class PackedStream(TorchIterableDataset[Example]):
    """Tokenises, joins and cuts documents into blocks on the fly; starts over when the documents end.

    Iteration starts at `seek`'s position. Keeps the positions of recent blocks, because data loaders read ahead of
    training, and a checkpoint needs an earlier position. `documents` are the island's share, with the column `text`.
    """

    def __init__(self, documents: IterableDataset, encoder: Encoder, sequence_length: int) -> None:
        self.documents = documents
        self.encoder = encoder
        self.sequence_length = sequence_length
        self.start = Position(0, 0, None, 0)
        self._positions: deque[Position] = deque([self.start])

    def seek(self, position: Position) -> None:
        self.start = position
        self._positions = deque([position])

    def position(self, num_blocks: int) -> Position:
        """Returns the position of block `num_blocks`; drops all earlier positions.

        Raises `CheckpointError` if the position was not reached yet, or is dropped.
        """
        while self._positions and self._positions[0].num_blocks < num_blocks:
            self._positions.popleft()
        if not self._positions or self._positions[0].num_blocks != num_blocks:
            raise CheckpointError(f"the data stream does not know the position of block {num_blocks}")
        return self._positions[0]

    def __iter__(self) -> Iterator[Example]:
        start = self.start
        pending: deque[_Read] = deque()  # reads with tokens that are in no block yet
        skip, available, num_blocks = start.skip, -start.skip, start.num_blocks
        self._positions = deque([start])
        for read in read_ahead(self._reads(start), READS_AHEAD):
            pending.append(read)
            available += len(read.tokens)
            while available >= self.sequence_length:
                block, skip = _take(pending, skip, self.sequence_length)
                available -= self.sequence_length
                num_blocks += 1
                self._positions.append(Position(num_blocks, pending[0].epoch, pending[0].state, skip))
                yield example(block)

    def _reads(self, start: Position) -> Iterator[_Read]:
        """Yields tokenised reads of several documents each, endlessly."""
        epoch, state = start.epoch, start.documents
        documents = copy.copy(self.documents)
        while True:
            documents.set_epoch(epoch)
            if state is not None:
                documents.load_state_dict(state)
            is_empty = state is None
            rows = iter(documents)
            while texts := [row["text"] for row in islice(rows, DOCUMENTS_PER_READ)]:
                ids = self.encoder([text for text in texts if text and text.strip()])
                if ids:
                    yield _Read(epoch, state, np.concatenate([np.asarray(one, dtype=np.int32) for one in ids]))
                    is_empty = False
                state = documents.state_dict()
            if is_empty:
                raise ConfigError("data: this island's share of the stream holds no text")
            epoch, state = epoch + 1, None


def _take(pending: deque[_Read], skip: int, length: int) -> tuple[np.ndarray[Any, Any], int]:
    """Returns `length` tokens after the first `skip`, and the new skip; drops used reads except the last."""
    parts, missing = [], length
    while missing:
        part = pending[0].tokens[skip : skip + missing]
        parts.append(part)
        missing -= len(part)
        skip += len(part)
        if skip >= len(pending[0].tokens) and (missing or len(pending) > 1):
            skip -= len(pending[0].tokens)
            pending.popleft()
    return np.concatenate(parts), skip


def read_ahead(items: Iterator[T], size: int) -> Iterator[T]:
    """Yields the same items, none of which may be None, computing up to `size` of them ahead in a thread.

    From the first request on only the thread uses `items`. An error of it is raised in place of its item. The thread
    ends when the returned iterator is closed or garbage-collected, or when the main thread ends.
    """
    # No daemon thread: killed inside the tokenizer at interpreter exit, it could abort the process.
    pool = ThreadPoolExecutor(1, "hf-diloco-read-ahead")
    try:
        ready = deque(pool.submit(next, items, None) for _ in range(size))
        while (item := ready.popleft().result()) is not None:
            ready.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class DataPositionCallback(TrainerCallback):
    """Writes `checkpoint-N/data_position.json`, so that a resume does not read the stream from its beginning.

    Resume with `stream.seek(read_position(checkpoint))` and `TrainingArguments(ignore_data_skip=True)`, or with
    neither: the Trainer then reads the stream from its beginning, and skips what was trained on.

    Args:
        stream: the training data; rank 0 of the island reads it for all its ranks.
        restore_random_state: called once before the first step after a resume with `ignore_data_skip`: in this case
            the Trainer restores its random state before it creates the data loader, which draws a number. None: no-op.
    """

    def __init__(self, stream: PackedStream, restore_random_state: Callable[[], None] | None) -> None:
        self.stream = stream
        self._restore_random_state = restore_random_state
        self._first_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stores the stream's first step, and moves before the callback that records a checkpoint's files."""
        # If the Trainer skips data, it reads the stream from its beginning.
        self._first_step = state.global_step if args.ignore_data_skip else 0
        move_before_trackers(self)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restores the random state once, so that dropout draws the same as without an interruption."""
        if self._restore_random_state is not None:
            self._restore_random_state()
            self._restore_random_state = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drops the positions of blocks that have been trained on."""
        state.epoch = state.global_step / state.max_steps  # the Trainer restarts at 0 when it resumes a stream
        if args.process_index == 0:
            self._position(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the position of the first block after this checkpoint."""
        checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.process_index == 0 and checkpoint.is_dir():  # if not, the Trainer could not write it
            try:
                write_position(checkpoint, self._position(args, state))
            except OSError as error:
                logger.warning(
                    "%s cannot be written (%s): resumed from this checkpoint, the stream is read from its beginning",
                    checkpoint / FILE_NAME,
                    error.strerror,
                )

    def _position(self, args: TrainingArguments, state: TrainerState) -> Position:
        num_blocks = (state.global_step - self._first_step) * examples_per_step(args)
        return self.stream.position(self.stream.start.num_blocks + num_blocks)


def write_position(checkpoint: Path, position: Position) -> None:
    """Writes the position into a checkpoint folder, atomically."""
    write_whole(checkpoint / FILE_NAME, json.dumps(position._asdict()))


def read_position(checkpoint: Path) -> Position | None:
    """Reads the position from a checkpoint folder; None if it has none; raises `CheckpointError` if it is corrupt."""
    path = checkpoint / FILE_NAME
    if not path.exists():
        return None
    try:
        return Position(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it to resume by reading the data again") from None
