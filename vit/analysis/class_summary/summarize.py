"""`vit.summarize_classes`: how a model recognises each class, over many of its images.

It answers where on the image the relevance lies, on which kinds of patches, and how the prediction
changes without those. It is made to find shortcuts: a watermark, a frame or a background that is
typical of one class.

The images of a class are split in two. On the first half, patch tokens are clustered by k-means,
weighted by their relevance, and clusters that look like a shortcut are picked. On the second half
each cluster is left out of real forward passes, and so is a copy of its patches that is moved at
random, and mirrored. If the patches of a cluster matter no more than others of the same shape,
either is equally likely to matter more in an image: the number of images in which the cluster does
is binomial (sign test). All tests of a summary together have the stated rate of false alarms
(Bonferroni).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vit.analysis.class_summary.clusters import fit_clusters, measure_overlap
from vit.analysis.class_summary.images import SummaryImages, read_summary_images
from vit.analysis.class_summary.page import build_summary_page
from vit.analysis.class_summary.passes import (
    Explained,
    Passes,
    PatchMask,
    Relevance,
    has_class,
)
from vit.analysis.class_summary.places import (
    MAX_IMAGES_A_CLASS,
    MIN_PATCHES,
    Pictures,
    average_patches,
    find_regions,
    measure_region,
    shift_maps,
)
from vit.analysis.class_summary.records import ClassSummary, MaskSummary, PatchCluster, Summary
from vit.analysis.class_summary.shortcuts import find_suspicions, flag_shortcuts, measure_removal
from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.images import ImageInputs
from vit.data.label_sets import count_labels
from vit.explanation.best_method import replace_best
from vit.explanation.explainer import choose_explain_batch_size
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.arguments import check_arguments
from vit.runtime.files import FileContent, Result
from vit.runtime.progress import show_progress

MIN_IMAGES_A_CLASS = 8
# memory for the tokens of a class, which are clustered at once: large models use fewer images
_MAX_TOKEN_BYTES = 1 << 29
# images of other classes in which clusters are looked for
_MAX_OTHERS = 64
# typical patches of a cluster that are shown, each from another image
_STRIP = 8


@dataclass(frozen=True, repr=False)
class SummaryResult(Result):
    """A `Summary` that can be saved."""

    summary: Summary

    def __repr__(self) -> str:
        return repr(self.summary)

    def build_files(self) -> dict[str, FileContent]:
        content = asdict(self.summary)
        # they are for the page alone
        del content["pictures"]
        text = json.dumps(content, indent=1, ensure_ascii=False)
        return {"summary.html": build_summary_page(self.summary), "summary.json": text + "\n"}


@check_arguments(batch_size=(1, None))
@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it could not be differentiated
def summarize_classes(
    model: ModelLike,
    images: ImageInputs | None = None,
    *,
    method: str = "auto",
    masks: str | Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
) -> SummaryResult:
    """Summarise how the model recognises each class, or each label, over many of
    the images that have it.

    It looks for shortcuts: a watermark, a frame or a background that is
    typical of one class.

    Args:
        model: See `vit.evaluate`.
        images: See `vit.predict`; at most 200 images of each class are used.
            Where every folder is named as a class, the folders are the labels
            (of a model of one class an image; otherwise its predictions are).
            None: the test split of the data that the model was trained on.
        method: Map method, see `vit.explain`; "auto" is libra-removal.
        masks: Folder of masks, images of the same names, black except for the
            object; or a COCO file (.json) of polygons or boxes.
        batch_size: See `vit.explain`.
        device: See `vit.evaluate`.

    Returns:
        The result: `.summary.flagged` lists likely shortcuts;
        `.save(directory)` writes summary.html and summary.json.

    Raises:
        ValueError: No class has enough images, the method is unknown, or no
            mask has the name of an image.

    Example:
        >>> vit.summarize_classes("runs/photos", "photos/test").summary.flagged
    """
    bundle = open_model(model, device=device)
    if not bundle.class_names:
        raise ValueError("a model without classes has nothing to summarise by class")
    (chosen,) = replace_best(("libra-removal" if method == "auto" else method,), bundle)
    summary_images = read_summary_images(bundle, images, masks)
    size = batch_size or choose_explain_batch_size(bundle.preprocess.image_size, bundle.device)
    return SummaryResult(summarize_images(bundle, summary_images, method=chosen, batch_size=size))


def summarize_images(
    bundle: Bundle,
    images: SummaryImages,
    *,
    method: str,
    batch_size: int = 16,
    seed: int = 0,
) -> Summary:
    """Summarise how the model recognises each class on images in memory.

    Args:
        bundle: The model.
        images: At most `MAX_IMAGES_A_CLASS` of each class are used.
        method: Map method; of signed maps the evidence for the class.
        batch_size: Images at a time.
        seed: Chooses the halves of the images, the copies of clusters and the shifts of maps.

    Raises:
        ValueError: No class has `MIN_IMAGES_A_CLASS` images, or the method is unknown.
    """
    passes = Passes(bundle, images.pixels, method=method, batch_size=batch_size)
    pictures = Pictures(images.pixels, passes.grid, np.random.default_rng(seed))
    labels = passes.predicted if images.classes is None else images.classes
    names = bundle.class_names
    counts = count_labels(labels, len(names))
    is_present = counts >= MIN_IMAGES_A_CLASS
    if not is_present.any():
        raise ValueError(
            f"no class has {MIN_IMAGES_A_CLASS} images, which a summary needs; the most has"
            f" {names[counts.argmax()]!r} with {counts.max()}"
        )
    images_in_memory = _MAX_TOKEN_BYTES // passes.token_bytes
    images_a_class = max(min(images_in_memory, MAX_IMAGES_A_CLASS), MIN_IMAGES_A_CLASS)
    chosen = np.flatnonzero(is_present).tolist()
    total = int(np.minimum(counts[chosen], images_a_class).sum())
    summarizer = _Summarizer(images, labels, passes, pictures)
    classes = []
    shown = {}
    with show_progress("summarising", total) as advance:
        for index in chosen:
            indices = pictures.random.permutation(np.flatnonzero(has_class(labels, index)))[
                :images_a_class
            ]
            classes.append(summarizer.summarize(index, indices, advance))
            mean_image = images.pixels[indices].mean(axis=0)
            shown[f"mean of {names[index]}"] = mean_image.round().astype(np.uint8)

    clusters = [cluster for row in classes for cluster in row.clusters]
    # the page shows few of the images, so the summary doesn't keep the others in memory
    pixels_by_path = dict(zip(images.paths, images.pixels, strict=True))
    shown |= {path: pixels_by_path[path] for cluster in clusters for path, _ in cluster.strip}
    return Summary(
        classes=classes,
        left_out=list(compress(names, ~is_present & (counts > 0))),
        model=bundle.name,
        model_sha256=bundle.sha256,
        method=method,
        has_labels=images.classes is not None,
        is_multilabel=bundle.is_multilabel,
        grid=passes.grid,
        num_tests=flag_shortcuts(clusters),
        pictures=shown,
    )


@dataclass(frozen=True)
class _Summarizer:
    """Summarises the classes one after the other.

    All draw from the random numbers of `pictures`, so that their order matters.
    """

    images: SummaryImages
    labels: Ints | Bools
    passes: Passes
    pictures: Pictures

    def summarize(
        self, class_index: int, indices: Ints, advance: Callable[[float], object]
    ) -> ClassSummary:
        """Summarise one class on the images at `indices`."""
        random = self.pictures.random
        explained = self.passes.explain(indices, class_index, advance)
        clusters = self._find_clusters(class_index, explained)
        maps = explained.relevance.reshape(-1, *self.passes.grid)
        border, centre = find_regions(self.passes.grid)
        # relevance sums to one in each image; times P it is a multiple of the average patch
        num_patches = self.pictures.num_patches
        return ClassSummary(
            name=self.passes.bundle.class_names[class_index],
            num_images=len(indices),
            recall=float(has_class(self.passes.predicted[indices], class_index).mean()),
            mean_map=(maps.mean(axis=0) * num_patches).tolist(),
            null_map=(shift_maps(maps, random).mean(axis=0) * num_patches).tolist(),
            border=measure_region(maps, border, random),
            centre=measure_region(maps, centre, random),
            clusters=clusters,
            masks=self._measure_masks(class_index, explained),
        )

    def _find_clusters(self, class_index: int, explained: Explained) -> list[PatchCluster]:
        """Cluster the patches in the first half of the images of a class, and test each cluster on
        the second half."""
        random = self.pictures.random
        half = len(explained.indices) // 2
        # clusters are tested on images that had no part in choosing them, because a test on the
        # same images would find more shortcuts than there are
        seen = Explained(*(part[:half] for part in explained))
        held_out = Explained(*(part[half:] for part in explained))

        clusters = fit_clusters(seen, seed=int(random.integers(1 << 31)))
        num_clusters = len(clusters.centres)
        assigned, distances = clusters.find(seen.tokens)
        held_out_assigned, _ = clusters.find(held_out.tokens)
        others = [
            clusters.find(self.passes.find_tokens(indices))[0]
            for indices in self._choose_others(class_index)
        ]
        num_marks = self.pictures.separate_marks(
            seen.indices, assigned, [held_out_assigned, *others], num_clusters
        )
        rows = []
        for number in range(num_clusters + num_marks):
            members = assigned == number
            # a cluster whose patches were all marks is empty now
            if not members.any():
                continue
            in_others = [(other_assigned == number).any(axis=1) for other_assigned in others]
            row = self._describe(members, in_others, seen, is_mark=number >= num_clusters)
            row.strip = self._choose_strip(seen, np.where(members, distances, np.inf))

            removed = held_out_assigned == number
            # a mark that is left out in part may be recognised by the rest
            removed[np.ix_(removed.any(axis=1), row.extent)] = True
            row.removal = measure_removal(
                removed, held_out.indices, class_index, self.passes, random
            )
            rows.append(row)
        return sorted(rows, key=lambda row: -row.evidence)

    def _choose_others(self, class_index: int) -> list[Ints]:
        """Choose images of other classes: wrongly predicted as this class, and others; none without
        errors, so that there are none without labels."""
        is_other = ~has_class(self.labels, class_index)
        is_predicted = has_class(self.passes.predicted, class_index)
        wrong = np.flatnonzero(is_other & is_predicted)
        right = np.flatnonzero(is_other & ~is_predicted)
        if not (len(wrong) and len(right)):
            return []
        random = self.pictures.random
        return [random.permutation(indices)[:_MAX_OTHERS] for indices in (wrong, right)]

    def _describe(
        self,
        members: PatchMask,
        in_others: list[NDArray[np.bool_]],
        seen: Explained,
        *,
        is_mark: bool,
    ) -> PatchCluster:
        """Describe a cluster on the first half of the images of a class.

        Args:
            members: Its patches.
            in_others: Images of other classes in which it occurs, see `_choose_others`.
            seen: The images.
            is_mark: True for a mark that was separated from another cluster.
        """
        occurs = members.any(axis=1)
        in_images = members[occurs]
        indices = seen.indices[occurs]
        _, centre = find_regions(self.pictures.grid)
        cluster = PatchCluster(
            evidence=float(seen.relevance[members].sum() / seen.relevance.sum()),
            patches=float(in_images.mean()),
            images=float(occurs.mean()),
            overlap=measure_overlap(in_images),
            centre=float(in_images[:, centre.ravel()].sum() / in_images.sum()),
            likeness=self.pictures.measure_likeness(indices, in_images),
        )
        if in_others:
            in_wrong, in_right = in_others
            cluster.in_errors = (float(in_wrong.mean()), float(in_right.mean()))
        if self.pictures.num_patches >= MIN_PATCHES:
            cluster.suspicions = find_suspicions(cluster, in_others, is_mark=is_mark)
        if cluster.suspicions:
            cluster.extent = np.flatnonzero(self.pictures.find_extent(indices)).tolist()
        return cluster

    def _choose_strip(self, seen: Explained, distances: Relevance) -> list[tuple[str, int]]:
        """Choose image and patch of the members nearest to the centre of a cluster, one an image."""
        least = distances.min(axis=1)
        order = np.argsort(least, kind="stable")
        chosen = order[np.isfinite(least[order])][:_STRIP]
        return [
            (self.images.paths[seen.indices[row]], int(distances[row].argmin())) for row in chosen
        ]

    def _measure_masks(self, class_index: int, explained: Explained) -> MaskSummary | None:
        """Measure how far the model looks at, and needs, what lies inside the masks."""
        masks = self.images.masks
        if masks is None:
            return None
        inside = average_patches(masks[explained.indices], self.passes.grid)
        # images without a mask, and masks outside the crop that the model sees, say nothing
        rows = np.flatnonzero(np.nan_to_num(inside).sum(axis=1) > 0)
        if not len(rows):
            return None
        inside = inside[rows]
        indices = explained.indices[rows]
        # at least the patch that a small object fills most stays
        removed = inside < np.minimum(0.5, inside.max(axis=1, keepdims=True))
        answers = self.passes.decide(self.passes.leave_out(indices, removed))
        return MaskSummary(
            num_images=len(rows),
            inside=float((explained.relevance[rows] * inside).sum(axis=1).mean()),
            area=float(inside.mean()),
            accuracy=float(has_class(self.passes.predicted[indices], class_index).mean()),
            accuracy_inside=float(has_class(answers, class_index).mean()),
        )
