"""Every setting of a run, typed, on one page.

A configuration is a YAML file plus `key.path=value` overrides, validated once. Only `vit/training/`
uses this schema: all other code takes plain values.
"""

import copy
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.functional_validators import field_validator, model_validator

from vit.runtime.arguments import Precision, as_pair, shorten
from vit.runtime.documents import read_yaml
from vit.runtime.files import expand_home

Triple = tuple[float, float, float]
Overrides = Sequence[str] | Mapping[str, Any]  # see `list_overrides`
Fraction = Annotated[float, Field(gt=0, le=1)]
DropRate = Annotated[float, Field(ge=0, lt=1)]


def _check_rising(values: Any) -> Any:
    """Refuse values, or ends of rows [end, value], that don't rise."""
    ends = [value[0] if isinstance(value, tuple) else value for value in values]
    if ends != sorted(set(ends)):
        raise ValueError(f"{ends} must rise")
    return values


def _make_absolute(place: str) -> str:
    """Make a path absolute. Names on the Hub and patterns stay as they are written."""
    path = expand_home(place).absolute()
    if not os.path.exists(path) and re.search(r"[*?\[{:]|\.tar", place):
        return place
    return str(path)


_RISING = AfterValidator(_check_rising)
Place = Annotated[str, AfterValidator(_make_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is wanted: pydantic would take them as 1 and 0. A
        path becomes text."""
        if isinstance(value, Path):
            return str(value)
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("true and false are not values of this key")
        return value


class DataConfig(_Section):
    """Source of the images, their splits and their size."""

    name: str = "digits"
    # folder of the images; shard pattern of a webdataset
    root: Place | None = None
    # see --label-by of vit train, and so on
    label_by: str | None = None
    path_column: str | None = None
    label_column: str | None = None
    split_column: str | None = None
    group_column: str | None = None
    # classes: one class an image; multilabel: any number of labels; null: as the labels look
    task: Literal["classes", "multilabel"] | None = None
    # subset of the classes, by name or wnid
    classes: list[str] | None = None
    # {class: name}, in words
    class_names: dict[str, str] | None = None
    # corrected labels: {path: class} or {path: cat|dog}, or the corrections.csv of vit audit
    corrections: Place | dict[str, str] | None = None
    # null: that of the weights (model.init)
    image_size: int | tuple[int, int] | None = 32
    # crop / resized side; None: the model's or 1
    crop_pct: float | None = Field(None, gt=0, le=1)
    # crop: the centre; stretch: the whole image; None: the model's or crop
    resize_mode: Literal["crop", "stretch"] | None = None
    # black and white of 16-bit and floating-point images; None: measured
    value_range: Annotated[tuple[float, float], _RISING] | None = None
    # None: the training images', or the pretrained model's
    mean: Triple | None = None
    std: Triple | None = None
    # fraction of the images for testing, if there is no test split
    test_fraction: float = Field(0.2, ge=0, lt=1)
    # fraction of the other images for validation, if there is no validation split
    validation_fraction: float = Field(0.1, ge=0, lt=1)
    split_seed: int = 0
    # see --group-by of vit train
    group_by: Annotated[int, Field(ge=1)] | str | None = None
    # true: near-duplicates and frames of one scene stay in one split
    group_duplicates: bool = False
    # resident: decoded once, kept in the device's memory; cached: decoded once, read from host
    # memory or a disk; workers: decoded during training; tokens: computed once by frozen blocks
    # (model.freeze: N), only flipped
    pipeline: Literal["auto", "resident", "cached", "workers", "tokens"] = "auto"
    # processes that decode images; None: one for each core, at most 16
    workers: int | None = Field(None, ge=0)
    max_unreadable_fraction: float = Field(0.05, ge=0, le=1)

    @property
    def size(self) -> tuple[int, int]:
        """`image_size` as (height, width). Raises ValueError for null, before it is known."""
        if self.image_size is None:
            raise ValueError("data.image_size=null takes that of the weights: set model.init, too")
        return as_pair(self.image_size, name="data.image_size")


class AugmentConfig(_Section):
    """Augmentation, drawn independently for each sample and epoch. All off by default."""

    # padding of random crops, pixels
    crop_padding: int = Field(0, ge=0)
    # smallest and largest area of random crops, as a fraction
    resized_crop_scale: Annotated[tuple[Fraction, Fraction], _RISING] | None = None
    flip: Literal["none", "random", "alternating"] = "none"
    # side of the square, pixels
    cutout: int = Field(0, ge=0)
    color_jitter: float = Field(0.0, ge=0)
    # alphas of Beta distributions
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    # fraction of the run after which mixup and cutmix stop
    mix_until: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_crops(self) -> Self:
        if self.resized_crop_scale and self.crop_padding:
            raise ValueError("crop_padding and resized_crop_scale are two ways to crop; choose one")
        return self


class ModelConfig(_Section):
    """The vision transformer. ViT-Ti has an `embed_dim` of 192, 12 blocks and 3 heads, ViT-S 384,
    12 and 6, ViT-B 768, 12 and 12. The weights of `init` have their own architecture."""

    # timm:NAME, or the path of a model file
    init: str | None = None
    patch_size: int | tuple[int, int] = 4
    stem: Literal["patch", "conv", "conv_pool", "conv_pool_residual", "conv_residual"] = "patch"
    embed_dim: int = Field(192, gt=0, le=65_536)
    depth: int = Field(12, gt=0, le=1000)
    num_heads: int = Field(3, gt=0)
    mlp_ratio: float = Field(4.0, gt=0, le=64)
    mlp: Literal["gelu", "relu2"] = "gelu"
    global_pool: Literal["token", "avg"] = "token"
    pos_embed: Literal["learned", "sincos"] = "learned"
    reg_tokens: int = Field(0, ge=0, le=8)
    qk_norm: bool = False
    drop_path_rate: float = Field(0.0, ge=0, lt=1)
    # with init: a linear probe of all training images, or a number, chooses block, pooling and head
    probe: bool | Annotated[int, Field(gt=1)] = False
    # backbone: train the head only; N: freeze N blocks
    freeze: Literal["none", "backbone"] | Annotated[int, Field(ge=0)] = "none"


class OptimizerConfig(_Section):
    """The optimizer. `muon` updates the encoder's matrices and the inner kernels of a stem with
    `muon_lr`, and all other weights by AdamW with `lr`. `sgd` has Nesterov momentum of 0.95."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    muon_lr: float = Field(0.02, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    # factor of the learning rate from a layer to the one below it
    layer_decay: float = Field(1.0, gt=0, le=1)


class ScheduleConfig(_Section):
    """The learning rate during the run."""

    # constant-cooldown: constant, then linear to 0 in the last quarter
    name: Literal["cosine", "linear", "constant-cooldown"] = "cosine"
    warmup_epochs: float = Field(0.0, ge=0)


class TrainConfig(_Section):
    """The training loop."""

    epochs: int = Field(10, gt=0)
    max_steps: int | None = Field(None, gt=0)
    # time limit in minutes: a slow run gets fewer steps
    max_minutes: float | None = Field(None, gt=0)
    # images in a step, of all processes together
    batch_size: int = Field(128, gt=0)
    # micro-batches in a step
    grad_accum_steps: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    seed: int = Field(0, ge=0)
    # cpu, cuda, cuda:N or mps; auto: an NVIDIA or AMD GPU if there is one
    device: str = "auto"
    precision: Literal["auto", Precision] = "auto"
    # true: the encoder blocks are compiled; auto: on a GPU, if the run is long enough
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = True
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    # largest L2 norm of the gradients
    clip_grad: float | None = Field(None, gt=0)
    ema_decay: float | None = Field(None, gt=0, lt=1)
    # [[0.6, 0.75], [1, 1]]: 3/4 of data.image_size until 60 % of the run, then all of it
    image_sizes: Annotated[list[tuple[Fraction, Fraction]], _RISING] | None = None
    # [[0.8, 0.5], [1, 0]]: half of the patches are left out until 80 % of the run
    patch_drop_rates: Annotated[list[tuple[Fraction, DropRate]], _RISING] | None = None
    grad_checkpointing: bool = False
    # auto: weights if the largest class has over 5 times the images of the smallest
    class_balance: Literal["none", "weights", "auto"] = "none"
    # chooses the best model; several labels have map (mean average precision) instead of top1
    select_by: Literal["top1", "macro_f1", "map"] = "top1"
    evaluate_every_epochs: int = Field(1, gt=0)
    # steps between checkpoints, besides those after an evaluation
    checkpoint_every_steps: int | None = Field(None, gt=0)


class Config(_Section):
    """The configuration of a run."""

    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check_image_size(self) -> Self:
        # Weights of model.init have their own patches, which are checked when they are loaded.
        if self.model.init is None:
            patches = as_pair(self.model.patch_size, name="model.patch_size")
            for side, patch in zip(self.data.size, patches, strict=True):
                if rest := side % patch:
                    raise ValueError(
                        f"data.image_size {side} is not a multiple of model.patch_size {patch};"
                        f" try {side + patch - rest}"
                    )
        return self

    def with_data(self, **changes: Any) -> Self:
        """Return a copy with other values in the section `data`."""
        return self.model_copy(update={"data": self.data.model_copy(update=changes)})


def load_config(source: Path | Mapping[str, Any] | None, overrides: Overrides = ()) -> Config:
    """Read and validate a configuration: a YAML file, a dictionary of its sections, or None for the
    defaults, with changes in order (`list_overrides`). Raises ValueError, whose sentence names the
    wrong key and for an unknown one the nearest known, or OSError."""
    if isinstance(source, Path):
        source = read_yaml(source)
    # A copy, because overrides must not change the caller's dictionaries.
    sections = copy.deepcopy(dict(source or {}))
    for key, value in list_overrides(overrides).items():
        section, _, name = key.partition(".")
        values = sections.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{shorten(key)}: {section} is a value, not a section")
        values[name] = value
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(item) for item in error.errors()[:3])) from None


