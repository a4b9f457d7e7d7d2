"""What an object holds, as its writer announces it, and every check that can be made before a byte of it is read.

Announcements come from other islands: nothing is allocated, and nothing is downloaded, on the word of one that does
not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import PayloadError
from hf_diloco.sealing.blocks import BLOCK_OVERHEAD

MAX_VALUES = 1 << 48
MAX_BLOCK_VALUES = 1 << 24
"""Values a block may have at most: 64 MiB of fp32, of which a reader holds a few."""
MAX_BLOCKS = 1 << 20

# No segment begins with a dot, so that no path leads out of the store's prefix.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_Path = Annotated[str, StringConstraints(pattern=f"^{_SEGMENT}(/{_SEGMENT})*$", max_length=512)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ObjectInfo(BaseModel):
    """One object: the code of a contiguous range of the canonical index space, in blocks that are checked singly.

    Block k holds the values from `start + k * block_values` on; the last one may be shorter. An object of no values
    has no blocks and need not exist.

    Attributes:
        format: version of the wire format (docs/codecs.md).
        path: where it lies, relative to the store's root.
        codec: name of the number format.
        start: canonical index of the first value; a block of the codec begins there.
        length: values.
        num_bytes: size of the object.
        block_values: values a block, but for the last.
        digests: SHA-256 of each block's bytes as they lie there, in hexadecimal.
        is_sealed: each block is encrypted, and so a little longer; see `sealing.blocks`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    path: _Path
    codec: str = Field(max_length=32)
    start: int = Field(ge=0, le=MAX_VALUES)
    length: int = Field(ge=0, le=MAX_VALUES)
    num_bytes: int = Field(ge=0, le=4 * MAX_VALUES)
    block_values: int = Field(ge=1, le=MAX_BLOCK_VALUES)
    digests: list[_Digest] = Field(max_length=MAX_BLOCKS)
    is_sealed: bool = False

    @field_validator("codec")
    @classmethod
    def _check_codec(cls, name: str) -> str:
        if name not in CODECS:
            raise ValueError(f"{name!r} is none of {', '.join(CODECS)}")
        return name

    @model_validator(mode="after")
    def _check_sizes(self) -> ObjectInfo:
        block_values = CODECS[self.codec].block_values
        if self.start % block_values or self.block_values % block_values:
            raise ValueError(
                f"start {self.start} and block_values {self.block_values} must be multiples of {self.codec}'s blocks "
                f"of {block_values} values"
            )
        num_blocks = -(-self.length // self.block_values)
        num_bytes = self.offset(num_blocks)
        if self.num_bytes != num_bytes:
            raise ValueError(f"{self.length} values of {self.codec} take {num_bytes} bytes, not {self.num_bytes}")
        if len(self.digests) != num_blocks:
            raise ValueError(
                f"{self.length} values in blocks of {self.block_values} have {num_blocks} digests, "
                f"not {len(self.digests)}"
            )
        return self

    @property
    def end(self) -> int:
        """Canonical index after the last value."""
        return self.start + self.length

    def blocks(self) -> list[tuple[int, int]]:
        """Where each block lies: first byte, and the one after the last."""
        return list(pairwise(self.offset(number) for number in range(len(self.digests) + 1)))

    def offset(self, number: int) -> int:
        """The byte at which a block begins; of the number after the last, the size of the object."""
        num_values = min(number * self.block_values, self.length)
        return CODECS[self.codec].num_bytes(num_values) + self.is_sealed * number * BLOCK_OVERHEAD


def read_info(record: object) -> ObjectInfo:
    """Makes an `ObjectInfo` of what another island wrote: the parsed JSON of one.

    Raises:
        PayloadError: it is not one, or its numbers do not fit each other.
    """
    try:
        return ObjectInfo.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(key) for key in first["loc"])[:80]
        path = record.get("path") if isinstance(record, dict) else record
        raise PayloadError(
            f"the announcement of the object {repr(path)[:200]} does not hold together "
            f"({f'{where!r}: ' if where else ''}{first['msg'][:200]}): leave its island out of the round, and see "
            "that it runs the same version of hf_diloco",
            path if isinstance(path, str) else "",
        ) from None


def find_cover(objects: Sequence[ObjectInfo], start: int, length: int, codec: Codec) -> list[ObjectInfo]:
    """Those of one participant's objects that hold part of `length` values from `start` on, in canonical order.

    Raises:
        PayloadError: the objects overlap, leave a gap or do not reach so far, or one is of another codec.
    """
    filled = sorted((info for info in objects if info.length), key=lambda info: info.start)
    for info in filled:
        if info.codec != codec.name:
            raise PayloadError(
                f"the object {info.path!r} is in {info.codec}, not {codec.name}: give all islands the same payload",
                info.path,
            )
    for before, after in pairwise(filled):
        if before.end != after.start:
            problem = "overlap" if after.start < before.end else "leave a gap"
            raise PayloadError(
                f"the objects {before.path!r} and {after.path!r} {problem}: the one ends at value {before.end}, the "
                f"other begins at {after.start}; leave their island out of the round",
                before.path,
            )
    cover = [info for info in filled if info.start < start + length and start < info.end]
    if length and not (cover and cover[0].start <= start and start + length <= cover[-1].end):
        held = (
            f"{filled[0].path!r} to {filled[-1].path!r}, {filled[0].start} to {filled[-1].end}" if filled else "none"
        )
        raise PayloadError(
            f"a participant's objects do not hold the values {start} to {start + length} (they are: {held}): leave "
            "it out of the round, and see that all islands train the same model",
            next((info.path for info in filled or objects), ""),
        )
    return cover


@dataclass(frozen=True)
class Block:
    """A block of which one reader needs the values from `low` to `high` (canonical).

    Attributes:
        participant: whose it is.
        info: the object.
        number: which of its blocks.
        low: first value needed.
        high: after the last value needed.
    """

    participant: int
    info: ObjectInfo
    number: int
    low: int
    high: int

    def locate(self) -> tuple[int, int]:
        """Where the whole block lies in its object: first byte, and the one after the last."""
        return self.info.offset(self.number), self.info.offset(self.number + 1)

    @property
    def num_skipped_bytes(self) -> int:
        """Bytes of the block before the first value needed."""
        return CODECS[self.info.codec].num_bytes(self.low - self.info.start - self.number * self.info.block_values)

    @property
    def num_needed_bytes(self) -> int:
        """Bytes of the values needed."""
        return CODECS[self.info.codec].num_bytes(self.high - self.low)


def iter_blocks(cover: Sequence[ObjectInfo], start: int, length: int, participant: int) -> Iterator[Block]:
    """The blocks that hold `length` values from `start` on, each once, in canonical order.

    Args:
        cover: what `find_cover` returned for the same range.
        start: canonical index of the first value needed.
        length: values needed.
        participant: whose objects they are.
    """
    for info in cover:
        low, high = max(start, info.start), min(start + length, info.end)
        while low < high:
            number = (low - info.start) // info.block_values
            end = min(high, info.start + (number + 1) * info.block_values)
            yield Block(participant, info, number, low, end)
            low = end
