"""Every setting, typed, on one page.

A configuration is a YAML file plus `key.path=value` overrides, validated once; what is not named keeps the default
below. Only `vit/build/` and the commands see this schema: everything else takes values as plain arguments.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.functional_validators import field_validator, model_validator

from vit.runtime.arguments import Precision, TrainSize, as_pair, check_multiple, resolve_image_sizes, shorten
from vit.runtime.documents import explain_error, parse_yaml
from vit.runtime.files import read_text

Size = int | tuple[int, int]  # pixels: a side, or (height, width)
Triple = tuple[float, float, float]
DropRate = Annotated[float, Field(ge=0, lt=1)]
AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]

# first name → present name; old ones are read wherever a configuration is
RENAMED_KEYS = {
    "data.crop_fraction": "data.crop_pct",
    "data.memory_share": "data.memory_fraction",
    "data.max_bad_share": "data.max_unreadable_fraction",
    "augment.erasing": "augment.re_prob",
    "model.pool": "model.global_pool",
    "train.accumulate": "train.grad_accum_steps",
    "train.activation_checkpointing": "train.grad_checkpointing",
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


class DataConfig(_Section):
    """Where the images come from, how they are split and brought to size."""

    name: str = "digits"  # cifar10, folder, …: one of vit.data.open.FINDERS
    root: str | None = None  # the folder of the images; for webdataset a shard pattern, address or pipe:command
    classes: list[str] | None = None  # a subset of the classes, by name or wnid
    class_names: AbsolutePath | dict[str, str] | None = None  # {class: name}, or a text file of classes and names
    image_size: Size = 32
    crop_pct: float | None = Field(None, gt=0, le=1)  # crop / resized side; None: the pretrained model's or 1
    mean: Triple | None = None  # None: measured on the training images, or the pretrained model's
    std: Triple | None = None
    validation_fraction: float = Field(0.1, ge=0, lt=1)
    split_seed: int = 0
    pipeline: Literal["auto", "resident", "workers"] = "auto"
    memory_fraction: float = Field(0.4, gt=0, le=1)  # of the device's memory, for pipeline auto
    workers: int | None = Field(None, ge=0)  # processes; None: one a core
    max_unreadable_fraction: float = Field(0.05, ge=0, le=1)  # more unreadable images are refused
    cache_dir: AbsolutePath | None = None  # of decoded images; None: $VIT_CACHE or ~/.cache/vit
    remote_cache_gb: float = Field(32.0, gt=0)  # most that the cache keeps of shards in object storage
    shuffle_window: int = Field(16_384, gt=0)  # images among which those of such shards are shuffled

    @field_validator("root")
    @classmethod
    def _absolute_root(cls, root: str | None, info: Any) -> str | None:
        """A folder stays the same one from every directory; shard patterns and commands are kept as written."""
        pattern = {"webdataset": r"[*?\[{$]|^pipe:|::|\.tar|://", "huggingface": "^hf:"}.get(info.data.get("name"))
        is_pattern = pattern is not None and re.search(pattern, root or "")
        return root if root is None or is_pattern else str(Path(root).expanduser().absolute())


class AugmentConfig(_Section):
    """Augmentation, drawn independently for every sample and epoch. All off by default."""

    crop_padding: int = Field(0, ge=0)  # pixels
    resized_crop_scale: tuple[float, float] | None = None  # fraction of the area
    flip: Literal["none", "random", "alternating"] = "none"
    cutout: int = Field(0, ge=0)  # side of the square, pixels
    re_prob: float = Field(0.0, ge=0, le=1)  # probability of random erasing
    color_jitter: float = Field(0.0, ge=0)
    rand_augment: tuple[int, float] | None = None  # operations, magnitude of 10
    trivial_augment: bool = False
    mixup: float = Field(0.0, ge=0)  # alpha of the Beta distribution
    cutmix: float = Field(0.0, ge=0)
    mix_until: float = Field(1.0, ge=0, le=1)  # fraction of the run after which mixup and cutmix stop

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.resized_crop_scale is not None:
            if not 0 < self.resized_crop_scale[0] <= self.resized_crop_scale[1] <= 1:
                raise ValueError(f"resized_crop_scale {self.resized_crop_scale} must rise within (0, 1]")
            if self.crop_padding:
                raise ValueError("crop_padding and resized_crop_scale are two ways to crop; choose one")
        if self.rand_augment is not None and self.trivial_augment:
            raise ValueError("rand_augment and trivial_augment are two policies; choose one")
        return self


class ModelConfig(_Section):
    """The vision transformer. `init` has its own architecture; `preset` names one that the keys given here change."""

    init: str | None = None  # timm:NAME, or the path of a model file
    preset: str | None = None  # such as timm's vit_tiny_patch16_224, or the smaller vit_micro_patch4_32
    patch_size: Size = 4
    stem: Literal["patch", "conv", "conv_pool", "conv_pool_residual"] = "patch"
    embed_dim: int = Field(192, gt=0, le=65_536)
    depth: int = Field(12, gt=0, le=1000)
    num_heads: int = Field(3, gt=0)
    mlp_ratio: float = Field(4.0, gt=0, le=64)
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"
    global_pool: Literal["token", "avg", "attention", "max"] = "token"
    pos_embed: Literal["learned", "sincos", "none"] = "learned"
    reg_tokens: int = Field(0, ge=0, le=8)
    qkv_bias: bool = True
    qk_norm: bool = False
    init_values: float | None = None  # LayerScale's start; None: no LayerScale
    drop_path_rate: float = Field(0.0, ge=0, lt=1)
    attention_backend: Literal["auto", "fused", "explicit"] = "auto"
    freeze: Literal["none", "backbone"] | int = "none"  # backbone: train the head alone; N: freeze N blocks


class OptimizerConfig(_Section):
    """`muon` updates the encoder's matrices and a stem's inner kernels with `muon_lr`, the rest by AdamW with `lr`."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    muon_lr: float = Field(0.02, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = Field(0.95, ge=0, lt=1)  # of sgd and muon
    layer_decay: float = Field(1.0, gt=0, le=1)  # learning-rate factor from a layer to the one below