def list_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return changes of a configuration by key.path: from texts such as "train.epochs=20", whose
    values are JSON or else text, or from a dictionary, which may have sections."""
    if not isinstance(overrides, Mapping):
        overrides = dict(map(_parse_override, overrides))
    values: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping) and "." not in key:
            values |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            values[key] = value
    return values


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{shorten(override)!r} is not of the form key.path=value")
    with suppress(ValueError):
        return key, json.loads(text)
    # A path or a word stays as it is written, whatever characters it has.
    return key, text


def values_to_save(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values."""
    values = config.model_dump(mode="json")
    # Keys that are not given come from the weights.
    if config.model.init is not None:
        values["model"] = config.model.model_dump(mode="json", exclude_unset=True)
    return values


def _explain(error: Any) -> str:
    """Return one of pydantic's errors as a sentence that names the key and the value."""
    # pydantic adds the names of its validators to the keys.
    parts = [str(part) for part in error["loc"]]
    key = ".".join(part for part in parts if not part.startswith(("function-", "literal[")))
    if error["type"] == "extra_forbidden":
        known = list(list_overrides(Config().model_dump()))
        # A right name in the wrong section is as common as a misspelled one.
        near = [name for name in known if name.endswith(f".{parts[-1]}")]
        near += difflib.get_close_matches(shorten(key), known, n=1, cutoff=0)
        return f"unknown key {shorten(key)}; did you mean {near[0]}? Leave out keys of old versions"
    message: str = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if error["type"] == "list_type":
        message += ' (as JSON, such as ["cat", "dog"])'
    return f"{shorten(key)}: {message}, not {shorten(repr(error['input']))}"
