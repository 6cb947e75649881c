"""Groups of images that must stay on one side of a split: those of one animal, site, patient or
burst, and copies. Otherwise a test measures how well the model has memorised them."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import numpy as np

from vit.data.dataset import ImageDataset
from vit.data.dicom import DICOM_SUFFIX, read_patients
from vit.data.duplicates import compute_dhash, find_pairs, hash_pixels
from vit.data.images import DeepImage
from vit.data.sources.base import FileReader
from vit.runtime.arguments import shorten
from vit.runtime.patterns import search_group

# largest number of images that are compared with one another; it takes seconds
MAX_COMPARED = 5000
# smallest side in pixels at which JPEG files are decoded for their hashes
_DRAFT_SIDE = 128


def find_groups(dataset: ImageDataset, group_by: int | str) -> tuple[str, ...]:
    """Find the group of each image, by its path.

    Args:
        dataset: The images; their ids are paths.
        group_by: 1 for the name of the folder that an image is in, 2 for the folder above it, and
            so on; or a regular expression with one group, which is searched in the path. An image
            whose path doesn't match is a group of its own.

    Raises:
        ValueError: No image has such a folder or such a path, the expression is wrong, or all
            images of a class are one group.
    """
    origin = f"data.group_by {shorten(repr(group_by))}"
    if isinstance(group_by, int):
        folders = [PurePosixPath(image_id).parts[:-1] for image_id in dataset.ids]
        names = [parts[-group_by] if 1 <= group_by <= len(parts) else None for parts in folders]
    else:
        names = list(search_group(group_by, dataset.ids, name="data.group_by"))
    if not any(names):
        path = shorten(dataset.ids[0])
        raise ValueError(f"{origin} finds no group in paths such as {path!r}; try another one")

    groups = [name or image_id for name, image_id in zip(names, dataset.ids, strict=True)]
    for label, class_name in enumerate(dataset.class_names):
        class_groups = {groups[index] for index in np.flatnonzero(dataset.labels == label)}
        if len(class_groups) == 1 and (dataset.labels == label).sum() > 1:
            raise ValueError(
                f"{origin} puts all images of {shorten(class_name)!r} into one group,"
                f" {shorten(class_groups.pop())!r}, which can't be split; try another one"
            )
    return tuple(groups)


def find_patients(dataset: ImageDataset) -> tuple[str, ...] | None:
    """Find the patient of each DICOM file, by the id in it. An image without one is a group of its
    own; None if no image has one."""
    reader = dataset.reader
    if not isinstance(reader, FileReader) or not any(
        name.lower().endswith(DICOM_SUFFIX) for name in dataset.ids
    ):
        return None
    patients = read_patients([reader.root / path for path in reader.paths])
    if not any(patients):
        return None
    # apart from the names of images
    return tuple(
        image_id if patient is None else f"patient {patient}"
        for patient, image_id in zip(patients, dataset.ids, strict=True)
    )


def hash_quickly(dataset: ImageDataset) -> np.ndarray:
    """Compute the hashes of `vit.data.duplicates`, from JPEG files decoded at a fraction of their
    size.

    Returns:
        uint64 [2, n]. An image that can't be read has a hash of its own.
    """

    def hash_image(index: int) -> tuple[int, int]:
        try:
            image = dataset.reader.thumbnail(index, side=_DRAFT_SIDE)
        except (ValueError, OSError):
            digest = hashlib.sha256(dataset.ids[index].encode(errors="surrogateescape")).digest()
            return int.from_bytes(digest[:8], "little"), 0
        # black images would all be near-copies
        image = image.stretch() if isinstance(image, DeepImage) else image
        return hash_pixels(image), compute_dhash(image)

    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(hash_image, range(len(dataset))))
    return np.array(rows, dtype=np.uint64).T


def join_duplicates(
    groups: Sequence[str], labels: np.ndarray, hashes: np.ndarray, *, num_splits: int
) -> tuple[tuple[str, ...], int]:
    """Join groups that share an image or a near-copy of one.

    A class that would have fewer groups than splits keeps its own groups.

    Args:
        groups: Group of each image.
        labels: Class of each image.
        hashes: Hashes of the images, see `hash_quickly`.
        num_splits: Number of splits into which the images are divided.

    Returns:
        The group of each image, and the number of images that have a copy.
    """
    parents = {group: group for group in groups}

    def find_root(group: str) -> str:
        while parents[group] != group:
            group = parents[group]
        return group

    copies: set[int] = set()
    for first, second, _ in find_pairs(hashes):
        copies |= {first, second}
        roots = sorted({find_root(groups[first]), find_root(groups[second])})
        # the first by name, so that the order of the files doesn't matter
        parents[roots[-1]] = roots[0]
    joined = np.array([find_root(group) for group in groups], dtype=object)

    original = np.array(groups, dtype=object)
    for label in np.unique(labels):
        in_class = labels == label
        if len(set(joined[in_class])) < min(num_splits, len(set(original[in_class]))):
            joined[in_class] = original[in_class]
            copies -= set(np.flatnonzero(in_class).tolist())
    return tuple(joined), len(copies)


def choose_whole_groups(
    groups: Sequence[str], labels: np.ndarray, *, fraction: float, salt: str
) -> np.ndarray:
    """Choose whole groups that have about a fraction of every class.

    Groups are tried in the order of the hashes of (salt, group), and chosen if they bring the
    numbers of their classes nearer to the fraction. A class without a chosen group gets its
    smallest one. At least one group of every class is not chosen.

    Args:
        groups: Group of each image.
        labels: Class of each image.
        fraction: Fraction of the images to choose.
        salt: Text that decides which groups are chosen.

    Returns:
        Mask of the images, bool [n].
    """
    class_sizes = Counter(labels.tolist())
    # at least one image, but never all of a class
    targets = {
        label: min(max(round(fraction * size), fraction > 0), size - 1)
        for label, size in class_sizes.items()
    }
    members: dict[str, Counter[int]] = {}
    for group, label in zip(groups, labels.tolist(), strict=True):
        members.setdefault(group, Counter())[label] += 1

    chosen: set[str] = set()
    num_chosen: Counter[int] = Counter()

    def leaves_some(group: str) -> bool:
        return all(
            num_chosen[label] + count < class_sizes[label]
            for label, count in members[group].items()
        )

    def measure_gain(group: str) -> int:
        return sum(
            abs(targets[label] - num_chosen[label])
            - abs(targets[label] - num_chosen[label] - count)
            for label, count in members[group].items()
        )

    def hash_group(group: str) -> bytes:
        text = f"{salt}:{group}".encode(errors="surrogateescape")
        return hashlib.blake2b(text).digest()

    for group in sorted(members, key=hash_group):
        if measure_gain(group) > 0 and leaves_some(group):
            chosen.add(group)
            num_chosen += members[group]
    for label, target in targets.items():
        if target and not num_chosen[label]:
            class_groups = [group for group in members if label in members[group]]
            smallest = min(
                class_groups, key=lambda group: (members[group].total(), hash_group(group))
            )
            if leaves_some(smallest):
                chosen.add(smallest)
                num_chosen += members[smallest]
    return np.array([group in chosen for group in groups])
