"""Images that belong together, such as those of one animal, site, patient or burst, and copies: a
split that parts them measures how well a model knows them by heart."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import numpy as np

from vit.data.dataset import ImageDataset
from vit.data.duplicates import compute_dhash, find_pairs, hash_pixels
from vit.runtime.arguments import shorten

# images among which copies are looked for: seconds
MAX_COMPARED = 5000
# pixels at least, of which an image's hashes are made here
_DRAFT_SIDE = 128


def find_groups(dataset: ImageDataset, group_by: int | str) -> tuple[str, ...]:
    """The group of each image, by its path.

    Args:
        dataset: whose ids are paths.
        group_by: 1: the name of the folder that an image is in, 2: of the one above, and so on; or
            a regular expression with one group, which is looked for in the path. A path without it
            is a group of its own.

    Raises:
        ValueError: no image has such a folder or such a path, the expression is wrong, or a class
            is one group.
    """
    origin = f"data.group_by {shorten(repr(group_by))}"
    if isinstance(group_by, int):
        folders = [PurePosixPath(image_id).parts[:-1] for image_id in dataset.ids]
        names = [parts[-group_by] if 1 <= group_by <= len(parts) else None for parts in folders]
    else:
        names = _match(dataset.ids, group_by, origin)
    if not any(names):
        raise ValueError(f"{origin} finds no group in paths such as {shorten(dataset.ids[0])!r}")

    groups = [name or image_id for name, image_id in zip(names, dataset.ids, strict=True)]
    for label, class_name in enumerate(dataset.class_names):
        class_groups = {groups[index] for index in np.flatnonzero(dataset.labels == label)}
        if len(class_groups) == 1 and (dataset.labels == label).sum() > 1:
            raise ValueError(
                f"{origin} makes one group, {shorten(class_groups.pop())!r}, of all images of"
                f" {shorten(class_name)!r}: they can't be split; take another one"
            )
    return tuple(groups)


def _match(ids: Sequence[str], pattern: str, origin: str) -> list[str | None]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{origin} is not a regular expression: {error}") from None
    if expression.groups != 1:
        raise ValueError(
            f"{origin} has {expression.groups} groups in brackets; give it one, such as"
            r" '(site\d+)', or a folder's level such as 1"
        )
    matches = [expression.search(image_id) for image_id in ids]
    return [match[1] if match else None for match in matches]


def hash_quickly(dataset: ImageDataset) -> np.ndarray:
    """Hashes as of `vit.data.duplicates`, uint64 [2, n], of JPEG files decoded at a fraction of
    their size; an image that can't be read is like no other."""

    def hash_image(index: int) -> tuple[int, int]:
        try:
            image = dataset.reader.thumbnail(index, side=_DRAFT_SIDE)
        except (ValueError, OSError):
            digest = hashlib.sha256(dataset.ids[index].encode(errors="surrogateescape")).digest()
            return int.from_bytes(digest[:8], "little"), 0
        return hash_pixels(image), compute_dhash(image)

    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(hash_image, range(len(dataset))))
    return np.array(rows, dtype=np.uint64).T


def join_duplicates(
    groups: Sequence[str], labels: np.ndarray, hashes: np.ndarray, *, num_splits: int
) -> tuple[tuple[str, ...], int]:
    """The groups, with those made one that share an image, or nearly; and how many images have a
    copy. A class whose images would be too few groups for the splits keeps its own.

    Args:
        groups: of each image.
        labels: of each.
        hashes: of each, as of `hash_quickly`.
        num_splits: that images are divided into.
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
        # the first by name: the order of the files doesn't matter
        parents[roots[-1]] = roots[0]
    joined = np.array([find_root(group) for group in groups], dtype=object)

    original = np.array(groups, dtype=object)
    for label in np.unique(labels):
        in_class = labels == label
        if len(set(joined[in_class])) < min(num_splits, len(set(original[in_class]))):
            joined[in_class] = original[in_class]
            copies -= set(np.flatnonzero(in_class).tolist())
    return tuple(joined), len(copies)


def choose_groups(
    groups: Sequence[str], labels: np.ndarray, *, fraction: float, salt: str
) -> np.ndarray:
    """Mask, bool [n], of whole groups that have about a fraction of every class.

    Groups are taken in the order of the hashes of (salt, group), where one brings the numbers of
    its classes nearer to the fraction; of a class of which none was, its smallest group. One group
    at least of every class stays.

    Args:
        groups: of each image.
        labels: of each.
        fraction: of the images.
        salt: which groups are chosen.
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
