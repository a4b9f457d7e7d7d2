"""The run file of an image classifier: one YAML with the model, the data, TrainingArguments and the graph of nodes.

Reading it imports neither torch nor transformers, so that mistakes show at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.paths import NamedFiles
from hf_diloco.apps.vision.settings import GossipBlock, ImageDataBlock, ImageModelBlock, ScheduleBlock
from hf_diloco.trainer.refusals import Where
from hf_diloco.utils.extras import need


class VisionRun(BaseRun):
    """An image classifier's run: what is trained, on what, how, by which nodes, and where its folder is."""

    module: ClassVar[str] = "hf_diloco.apps.vision"
    meeting_name: ClassVar[str] = "gossip"
    unit: ClassVar[str] = "node"
    files: ClassVar[NamedFiles] = NamedFiles(
        paths=(("accelerate",), ("gossip", "key_file")),
        patterns=(("gossip", "identity_file"),),
        hub_ids_or_paths=(("model", "path"), ("data", "path")),
    )
    where: ClassVar[Where] = "nodes"
    alternatives: ClassVar[Mapping[str, tuple[str, ...]]] = {"model": ("preset", "path", "config")}

    fsdp: None = Field(None, description="FSDP is for language models: nodes average whole vectors")
    model: ImageModelBlock = Field(default_factory=lambda: ImageModelBlock(preset="resnet-tiny"))
    data: ImageDataBlock = ImageDataBlock()
    schedule: ScheduleBlock = ScheduleBlock()
    gossip: GossipBlock = Field(default_factory=GossipBlock)

    @field_validator("deepspeed", "fsdp", mode="before")
    @classmethod
    def _refuse_sharding(cls, given: Any, field: ValidationInfo) -> None:
        if given is not None:
            raise ValueError(
                "neighbours average whole parameter vectors after every step, which DeepSpeed and FSDP divide or keep "
                f"copies of: set {field.field_name} to null"
            )

    @model_validator(mode="after")
    def _check_schedule(self) -> VisionRun:
        kind = self.training.get("lr_scheduler_type")
        if self.schedule.drop_at and kind is not None:
            raise ValueError(
                f"schedule.drop_at and training.lr_scheduler_type ({kind}) both say how the rate changes: leave one "
                "out"
            )
        if self.data.augment.is_active and self.training.get("dataloader_persistent_workers"):
            raise ValueError(
                "training.dataloader_persistent_workers: such workers would augment each epoch as the first; leave it "
                "out, or data.augment"
            )
        return self

    @property
    def meeting(self) -> GossipBlock:
        """How many nodes there are and where they meet."""
        return self.gossip

    def check(self) -> None:
        """Raises `ConfigError` for a method or graph that does not exist, or a pair that does not converge."""
        from hf_diloco.trainer.gossip_start import check_gossip

        check_gossip(self.gossip)

    def check_extras(self) -> None:
        """Raises `ConfigError` if Pillow is missing."""
        need("a run of images", "PIL")

    def probes(self) -> Iterator[Callable[[], object]]:
        """Opens the configuration of a model that is loaded, and the pictures; of the Hub only their description."""
        from hf_diloco.apps.vision.hub import find_dataset
        from hf_diloco.apps.vision.preprocess import checkpoint_config
        from hf_diloco.apps.vision.sources import open_source

        if self.model.path is not None:
            yield partial(checkpoint_config, self.model.path)
        yield partial(find_dataset if self.data.source == "hub" else open_source, self.data)
