"""What each class is recognised by, over many of its images: where on the image the relevance lies,
on which kinds of patches, and what the model answers without those. Made to find shortcuts: a
watermark, a frame, a background that stands for a class.

The images of a class are divided. On one half, patch tokens are clustered by k-means, weighted by
their relevance, and clusters that look like a shortcut are picked. On the other half each cluster
is left out of real forward passes, beside as many patches drawn at random; where the patches of a
cluster matter no more than others, either is equally likely to matter more in an image, so that
the number of images in which the cluster does is binomial (sign test). The tests of a summary
together have the stated rate of false alarms (Bonferroni).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from numpy.typing import NDArray
from scipy.special import bdtrc
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal, compute_without
from vit.explanation.methods.registry import compute_maps
from vit.model.logits import at_least_float32, compute_logits
from vit.runtime.device import copy_to_device
from vit.runtime.progress import show_progress

# of a summary in which no cluster matters more than random patches
FALSE_ALARM_RATE = 0.05
MAX_IMAGES_A_CLASS = 200
MIN_IMAGES_A_CLASS = 8
_NUM_CLUSTERS = 12
# of the tokens of a class, which are kept for the clustering: fewer images of large models
_MAX_TOKEN_BYTES = 1 << 29
# forward passes without a cluster, a class and cluster
_MAX_REMOVALS = 48
# images of other classes in which clusters are looked for
_MAX_OTHERS = 64
# patches nearest to the centre of a cluster that are shown, each of another image
_STRIP = 8
# draws of randomised positions
_NUM_DRAWS = 1000
# members of a cluster that lie nearer to its centre than this share of its relevance
_REACH = 0.95
# two images have a cluster at the same place where their patches overlap by half (intersection over
# union), and it is off-centre where at most a tenth of them lie in the middle
_SAME_PLACE = 0.5
_OFF_CENTRE = 0.1
# mean correlation of the pixels of its patches, in different images, and the most of an image's
# patches that it has
_SAME_PICTURE = 0.9
_SMALL = 0.1
# images whose patches are compared
_MAX_COMPARED = 50
# images that show the same picture at the same place: a sign test of fewer has no p-value below 5 %
_MIN_SAME_PICTURE = 5
# of the variance of other images at the same place, where a patch is the same picture as in others
_SAME_VARIANCE = 0.25
# on fewer patches nothing is off-centre
_MIN_PATCHES = 36
# leaving a cluster out is of consequence where it takes a third of the odds of the class, more than
# random patches do
_MIN_LOG_ODDS = math.log(1.5)

Relevance = Float[np.ndarray, "n P"]
# of patches, that enter S of the blocks
PatchTokens = Float[np.ndarray, "n P S D"]
PatchMask = Bool[np.ndarray, "n P"]


@dataclass(frozen=True)
class SummaryImages:
    """Images to summarise.

    Args:
        pixels: as the model sees them.
        classes: the label of each image; None without labels, where the predicted class is taken.
        paths: what pages call them.
        masks: 1 where a pixel lies on the object, else 0; NaN in an image without a mask. None
            where there are no masks.
    """

    pixels: UInt8[np.ndarray, "n H W 3"]
    classes: NDArray[np.int64] | None
    paths: Sequence[str]
    masks: Float[np.ndarray, "n H W"] | None = None


@dataclass(frozen=True)
class RegionShare:
    """The share of the relevance in a region, beside that of maps that are moved at random (with
    wrap-around, each image's by itself): mean, and the interval that holds 95 % of draws."""

    share: float
    null: float
    null_low: float
    null_high: float


@dataclass(frozen=True)
class Removal:
    """What the model answers without the patches of a cluster, in images that the clustering did
    not see and that are answered correctly; beside as many patches drawn at random."""

    num_images: int
    # images whose answer changes
    flips: int
    random_flips: int
    # of the class's probability, mean
    fall: float
    random_fall: float
    # of the log-odds of the class, the median of the difference to random patches
    log_odds: float
    # of the sign test that the cluster matters more than random patches
    p_value: float


@dataclass
class PatchCluster:
    """Patches that the model sees alike.

    Args:
        evidence: share of the class's relevance.
        patches: share of the patches, of images in which it occurs.
        images: share of the images in which it occurs.
        overlap: of its places in two images, intersection over union, mean over pairs.
        centre: share of its patches in the middle of the image, half as high and wide.
        likeness: correlation of the pixels of a patch of it, drawn at random, between images; mean
            over pairs.
        in_errors: share of the images wrongly taken for this class in which it occurs, and of other
            images of other classes; None without errors or labels.
        removal: None where it occurs in no held-out image.
        suspicions: why it may be a shortcut.
        is_flagged: it has suspicions, and the model depends on it.
        extent: patches that are the same picture in all images in which it occurs, and in others
            not: the rest of a mark. They are left out with it.
        strip: path of image, and patch, of its most typical patches.
    """

    evidence: float
    patches: float
    images: float
    overlap: float
    centre: float
    likeness: float
    in_errors: tuple[float, float] | None
    removal: Removal | None
    suspicions: tuple[str, ...]
    is_flagged: bool
    extent: list[int]
    strip: list[tuple[str, int]]


@dataclass(frozen=True)
class MaskSummary:
    """How much the model looks at, and needs, what lies inside the masks."""

    num_images: int
    # of the relevance, mean; and of the area
    inside: float
    area: float
    # of the images as they are, and without the patches that lie outside for the most part
    accuracy: float
    accuracy_inside: float


@dataclass(frozen=True)
class ClassSummary:
    """What one class is recognised by."""

    name: str
    num_images: int
    # share that is predicted as this class
    recall: float
    # mean relevance of each patch, in multiples of an even share, and of moved maps
    mean_map: list[list[float]]
    null_map: list[list[float]]
    border: RegionShare
    centre: RegionShare
    # the one with most of the evidence first
    clusters: list[PatchCluster]
    masks: MaskSummary | None


@dataclass(frozen=True, repr=False)
class Summary:
    """What the classes of a model are recognised by."""

    classes: list[ClassSummary]
    # classes with too few images
    left_out: list[str]
    model: str
    model_sha256: str
    method: str
    has_labels: bool
    grid: Grid
    # clusters that looked like a shortcut and were tested, and the rate that their tests share
    num_tests: int
    false_alarm_rate: float = FALSE_ALARM_RATE
    # for the page: the images of the strips, and the mean image of each class
    pictures: dict[str, UInt8[np.ndarray, "H W 3"]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        return (
            f"Summary({len(self.classes)} classes by {self.method};"
            f" {len(self.flagged)} likely shortcuts)"
        )

    @property
    def flagged(self) -> list[tuple[str, PatchCluster]]:
        """Name of the class and cluster, of all that are flagged."""
        return [
            (row.name, cluster)
            for row in self.classes
            for cluster in row.clusters
            if cluster.is_flagged
        ]

    def to_dict(self) -> dict[str, object]:
        """What summary.json holds."""
        content = asdict(self)
        del content["pictures"]
        return content


class _Explained(NamedTuple):
    """Images of a class with the relevance and the tokens of their patches."""

    indices: NDArray[np.int64]
    relevance: Relevance
    tokens: PatchTokens


class _Assignment(NamedTuple):
    """The cluster of each patch, [n, P], -1 for none: of both halves of a class, and of images of
    other classes, wrongly taken for this one and others."""

    seen: NDArray[np.int64]
    # to the centre of its cluster
    distances: Relevance
    held_out: NDArray[np.int64]
    others: tuple[NDArray[np.int64], NDArray[np.int64]] | None


class _Clusters(NamedTuple):
    """A clustering of tokens."""

    mean: Float[np.ndarray, "S D"]
    centres: Float[np.ndarray, "K SD"]
    # distances within which tokens belong to a cluster
    reach: Float[np.ndarray, " K"]

    def find(self, tokens: PatchTokens) -> tuple[NDArray[np.int64], Relevance]:
        """The cluster of each patch, [n, P], -1 for those that are far from all; and the distance
        to its centre."""
        units = _center(tokens, self.mean)
        squares = (self.centres**2).sum(axis=1) - 2 * units @ self.centres.T
        nearest = squares.argmin(axis=-1)
        squared = np.take_along_axis(squares, nearest[..., None], axis=-1)[..., 0]
        squared += (units**2).sum(axis=-1)
        distances = np.sqrt(np.maximum(squared, 0))
        return np.where(distances <= self.reach[nearest], nearest, -1), distances


def summarize_classes(
    bundle: Bundle,
    images: SummaryImages,
    *,
    method: str,
    batch_size: int = 16,
    seed: int = 0,
) -> Summary:
    """Summarise what each class is recognised by.

    Args:
        bundle: the model.
        images: with their classes; at most `MAX_IMAGES_A_CLASS` of each are used.
        method: of the maps; of a signed one what speaks for the class.
        batch_size: images at a time.
        seed: of what is drawn: halves of the images, random patches, moved maps.

    Raises:
        ValueError: no class has `MIN_IMAGES_A_CLASS` images, or an unknown method.
    """
    return _Summarizer(bundle, images, method, batch_size, seed).run()


class _Summarizer:
    def __init__(
        self, bundle: Bundle, images: SummaryImages, method: str, batch_size: int, seed: int
    ) -> None:
        self.bundle = bundle
        self.images = images
        self.method = method
        self.batch_size = batch_size
        self.random = np.random.default_rng(seed)
        self.place_of_path = {path: place for place, path in enumerate(images.paths)}
        self.device = next(bundle.model.parameters()).device
        self.predicted = self._predict()
        self.has_labels = images.classes is not None
        self.classes = self.predicted if images.classes is None else images.classes
        first = self._run(np.arange(1))
        self.grid: Grid = first.grid
        images_in_memory = _MAX_TOKEN_BYTES // _take_tokens(first).nbytes
        self.images_a_class = max(min(images_in_memory, MAX_IMAGES_A_CLASS), MIN_IMAGES_A_CLASS)
        self.num_patches = math.prod(self.grid)

    def run(self) -> Summary:
        names = self.bundle.class_names
        counts = np.bincount(self.classes, minlength=len(names))
        is_present = counts >= MIN_IMAGES_A_CLASS
        if not is_present.any():
            raise ValueError(
                f"no class has {MIN_IMAGES_A_CLASS} images, which a summary needs; the most has"
                f" {names[counts.argmax()]!r} with {counts.max()}"
            )
        chosen = np.flatnonzero(is_present).tolist()
        total = int(np.minimum(counts[chosen], self.images_a_class).sum())
        classes = []
        pictures: dict[str, UInt8[np.ndarray, "H W 3"]] = {}
        with show_progress("summarising", total) as advance:
            for index in chosen:
                classes.append(self._summarize(index, pictures, advance))

        # how many are tested is known once all classes are
        clusters = [cluster for summary in classes for cluster in summary.clusters]
        num_tests = sum(bool(cluster.suspicions) for cluster in clusters)
        for cluster in clusters:
            # one that may be a shortcut, where the model depends on it
            removal = cluster.removal
            cluster.is_flagged = (
                bool(cluster.suspicions)
                and removal is not None
                and removal.p_value <= FALSE_ALARM_RATE / num_tests
                and removal.log_odds >= _MIN_LOG_ODDS
            )
        return Summary(
            classes=classes,
            left_out=[names[index] for index in np.flatnonzero(~is_present & (counts > 0))],
            model=self.bundle.name,
            model_sha256=self.bundle.sha256,
            method=self.method,
            has_labels=self.has_labels,
            grid=self.grid,
            num_tests=num_tests,
            pictures=pictures,
        )

    def _summarize(
        self,
        class_index: int,
        pictures: dict[str, UInt8[np.ndarray, "H W 3"]],
        advance: Callable[[float], object],
    ) -> ClassSummary:
        name = self.bundle.class_names[class_index]
        indices = np.flatnonzero(self.classes == class_index)
        indices = self.random.permutation(indices)[: self.images_a_class]
        explained = self._explain(indices, class_index, advance)
        half = len(indices) // 2
        seen = _Explained(*(part[:half] for part in explained))
        held_out = _Explained(*(part[half:] for part in explained))

        clusters = _cluster(seen, seed=int(self.random.integers(1 << 31)))
        assigned, distances = clusters.find(seen.tokens)
        assignment = _Assignment(
            seen=assigned,
            distances=distances,
            held_out=clusters.find(held_out.tokens)[0],
            others=self._find_others(class_index, clusters),
        )
        num_clusters = len(clusters.centres)
        num_marks = self._separate_marks(assignment, seen.indices, num_clusters)
        rows = []
        for number in range(num_clusters + num_marks):
            # one that was a mark alone is empty now
            if (assigned == number).any():
                is_mark = number >= num_clusters
                row = self._describe(number, is_mark, class_index, assignment, (seen, held_out))
                rows.append(row)
        rows.sort(key=lambda row: -row.evidence)

        relevance = explained.relevance
        maps = relevance.reshape(-1, *self.grid)
        border, centre = _regions(self.grid)
        pictures |= {
            path: self.images.pixels[self.place_of_path[path]]
            for row in rows
            for path, _ in row.strip
        }
        mean_image = self.images.pixels[indices].mean(axis=0)
        pictures[f"mean of {name}"] = mean_image.round().astype(np.uint8)
        return ClassSummary(
            name=name,
            num_images=len(indices),
            recall=float((self.predicted[indices] == class_index).mean()),
            mean_map=(maps.mean(axis=0) * self.num_patches).tolist(),
            null_map=(_move(maps, self.random).mean(axis=0) * self.num_patches).tolist(),
            border=_measure_region(maps, border, self.random),
            centre=_measure_region(maps, centre, self.random),
            clusters=rows,
            masks=self._measure_masks(explained, class_index),
        )

    def _describe(
        self,
        number: int,
        is_mark: bool,
        class_index: int,
        assignment: _Assignment,
        halves: tuple[_Explained, _Explained],
    ) -> PatchCluster:
        seen, held_out = halves
        others = assignment.others
        members = assignment.seen == number
        occurs = members.any(axis=1)
        in_images = members[occurs]
        strip = self._choose_strip(seen, np.where(members, assignment.distances, np.inf))
        _, centre = _regions(self.grid)
        in_errors = None
        if others is not None:
            wrong, right = (float((rows == number).any(axis=1).mean()) for rows in others)
            in_errors = (wrong, right)
        patches = 0.0
        centre_share = 0.0
        if occurs.any():
            patches = float(in_images.mean())
            centre_share = float(in_images[:, centre.ravel()].sum() / in_images.sum())
        overlap = _measure_overlap(in_images)
        likeness = self._measure_likeness(seen.indices[occurs], in_images)
        in_more_errors = others is not None and _is_more_frequent(others, number)
        suspicions = self._suspect(
            is_mark=is_mark,
            patches=patches,
            overlap=overlap,
            centre=centre_share,
            likeness=likeness,
            in_more_errors=in_more_errors,
        )
        extent = np.zeros(self.num_patches, dtype=bool)
        if suspicions:
            extent = self._find_extent(seen.indices[occurs])
        # a mark that is left out in part may be recognised by the rest
        held_out_members = assignment.held_out == number
        held_out_members |= held_out_members.any(axis=1, keepdims=True) & extent
        return PatchCluster(
            evidence=float(seen.relevance[members].sum() / max(seen.relevance.sum(), 1e-12)),
            patches=patches,
            images=float(occurs.mean()),
            overlap=overlap,
            centre=centre_share,
            likeness=likeness,
            in_errors=in_errors,
            removal=self._remove(held_out_members, held_out, class_index),
            suspicions=suspicions,
            is_flagged=False,
            extent=np.flatnonzero(extent).tolist(),
            strip=[(self.images.paths[image], patch) for image, patch in strip],
        )

    def _suspect(
        self,
        *,
        is_mark: bool,
        patches: float,
        overlap: float,
        centre: float,
        likeness: float,
        in_more_errors: bool,
    ) -> tuple[str, ...]:
        """Why a cluster may be a shortcut: nothing of it is seen in the images it is tested on."""
        # on a coarse grid every object is at the same place
        if self.num_patches < _MIN_PATCHES:
            return ()
        suspicions = []
        if is_mark:
            suspicions.append("the same picture at the same place in different images")
        if overlap >= _SAME_PLACE and centre <= _OFF_CENTRE:
            suspicions.append("at the same place off the centre")
        if likeness >= _SAME_PICTURE and patches <= _SMALL:
            suspicions.append("small, and the same picture in different images")
        # alone it is none: what a class is known by misleads in other classes as well
        if suspicions and in_more_errors:
            suspicions.append("more often in images wrongly taken for this class than in others")
        return tuple(suspicions)

    def _separate_marks(
        self, assignment: _Assignment, indices: NDArray[np.int64], num_clusters: int
    ) -> int:
        """Give marks clusters of their own, numbered from `num_clusters` on, and count them.

        The model may see a mark and parts of the object alike, so that a cluster joins both, or
        sees each patch of a mark unlike the next, so that the mark is in many clusters.
        """
        arrays = [assignment.seen, assignment.held_out, *(assignment.others or ())]
        num_marks = 0
        for number in range(num_clusters):
            place = self._find_place(indices, assignment.seen == number)
            if place is None:
                continue
            extent = self._find_extent(indices[assignment.seen[:, place] == number])
            extent[place] = True
            for assigned in arrays:
                has_mark = assigned[:, [place]] == number
                assigned[has_mark & extent] = num_clusters + num_marks
            num_marks += 1
        return num_marks

    def _find_place(self, indices: NDArray[np.int64], members: PatchMask) -> int | None:
        """The patch off the centre at which most images have a cluster, where they show the same
        picture there."""
        _, centre = _regions(self.grid)
        counts = np.where(centre.ravel(), 0, members.sum(axis=0))
        place = int(counts.argmax())
        if self.num_patches < _MIN_PATCHES or counts[place] < _MIN_SAME_PICTURE:
            return None
        chosen = np.flatnonzero(members[:, place])
        at_place = np.zeros((len(chosen), self.num_patches), dtype=bool)
        at_place[:, place] = True
        likeness = self._measure_likeness(indices[chosen], at_place)
        return place if likeness >= _SAME_PICTURE else None

    def _find_extent(self, indices: NDArray[np.int64]) -> Bool[np.ndarray, " P"]:
        """The patches whose pixels vary little between these images, beside others of any class."""
        others = np.delete(np.arange(len(self.images.pixels)), indices)
        if len(indices) < 2 or len(others) < 2:
            return np.zeros(self.num_patches, dtype=bool)
        variances = [
            self.images.pixels[chosen[:MAX_IMAGES_A_CLASS]].astype(np.float32).var(axis=0).mean(-1)
            for chosen in (indices, self.random.permutation(others))
        ]
        here, elsewhere = _average_patches(np.stack(variances), self.grid)
        return np.asarray(here < _SAME_VARIANCE * elsewhere)

    # --- forward passes

    def _normalize(self, indices: NDArray[np.int64]) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(self.images.pixels[indices]))
        return self.bundle.preprocess.normalize(copy_to_device(pixels, self.device))

    def _split(self, indices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        starts = range(0, len(indices), self.batch_size)
        return [indices[start : start + self.batch_size] for start in starts]

    @torch.no_grad()
    def _predict(self) -> NDArray[np.int64]:
        logits = [
            compute_logits(self.bundle.model, self._normalize(batch)).argmax(dim=1).cpu().numpy()
            for batch in self._split(np.arange(len(self.images.pixels)))
        ]
        return np.concatenate(logits)

    def _run(self, indices: NDArray[np.int64]) -> Forward:
        return run_forward(
            self.bundle.model, self._normalize(indices), block_tokens=True, verify=False
        )

    def _explain(
        self, indices: NDArray[np.int64], class_index: int, advance: Callable[[float], object]
    ) -> _Explained:
        """The relevance of each patch for the class, of which an image's sum to one, and its
        tokens."""
        relevance = []
        tokens = []
        for batch in self._split(indices):
            forward, _, (maps,) = compute_maps(
                self.bundle.model,
                self._normalize(batch),
                methods=[self.method],
                choose_targets=lambda logits: logits.new_full(
                    (len(logits), 1), class_index, dtype=torch.long
                ),
                block_tokens=True,
            )
            # what speaks against a class is no evidence for it
            values = maps.values[:, 0].flatten(1).clamp_min(0)
            relevance.append((values / values.sum(dim=1, keepdim=True).clamp_min(1e-12)).cpu())
            tokens.append(_take_tokens(forward))
            advance(len(batch))
        return _Explained(indices, torch.cat(relevance).numpy(), np.concatenate(tokens))

    def _find_others(
        self, class_index: int, clusters: _Clusters
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The clusters of the patches of images of other classes: of those wrongly taken for this
        one, and of others; None without labels or errors."""
        is_other = self.classes != class_index
        wrong = np.flatnonzero(is_other & (self.predicted == class_index))
        right = np.flatnonzero(is_other & (self.predicted != class_index))
        if not (self.has_labels and len(wrong) and len(right)):
            return None
        assigned = []
        for indices in (wrong, right):
            chosen = self.random.permutation(indices)[:_MAX_OTHERS]
            tokens = [_take_tokens(self._run(batch)) for batch in self._split(chosen)]
            assigned.append(clusters.find(np.concatenate(tokens))[0])
        return assigned[0], assigned[1]

    def _remove(self, members: PatchMask, held_out: _Explained, class_index: int) -> Removal | None:
        """Leave a cluster out of the held-out images in which it occurs."""
        num_members = members.sum(axis=1)
        is_answered = self.predicted[held_out.indices] == class_index
        # something must stay
        rows = np.flatnonzero((num_members > 0) & (num_members < self.num_patches) & is_answered)
        rows = rows[:_MAX_REMOVALS]
        if not len(rows):
            return None
        removed = members[rows]
        # as many patches of each image, drawn at random
        ranks = self.random.random(removed.shape).argsort(axis=1).argsort(axis=1)
        at_random = ranks < num_members[rows, None]
        nothing = np.zeros_like(removed)
        logits = self.leave_out(
            held_out.indices[np.tile(rows, 3)], np.concatenate([nothing, removed, at_random])
        )
        probabilities, log_odds = _read_class(logits, class_index)
        unchanged, without, without_random = probabilities.reshape(3, -1)
        odds = log_odds.reshape(3, -1)
        # how much more the odds fall than without random patches
        differences = odds[2] - odds[1]
        answers = logits.argmax(dim=1).cpu().numpy().reshape(3, -1)
        num_worse = int((differences > 0).sum())
        return Removal(
            num_images=len(rows),
            flips=int((answers[1] != class_index).sum()),
            random_flips=int((answers[2] != class_index).sum()),
            fall=float((unchanged - without).mean()),
            random_fall=float((unchanged - without_random).mean()),
            log_odds=float(np.median(differences)),
            p_value=float(bdtrc(num_worse - 1, len(rows), 0.5)),
        )

    def leave_out(self, indices: NDArray[np.int64], removed: PatchMask) -> Float[Tensor, "R C"]:
        """Logits of the images at `indices` without the patches `removed`, at the temperature of
        the model file."""
        unique, places = np.unique(indices, return_inverse=True)
        compute_kept = build_removal(
            self.bundle.model,
            self._normalize(unique),
            grid=self.grid,
            batch_size=self.batch_size,
        )
        logits = compute_without(
            compute_kept,
            torch.from_numpy(places).to(self.device),
            torch.from_numpy(removed).to(self.device),
        )
        return logits / self.bundle.temperature

    # --- patches and masks

    def _choose_strip(self, seen: _Explained, distances: Relevance) -> list[tuple[int, int]]:
        """Image and patch of those nearest to the centre of a cluster, one an image."""
        nearest = distances.argmin(axis=1)
        least = distances.min(axis=1)
        order = np.argsort(least, kind="stable")
        chosen = order[np.isfinite(least[order])][:_STRIP]
        return [(int(seen.indices[row]), int(nearest[row])) for row in chosen]

    def _measure_likeness(self, indices: NDArray[np.int64], members: PatchMask) -> float:
        """The mean correlation of the pixels of a patch between images; 0 of a single one."""
        if len(indices) < 2:
            return 0.0
        cut = []
        for image, image_members in list(zip(indices.tolist(), members, strict=True))[
            :_MAX_COMPARED
        ]:
            patch = int(self.random.choice(np.flatnonzero(image_members)))
            cut.append(cut_patch(self.images.pixels[image], patch, self.grid).ravel())
        values = np.stack(cut).astype(np.float64)
        values -= values.mean(axis=1, keepdims=True)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        units = values / np.maximum(lengths, 1e-9)
        correlations = units @ units.T
        return float(correlations[np.triu_indices(len(units), k=1)].mean())

    def _measure_masks(self, explained: _Explained, class_index: int) -> MaskSummary | None:
        if self.images.masks is None:
            return None
        inside = _average_patches(self.images.masks[explained.indices], self.grid)
        # of an image without a mask, or with one that the model doesn't see, nothing is known
        rows = np.flatnonzero(np.nan_to_num(inside).sum(axis=1) > 0)
        if not len(rows):
            return None
        inside = inside[rows]
        relevance = explained.relevance[rows]
        indices = explained.indices[rows]
        # small objects: the patch that they fill most
        removed = inside < np.minimum(0.5, inside.max(axis=1, keepdims=True))
        answers = self.leave_out(indices, removed).argmax(dim=1).cpu().numpy()
        return MaskSummary(
            num_images=len(rows),
            inside=float((relevance * inside).sum(axis=1).mean()),
            area=float(inside.mean()),
            accuracy=float((self.predicted[indices] == class_index).mean()),
            accuracy_inside=float((answers == class_index).mean()),
        )


def cut_patch(
    pixels: UInt8[np.ndarray, "H W 3"], patch: int, grid: Grid
) -> UInt8[np.ndarray, "h w 3"]:
    """The pixels of a patch."""
    rows, columns = grid
    height = pixels.shape[0] // rows
    width = pixels.shape[1] // columns
    row, column = divmod(patch, columns)
    return pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]


def _take_tokens(forward: Forward) -> PatchTokens:
    """The tokens of the patches that enter the last block, which every pooling reads, and beside
    them those that enter the blocks at one and two thirds of the depth, where patches of one look
    are still alike."""
    layers = forward.record.layers
    last = len(layers) - 1
    parts = []
    for place in sorted({len(layers) // 3, 2 * len(layers) // 3, last}):
        tokens = layers[place].block_input
        assert tokens is not None
        patches = at_least_float32(tokens.detach())[:, forward.num_prefix_tokens :]
        parts.append(patches)
    return torch.stack(parts, dim=2).cpu().numpy()


def _center(
    tokens: Float[np.ndarray, "*shape S D"], mean: Float[np.ndarray, "S D"]
) -> Float[np.ndarray, "*shape SD"]:
    """Tokens without what all have in common, of each block of length one, side by side."""
    differences = tokens - mean
    lengths = np.linalg.norm(differences, axis=-1, keepdims=True)
    units: np.ndarray = differences / np.maximum(lengths, 1e-9)
    return units.reshape(*units.shape[:-2], -1)


def _cluster(explained: _Explained, *, seed: int) -> _Clusters:
    """k-means of the tokens that have relevance, weighted by it."""
    # takes a second, which other commands don't need
    from sklearn.cluster import KMeans

    weights = explained.relevance.ravel()
    tokens = explained.tokens.reshape(len(weights), *explained.tokens.shape[2:])
    mean = tokens.mean(axis=0)
    is_relevant = weights > 0
    units = _center(tokens[is_relevant], mean)
    weights = weights[is_relevant]
    count = min(_NUM_CLUSTERS, len(units))
    clustering = KMeans(count, n_init=3, random_state=seed).fit(units, sample_weight=weights)
    centres = clustering.cluster_centers_
    distances = np.linalg.norm(units - centres[clustering.labels_], axis=1)
    reach = np.zeros(count, dtype=np.float64)
    for number in range(count):
        in_cluster = clustering.labels_ == number
        order = np.argsort(distances[in_cluster], kind="stable")
        share = weights[in_cluster][order].cumsum() / weights[in_cluster].sum()
        place = min(int(np.searchsorted(share, _REACH)), len(order) - 1)
        # rounding must not leave out the one at the end
        reach[number] = distances[in_cluster][order][place] * (1 + 1e-5)
    return _Clusters(mean, centres, reach)


def _read_class(
    logits: Float[Tensor, "R C"], class_index: int
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]:
    """Probability and log-odds of a class."""
    class_logits = logits[:, class_index]
    others = logits.clone()
    others[:, class_index] = -torch.inf
    log_odds = class_logits - others.logsumexp(dim=1)
    return log_odds.sigmoid().cpu().numpy(), log_odds.cpu().numpy()


def _is_more_frequent(others: tuple[NDArray[np.int64], NDArray[np.int64]], number: int) -> bool:
    """Whether a cluster occurs more often in the images wrongly taken for the class (Fisher's exact
    test)."""
    # scipy.stats takes half a second to import
    from scipy.stats import fisher_exact

    table = []
    for rows in others:
        occurs = (rows == number).any(axis=1)
        table.append([int(occurs.sum()), int((~occurs).sum())])
    return bool(fisher_exact(table, alternative="greater").pvalue <= FALSE_ALARM_RATE)


def _measure_overlap(members: PatchMask) -> float:
    """The mean intersection over union of the patches of two images; 0 of one image."""
    if len(members) < 2:
        return 0.0
    values = members.astype(np.float64)
    shared = values @ values.T
    sizes = values.sum(axis=1)
    union = sizes[:, None] + sizes - shared
    pairs = np.triu_indices(len(members), k=1)
    return float((shared[pairs] / union[pairs]).mean())


def _regions(
    grid: Grid,
) -> tuple[Bool[np.ndarray, "rows columns"], Bool[np.ndarray, "rows columns"]]:
    """The border, an eighth of the height and width on each side, and the centre, the middle half
    of the height and width."""
    border = np.ones(grid, dtype=bool)
    centre = np.zeros(grid, dtype=bool)
    rows, columns = grid
    down = max(round(rows / 8), 1)
    across = max(round(columns / 8), 1)
    border[down : rows - down, across : columns - across] = False
    centre[rows // 4 : rows - rows // 4, columns // 4 : columns - columns // 4] = True
    return border, centre


def _move(
    maps: Float[np.ndarray, "n rows columns"], random: np.random.Generator
) -> Float[np.ndarray, "n rows columns"]:
    """Each map moved by a distance of its own, what leaves on one side coming in on the other: its
    places are random, its shapes stay."""
    shifts = np.stack([random.integers(side, size=len(maps)) for side in maps.shape[1:]], axis=1)
    moved = [
        np.roll(values, shift, axis=(0, 1)) for values, shift in zip(maps, shifts, strict=True)
    ]
    return np.stack(moved)


def _measure_region(
    maps: Float[np.ndarray, "n rows columns"],
    region: Bool[np.ndarray, "rows columns"],
    random: np.random.Generator,
) -> RegionShare:
    # the share of each map at each of its moves is a circular correlation
    spectrum = np.fft.fft2(maps) * np.conj(np.fft.fft2(region.astype(np.float64)))
    shares = np.fft.ifft2(spectrum).real.reshape(len(maps), -1)  # [n, moves]
    moves = random.integers(shares.shape[1], size=(_NUM_DRAWS, len(maps)))
    drawn = shares[np.arange(len(maps)), moves].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    share = float(maps[:, region].sum(axis=1).mean())
    return RegionShare(share, float(shares.mean()), float(low), float(high))


def _average_patches(masks: Float[np.ndarray, "n H W"], grid: Grid) -> Float[np.ndarray, "n P"]:
    """The mean of each patch."""
    rows, columns = grid
    height = masks.shape[1] // rows
    width = masks.shape[2] // columns
    cut = masks[:, : rows * height, : columns * width]
    tiles = cut.reshape(len(masks), rows, height, columns, width)
    averages: np.ndarray = tiles.mean(axis=(2, 4)).reshape(len(masks), -1)
    return averages
