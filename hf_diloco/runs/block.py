"""What the blocks of a run file have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class Block(BaseModel):
    """A settings block of a run file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
