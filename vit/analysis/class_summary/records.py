"""The records of a summary, as summary.json holds them."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8

from vit.explanation.capture.tokens import Grid

# share of summaries that flag anything where no cluster matters more than the same shape elsewhere
FALSE_ALARM_RATE = 0.05


@dataclass(frozen=True)
class RegionShare:
    """Share of the relevance in a region of the image.

    Attributes:
        share: Mean over the images.
        null: The same for maps that are shifted at random, with wrap-around.
        null_low, null_high: Interval that holds 95 % of such random draws.
    """

    share: float
    null: float
    null_low: float
    null_high: float


@dataclass(frozen=True)
class Removal:
    """Effect of leaving a cluster out of images that the clustering did not see and that are
    predicted correctly, compared with leaving out a copy of its patches that is moved at random.

    Attributes:
        num_images: Images that were tested.
        flips, random_flips: Images whose prediction changes without the cluster, and without the
            copy.
        fall, random_fall: Mean fall of the probability of the class without them.
        log_odds: Median difference between the falls of the log-odds of the class.
        p_value: Sign test of whether the cluster matters more than the copy.
    """

    num_images: int
    flips: int
    random_flips: int
    fall: float
    random_fall: float
    log_odds: float
    p_value: float


@dataclass
class PatchCluster:
    """Patches that look alike to the model.

    Attributes:
        evidence: Share of the relevance of the class.
        patches: Share of the patches, in images in which the cluster occurs.
        images: Share of the images in which it occurs.
        overlap: Intersection over union of its patches in two images, mean over pairs.
        centre: Share of its patches in the middle of the image, half as high and wide.
        likeness: Correlation between the pixels of its patches in two images, mean over pairs.
        in_errors: Share of the images wrongly predicted as this class in which it occurs, and of
            the other images of other classes; None without labels or errors.
        removal: None where the cluster occurs in no image that could be tested.
        suspicions: Reasons why it may be a shortcut.
        is_flagged: It has suspicions, and the model depends on it.
        extent: Patches that show the same picture in all images in which the cluster occurs: the
            rest of a mark, left out together with it.
        strip: Image and patch of its most typical patches.
    """

    evidence: float
    patches: float
    images: float
    overlap: float
    centre: float
    likeness: float
    in_errors: tuple[float, float] | None = None
    removal: Removal | None = None
    suspicions: tuple[str, ...] = ()
    is_flagged: bool = False
    extent: list[int] = field(default_factory=list)
    strip: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class MaskSummary:
    """How far the model looks at, and needs, what lies inside the masks.

    Attributes:
        num_images: Images with a mask.
        inside: Share of the relevance inside the masks, mean over the images.
        area: Share of the area inside the masks.
        accuracy: Share of these images that are predicted correctly.
        accuracy_inside: The same without the patches that lie mostly outside.
    """

    num_images: int
    inside: float
    area: float
    accuracy: float
    accuracy_inside: float


@dataclass(frozen=True)
class ClassSummary:
    """How the model recognises one class.

    Attributes:
        name: The class.
        num_images: Images that were used.
        recall: Share of them that are predicted as this class.
        mean_map: Mean relevance of each patch, in multiples of the average patch.
        null_map: The same for maps that are shifted at random.
        border: An eighth of the height and width on each side.
        centre: The middle half of the height and width.
        clusters: The one with most of the evidence first.
        masks: None without masks.
    """

    name: str
    num_images: int
    recall: float
    mean_map: list[list[float]]
    null_map: list[list[float]]
    border: RegionShare
    centre: RegionShare
    clusters: list[PatchCluster]
    masks: MaskSummary | None


@dataclass(frozen=True, repr=False)
class Summary:
    """How a model recognises its classes.

    Attributes:
        classes: A summary for each class with enough images.
        left_out: Classes with too few images.
        model: The model's name.
        model_sha256: SHA-256 of its file.
        method: The map method.
        has_labels: False: the predicted class takes the place of the label.
        is_multilabel: An image may have several labels.
        grid: Rows and columns of patches.
        num_tests: Clusters that looked like a shortcut and were tested.
        false_alarm_rate: The rate that these tests share.
        pictures: Images of the strips and the mean image of each class, for the page.
    """

    classes: list[ClassSummary]
    left_out: list[str]
    model: str
    model_sha256: str
    method: str
    has_labels: bool
    grid: Grid
    num_tests: int
    false_alarm_rate: float = FALSE_ALARM_RATE
    is_multilabel: bool = False
    pictures: dict[str, UInt8[np.ndarray, "H W 3"]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        return (
            f"Summary({len(self.classes)} classes by {self.method};"
            f" {len(self.flagged)} likely shortcuts)"
        )

    @property
    def flagged(self) -> list[tuple[str, PatchCluster]]:
        """Class name and cluster of everything that is flagged."""
        return [
            (row.name, cluster)
            for row in self.classes
            for cluster in row.clusters
            if cluster.is_flagged
        ]
