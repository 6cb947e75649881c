"""What the JSON object of a model file may say: checked before anything is built of it."""

import math
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model

from vit.config import DataConfig, rename_old_keys
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import MOST_PIXELS
from vit.runtime.documents import check_schema

_Side = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
_Sides = tuple[_Side, _Side]
_MOST_PATCHES = 2**16


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# the arguments of a VisionTransformer that a file records: which of them fit together, the model says itself
_LIMITS: dict[str, Any] = {
    "in_chans": Field(ge=1, le=64),
    "num_classes": Field(ge=0, le=2**20),
    "embed_dim": Field(ge=1, le=2**16),
    "depth": Field(ge=1, le=1000),
    "num_heads": Field(ge=1, le=2**16),
    "mlp_ratio": Field(gt=0, le=64),
    "drop_path_rate": Field(ge=0, lt=1),
}
_TYPES = get_type_hints(VisionTransformer.__init__) | {"img_size": _Sides, "patch_size": _Sides}
_FIELDS: dict[str, Any] = {name: (kind, _LIMITS.get(name, ...)) for name, kind in _TYPES.items() if name != "return"}
ArchitectureValues = create_model("ArchitectureValues", __base__=_Values, **_FIELDS)


class PreprocessValues(_Values):
    """The arguments of a `Preprocess`."""

    image_size: _Sides
    crop_pct: float = 1.0
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"


class _RecordedData(DataConfig):
    model_config = ConfigDict(extra="ignore")  # a later version may record more


class _RecordedTrain(BaseModel):
    seed: int | None = None


class _Recorded(BaseModel):
    data: _RecordedData | None = None
    train: _RecordedTrain | None = None


class _Metadata(BaseModel):
    """What every model file says."""

    preprocess: PreprocessValues
    class_names: list[str] = Field(min_length=1)
    config: dict[str, dict[str, Any]]
    data: dict[str, Any]
    versions: dict[str, str] = {}
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    temperature_fitted_on: dict[str, str | int] = {}
    run_id: str | None = None


class Metadata(_Metadata):
    """The JSON object of the file of a `VisionTransformer`."""

    architecture: ArchitectureValues


class ModuleValues(_Values):
    """Another module: its class, and under which name timm builds it again for images of which size, if it does."""

    name: str
    timm: str | None = None
    img_size: _Sides | None = None


class ModuleMetadata(_Metadata):
    """The JSON object of the file of another module."""

    module: ModuleValues


def check_metadata(values: dict[str, Any], *, origin: str) -> dict[str, Any]:
    """`values` under their present names. Raises ValueError naming the first that is not what it must be."""
    values = dict(values)
    for section, old, new in (("architecture", "pool", "global_pool"), ("preprocess", "crop_fraction", "crop_pct")):
        if isinstance(values.get(section), dict):
            values[section] = {new if key == old else key: value for key, value in values[section].items()}
    if isinstance(values.get("config"), dict):
        values["config"] = rename_old_keys(values["config"])
    checked: Any = check_schema(ModuleMetadata if "module" in values else Metadata, values, origin=origin)
    check_schema(_Recorded, values["config"], origin=f"{origin}: config")
    sections = ("module" if "module" in values else "architecture", "preprocess")
    return values | {name: getattr(checked, name).model_dump() for name in sections}


def build_outline(architecture: dict[str, Any], *, origin: str) -> VisionTransformer:
    """The model with tensors that have shapes and no memory. Raises ValueError where the arguments don't fit together
    and for an image of more than 65,536 patches."""
    sides = zip(architecture["img_size"], architecture["patch_size"], strict=True)
    patches = math.prod(side // patch for side, patch in sides)
    if patches > _MOST_PATCHES:
        raise ValueError(f"{origin}: {patches:,} patches an image are more than {_MOST_PATCHES:,}")
    try:
        with torch.device("meta"):
            return VisionTransformer(**architecture)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{origin}: {error}") from error
