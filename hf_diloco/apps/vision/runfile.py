"""The run file of an image classifier: one YAML with the model, the data, TrainingArguments and the graph of nodes.

Reading it imports neither transformers nor, unless `payload` is another than fp32, torch: mistakes show at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from hf_diloco.apps.common.base import MODELS, BaseRun, check_model
from hf_diloco.apps.common.paths import NamedFiles
from hf_diloco.apps.common.yaml_file import KeyPath
from hf_diloco.config.base import Count, is_given
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.trainer.refusals import Where
from hf_diloco.utils.extras import need
from hf_diloco.utils.settings import Block, compile_pattern

ImagePreset = Literal["resnet-tiny", "vit-tiny", "resnet-18", "resnet-50"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

_MIN_STD = 0.001  # a quarter of one of the 255 steps of a pixel

# the sources that each setting applies to; settings for all sources are not listed
_USES = {
    "path": ("idx", "folder", "hub"),
    **dict.fromkeys(("name", "split", "eval_split", "image_column", "label_column"), ("hub",)),
    "label_names": ("idx",),
}


class ResizedCropBlock(Block):
    """A random part of the picture, stretched to the model's size (Szegedy et al., arXiv 1409.4842)."""

    scale: tuple[Positive, Positive] = Field(
        (0.08, 1.0), description="smallest and largest share of the area, up to 1"
    )
    ratio: tuple[Positive, Positive] = Field((0.75, 4 / 3), description="smallest and largest width / height")

    @model_validator(mode="after")
    def _check(self) -> ResizedCropBlock:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise ValueError(f"{name}: the smallest must come first, got [{low}, {high}]")
        if self.scale[1] > 1:
            raise ValueError(f"scale: a crop is at most the whole image (1.0), got {self.scale[1]}")
        return self


class AugmentBlock(Block):
    """Random changes of the training images, drawn anew in every epoch; none by default."""

    random_resized_crop: ResizedCropBlock | None = Field(
        None, description="a random part of the decoded picture, stretched to the model's size"
    )
    random_crop: int = Field(0, ge=0, le=256, description="pixels of black padding around the image before a crop")
    horizontal_flip: bool = Field(False, description="mirror every second image, at random")

    @property
    def is_active(self) -> bool:
        """Whether any image is changed."""
        return self.random_resized_crop is not None or self.random_crop > 0 or self.horizontal_flip


class NormalizeBlock(Block):
    """Mean and standard deviation of each channel, of pixels from 0 to 1."""

    mean: list[Finite] = Field(min_length=1, max_length=3, description="one for each channel, of pixels from 0 to 1")
    std: list[Positive] = Field(min_length=1, max_length=3, description="one for each channel, of pixels from 0 to 1")

    @model_validator(mode="after")
    def _check(self) -> NormalizeBlock:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels, but std has {len(self.std)}")
        for name, values, least in (("mean", self.mean, 0.0), ("std", self.std, _MIN_STD)):
            if not all(least <= value <= 1 for value in values):
                raise ValueError(
                    f"{name} is of pixels from 0 to 1, so between {least:g} and 1, got {values}; divide one of pixels "
                    "from 0 to 255 by 255"
                )
        return self


class ImageDataBlock(Block):
    """The images, and which of them a node sees."""

    source: Literal["digits", "idx", "folder", "hub"] = Field(
        "digits",
        description="digits: 1,797 of 8x8, in the package; idx: files as of MNIST; folder: train/CLASS/*.png, and "
        "validation, val or test; hub",
    )
    path: str | None = Field(
        None, description="sources idx and folder: the folder; source hub: a dataset's id or folder"
    )
    name: str | None = Field(None, description="source hub: the configuration of the dataset")
    split: str = Field("train", description="source hub: the split to train on")
    eval_split: str | None = Field(
        None, description="source hub: the split to evaluate on; null: a held-out part of split"
    )
    image_column: str = Field("image", description="source hub: the column that holds the image")
    label_column: str = Field("label", description="source hub: the column that holds the class")
    label_names: list[str] = Field([], description="source idx: names of the classes; empty: their numbers")
    held_out: float = Field(
        0.1, gt=0, lt=1, description="share of the examples to evaluate on if the source has no split for it"
    )
    image_size: Count | None = Field(
        None,
        le=2**14,
        description="pixels per side; null: the model's, or else the images' own (at least 28 for a resnet)",
    )
    augment: AugmentBlock = Field(AugmentBlock(), description="random changes of training images; none by default")
    normalize: NormalizeBlock | None = Field(
        None, description="mean and std; null: the checkpoint's, or else those of the whole training set"
    )
    shares: Literal["iid", "dirichlet"] = Field(
        "iid", description="iid: random shares; dirichlet: each node sees the classes in different proportions"
    )
    dirichlet_alpha: Positive = Field(
        1.0,
        le=10**9,
        description="shares dirichlet: concentration of all classes together; small: few classes per node",
    )
    max_train_examples: Count | None = Field(None, description="train on this many, chosen at random; null: all")
    max_eval_examples: Count | None = Field(None, description="evaluate on this many, chosen at random; null: all")

    @model_validator(mode="after")
    def _check(self) -> ImageDataBlock:
        changed = self.changed()
        for key, sources in _USES.items():
            if key in changed and self.source not in sources:
                raise ValueError(f"{key} belongs to source {' or '.join(sources)}, but source is {self.source}")
        if self.source != "digits" and not self.path:
            what = "the id of a dataset" if self.source == "hub" else "a folder"
            raise ValueError(f"path is missing: source {self.source} needs {what}")
        if "held_out" in changed and self.eval_split is not None:
            raise ValueError("held_out has no effect beside eval_split: leave one of them out")
        if "dirichlet_alpha" in changed and self.shares != "dirichlet":
            raise ValueError(f"dirichlet_alpha belongs to shares dirichlet, but shares is {self.shares}")
        if len(set(self.label_names)) != len(self.label_names):
            raise ValueError(f"label_names: every class needs a name of its own, got {self.label_names}")
        return self


