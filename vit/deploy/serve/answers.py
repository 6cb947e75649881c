"""The JSON of `vit serve`. Its schema is at /openapi.json."""

from typing import Literal

from pydantic import BaseModel, Field

from vit.explanation.checks.sanity_checks import SanityCheck


class AnswerOptions(BaseModel):
    """Parameters of the address that a program may set.

    Attributes:
        map: The attention map over the photo, its values, or none.
        top_k: Number of classes; labels that are predicted are always among them.
        similar: Number of training images most similar to the photo.
        pictures: Add their pictures, where they can be read.
    """

    map: Literal["png", "array", "none"] = "none"
    top_k: int = Field(5, ge=1)
    similar: int = Field(0, ge=0, le=20)
    pictures: bool = False


class ClassProbability(BaseModel):
    """A class or label."""

    index: int
    name: str
    probability: float


class SimilarImage(BaseModel):
    """A training image similar to the photo, by the cosine of their features."""

    path: str
    class_name: str | None = Field(None, alias="class")
    similarity: float


class Map(BaseModel):
    """A map: its `values` on the patch grid, or a picture over the photo as a data address."""

    method: str
    title: str
    caption: str
    signed: bool
    sanity_check: SanityCheck | None
    label: str | None = None
    png: str | None = None
    values: list[list[float]] | None = None


class Answer(BaseModel):
    """The answer for a photo. Keys of what was not asked for are left out; `labels` and `maps` are
    there, instead of `map`, if a photo may have several labels."""

    classes: list[ClassProbability]
    note: Literal["", "unsure", "unusual"]
    prediction_set: list[str] | None
    p_value: float | None
    precision: str
    labels: list[str] | None = None
    similar: list[SimilarImage] | None = None
    similar_pictures: list[str | None] | None = None
    map: Map | None = None
    maps: list[Map] | None = None


class Refusal(BaseModel):
    """Why a request, or one of its photos, has no answer."""

    error: str


# a request of several photos gets a list, in their order
Answers = Answer | list[Answer | Refusal]


class Health(BaseModel):
    """The server and its model."""

    status: Literal["ok"] = "ok"
    version: str
    model: str
    sha256: str
    precision: str
    classes: list[str]