class ScheduleConfig(_Section):
    """The learning rate over the run, stepped after every batch."""

    name: Literal["cosine", "linear", "constant-cooldown"] = "cosine"
    warmup_epochs: float = Field(0.0, ge=0)
    cooldown_fraction: float = Field(0.25, gt=0, le=1)  # of the run, for constant-cooldown


class TrainConfig(_Section):
    """The run itself."""

    epochs: int = Field(10, gt=0)
    max_steps: int | None = Field(None, gt=0)  # stops earlier than epochs, where given
    batch_size: int = Field(128, gt=0)  # images a step, over all processes
    grad_accum_steps: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"  # micro-batches a step
    seed: int = Field(0, ge=0)
    device: str = "auto"  # cpu, cuda or cuda:N; auto: a GPU where there is one
    precision: Literal["auto", Precision] = "auto"
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = True
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    clip_grad: float | None = Field(None, gt=0)  # L2 norm
    ema_decay: float | None = Field(None, gt=0, lt=1)
    # [(fraction of the run until which, value), …]; image sizes up to 1 are fractions of data.image_size, others pixels
    image_sizes: list[tuple[float, TrainSize]] | None = None  # [[0.6, 0.75], [1, 1]]: 3/4 of the side until 60 %
    patch_drop_rates: list[tuple[float, DropRate]] | None = None  # [[0.8, 0.5], [1, 0]]: half of the patches until 80 %
    grad_checkpointing: bool = False
    class_balance: Literal["none", "weights", "sampler", "auto"] = "none"  # auto: weights above 5:1
    select_by: Literal["top1", "macro_f1", "loss"] = "top1"  # the best model's measure, on the validation images
    early_stopping_patience: int | None = Field(None, gt=0)  # evaluations without a better one, then the run ends
    evaluate_every_epochs: int = Field(1, gt=0)
    checkpoint_every_steps: int | None = Field(None, gt=0)  # beside the one after every evaluation
    keep_every_epochs: int | None = Field(None, gt=0)  # checkpoints to keep for good, beside last and best
    keep_limit: int = Field(5, gt=0)  # of those
    attention_maps: int = Field(8, ge=0)  # validation images whose maps go to TensorBoard; none with fsdp
    on_nonfinite: Literal["stop", "skip"] = "stop"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    timeout_seconds: float = Field(600, gt=0)  # that processes wait for one that hangs, from the first step on