class ImageModelBlock(Block):
    """The model: exactly one of `preset`, `path` and `config`."""

    preset: ImagePreset | None = Field(None, description="a known shape, trained from scratch")
    path: str | None = Field(
        None, description="hub id (also timm/...) or folder of a model whose training continues; it gets a new head"
    )
    config: dict[str, Any] | None = Field(
        None, description="any transformers configuration, from scratch: {model_type: resnet, depths: [1, 1], ...}"
    )
    frozen: list[str] = Field([], description="regular expressions; parameters whose names match are not trained")

    @model_validator(mode="after")
    def _check(self) -> ImageModelBlock:
        check_model(self.preset, self.path, self.config, "resnet")
        for pattern in self.frozen:
            compile_pattern("frozen", pattern)
        return self


class ScheduleBlock(Block):
    """The learning rate, beyond what TrainingArguments say of it."""

    lr_for_batch: Count | None = Field(
        None,
        description="training.learning_rate is for this many images per step of all nodes, and is scaled to the "
        "actual number; null: it is used as given",
    )
    drop_at: list[Count] = Field(
        [], description="steps at which the rate drops, after linear warm-up, instead of lr_scheduler_type"
    )
    drop_by: float = Field(0.1, gt=0, lt=1, description="the factor by which it drops")

    @model_validator(mode="after")
    def _check(self) -> ScheduleBlock:
        if sorted(set(self.drop_at)) != self.drop_at:
            raise ValueError(f"drop_at: steps must grow, got {self.drop_at}")
        if not self.drop_at and "drop_by" in self.changed():
            raise ValueError("drop_by has no effect without drop_at: give the steps at which the rate drops too")
        return self


class GossipBlock(GossipConfig):
    """`GossipConfig` as it stands in a run file, where the rendezvous may be left to whoever starts the nodes."""

    __init__ = BaseModel.__init__  # errors propagate to `read_run_file`, which knows the lines
    enabled: ClassVar[bool] = True  # nodes always exchange

    def _check_meeting(self) -> None:
        pass

    def resolve(self) -> GossipConfig:
        """Returns the complete settings of one node; raises `ConfigError` if several nodes have no rendezvous."""
        return GossipConfig(**self.model_dump(exclude=set() if is_given(self, "node") else {"node"}))

    @property
    def island(self) -> int:
        """This node's number, from 0."""
        return self.node

    @property
    def num_islands(self) -> int:
        """Nodes of the graph."""
        return self.num_nodes

    @property
    def num_shares(self) -> int:
        """Nodes that may ever take part."""
        return self.num_nodes

    @property
    def survives_losses(self) -> bool:
        """Whether the other nodes continue when one is lost: not if the method averages gradients over all nodes."""
        from hf_diloco.methods.gossip import find_method

        return find_method(self.method).num_vectors > 0


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
    alternatives: ClassVar[Mapping[str, tuple[str, ...]]] = {"model": MODELS}
    settings_of_order: ClassVar[tuple[KeyPath, ...]] = tuple(
        ("data", name)
        for name in ("source", "path", "name", "split", "shares", "dirichlet_alpha", "max_train_examples", "held_out")
    )

    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    deepspeed: None = Field(None, description="DeepSpeed is for language models: nodes average whole vectors")
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
    def _check_optimizer_and_schedule(self) -> VisionRun:
        if "optim" in self.training:
            raise ValueError("training.optim has no effect: nodes step with gossip.method; leave it out")
        for name in ("lr_scheduler_type", "lr_scheduler_kwargs") if self.schedule.drop_at else ():
            if (given := self.training.get(name)) is not None:
                raise ValueError(
                    f"schedule.drop_at and training.{name} ({given}) both say how the rate changes: leave one out"
                )
        if self.data.augment.is_active and self.training.get("dataloader_persistent_workers"):
            raise ValueError(
                "training.dataloader_persistent_workers: such workers would augment each epoch as the first; leave it "
                "out, or data.augment"
            )
        return self

    @property
    def meeting(self) -> GossipBlock:
        """The block with the number of nodes and the rendezvous."""
        return self.gossip

    def check(self) -> None:
        """Raises `ConfigError` if the method or graph does not exist, or the method does not converge on the graph."""
        from hf_diloco.trainer.gossip_start import check_gossip

        check_gossip(self.gossip)

    def check_extras(self) -> None:
        """Raises `ConfigError` if Pillow is missing."""
        need("a run of images", "PIL")

    def probes(self) -> Iterator[Callable[[], object]]:
        """Yields checks that load a given model's configuration, and open the pictures or a Hub dataset's metadata."""
        from hf_diloco.apps.vision.model import checkpoint_config
        from hf_diloco.apps.vision.sources import find_dataset, open_source

        if self.model.path is not None:
            yield partial(checkpoint_config, self.model.path)
        yield partial(find_dataset if self.data.source == "hub" else open_source, self.data)