class Config(_Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.model.init is None and self.data.crop_pct is None:
            object.__setattr__(self, "data", self.data.model_copy(update={"crop_pct": 1.0}))
        model, train = self.model, self.train
        if model.init is None and model.preset is None:  # others have their own shape, checked when they are built
            check_multiple("model.embed_dim", model.embed_dim, "model.num_heads", model.num_heads)
            patch_size = as_pair(model.patch_size, name="model.patch_size")
            resolve_image_sizes(train.image_sizes, image_size=self.data.image_size, patch_size=patch_size)
        if train.early_stopping_patience and not self.data.validation_fraction:
            raise ValueError("train.early_stopping_patience needs validation images; data.validation_fraction is 0")
        if train.grad_accum_steps != "auto":
            check_multiple("train.batch_size", train.batch_size, "train.grad_accum_steps", train.grad_accum_steps)
        return self


def load_config(source: Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (or take the values it would hold), apply `key.path=value` overrides, validate the result.
    Raises ValueError with one sentence that names the key: an unknown one comes with the nearest known one."""
    if isinstance(source, Path):
        if not source.is_file():
            raise FileNotFoundError(f"configuration {source} does not exist")
        found = parse_yaml(read_text(source), origin=str(source)) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{source} holds a {type(found).__name__}, not sections such as data: and train:")
        source = found
    values = rename_old_keys(source or {})
    for override in overrides:
        _apply_override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(item) for item in error.errors()[:3])) from None


def restore_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values as they were first written, keys by their first names and sizes in pixels: for hashes
    that old files hold too."""
    restored = rename_old_keys(values, {new: old for old, new in RENAMED_KEYS.items()})
    model = values.get("model") or {}
    if (values.get("train") or {}).get("image_sizes") and not model.get("init") and not model.get("preset"):
        config = load_config(values)
        patch_size = as_pair(config.model.patch_size, name="model.patch_size")
        size = config.data.image_size
        sizes = resolve_image_sizes(config.train.image_sizes, image_size=size, patch_size=patch_size)
        pixels = [[until, size[0] if size[0] == size[1] else list(size)] for until, size in sizes]
        restored["train"]["image_sizes"] = pixels
    return restored


def rename_old_keys(values: Mapping[str, Any], names: Mapping[str, str] = RENAMED_KEYS) -> dict[str, Any]:
    """A configuration's values with every key under its present name."""
    renamed = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in values.items()}
    for old, new in names.items():
        (section, old_key), new_key = old.split("."), new.partition(".")[2]
        if isinstance(keys := renamed.get(section), dict) and old_key in keys:
            if new_key in keys:
                raise ValueError(f"{old} is the old name of {new}; give one of them")
            keys[new_key] = keys.pop(old_key)
    return renamed


def plain_values(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values: loading them again gives an equal one."""
    values = config.model_dump(mode="json")
    if config.model.preset is not None:  # what is not named is the preset's
        values["model"] = config.model.model_dump(mode="json", exclude_unset=True)
    return values


def flatten_config(config: Config) -> dict[str, Any]:
    """'section.key' → value."""
    sections = config.model_dump().items()
    return {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}


def dump_config(config: Config) -> str:
    """`plain_values` as YAML."""
    return yaml.safe_dump(plain_values(config), sort_keys=False)


def read_overrides(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `key.path=value` overrides give, as sections of plain values that are not yet validated."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply_override(values, override)
    return {name: keys for name, keys in values.items() if isinstance(keys, dict)}


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {shorten(override)!r} is not of the form key.path=value, such as train.epochs=20")
    *sections, last = RENAMED_KEYS.get(key, key).split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {shorten(override)!r}: {shorten(section)} is a value, not a section")
    try:
        values[last] = parse_yaml(text, origin=key)
    except ValueError:
        values[last] = text  # a name with a colon or a bracket in it


def _explain(error: Any) -> str:
    """One pydantic error as a sentence that names the key."""
    if error["type"] != "extra_forbidden":
        return explain_error(error)
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    known = list(flatten_config(Config()) if "." in key else Config.model_fields)
    # a right name in the wrong section is as common a slip as a misspelt one
    near = [name for name in known if name.rpartition(".")[2] == path[-1]]
    near = near or difflib.get_close_matches(shorten(key), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known sections: {', '.join(Config.model_fields)}"
    return f"unknown key {shorten(key)}; {hint}"
