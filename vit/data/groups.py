"""Groups of images that must stay on one side of a split: those of one animal, site, patient or
burst, and copies. Otherwise a test measures how well the model has memorised them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from vit.data.dataset import ImageDataset
from vit.data.duplicates import compute_dhash, find_pairs, hash_pixels
from vit.data.images import DeepImage
from vit.data.sources.base import hash_bytes, read_digests
from vit.runtime.arguments import shorten
from vit.runtime.files import open_cached, read_arrays, write_arrays
from vit.runtime.patterns import search_group

# largest number of images that are decoded and compared with one another; it takes seconds
MAX_COMPARED = 5000
# Near-copies that aren't joined: more images of a class than this number, and than this share of
# the class. A burst is smaller; photos of one texture are more.
_MAX_ALIKE = 10
_MAX_SHARE = 0.1
# orders in which groups are tried until every class with enough groups is in each split
_NUM_DRAWS = 20
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
        ValueError: No image has such a folder or such a path, or the expression is wrong.
    """
    origin = f"data.group_by {shorten(repr(group_by))}"
    if isinstance(group_by, str) and not group_by.isdecimal():
        names = list(search_group(group_by, dataset.ids, name="data.group_by"))
    else:
        level = int(group_by)
        folders = [PurePosixPath(image_id).parts[:-1] for image_id in dataset.ids]
        names = [parts[-level] if 1 <= level <= len(parts) else None for parts in folders]
    if not any(names):
        path = shorten(dataset.ids[0])
        raise ValueError(f"{origin} finds no group in paths such as {path!r}; try another one")
    return tuple(name or image_id for name, image_id in zip(names, dataset.ids, strict=True))


def group_copies(
    dataset: ImageDataset, cache_dir: Path, *, num_splits: int
) -> tuple[Sequence[str] | None, list[str]]:
    """Join the groups of images that share an image or a near-copy of one.

    Args:
        dataset: The images; without groups, each is its own.
        cache_dir: The cache of the hashes.
        num_splits: See `join_duplicates`.

    Returns:
        The groups, those of the data set if there are no copies; and a sentence about each kind of
        images that is, or isn't, kept together.
    """
    hashes = hash_quickly(dataset, cache_dir)
    groups, num_copies, num_alike = join_duplicates(
        dataset.groups or dataset.ids, dataset.strata, hashes, num_splits=num_splits
    )
    reasons = []
    if len(dataset) > MAX_COMPARED:
        reasons.append(
            f"of more than {MAX_COMPARED:,} images, copies are found by the bytes of their files"
            " alone, and near-copies may be on both sides"
        )
    if num_alike:
        reasons.append(
            f"{num_alike:,} images resemble so many others of their class (photos of one texture?)"
            " that near-copies among them may be on both sides"
        )
    if num_copies:
        reasons.append(
            f"{num_copies:,} images have a copy or a near-copy, which is on the same side"
        )
    return groups if num_copies else dataset.groups, reasons


def hash_quickly(dataset: ImageDataset, cache_dir: Path) -> np.ndarray:
    """Compute the hashes of `vit.data.duplicates`, from JPEG files decoded at a fraction of their
    size. The cache keeps them by the bytes of the images.

    Returns:
        uint64 [2, n]. An image that can't be read has a hash of its own. Of more than 5,000 images,
        those of the files' bytes alone: equal files are found, and no near-copies.
    """

    def hash_image(index: int) -> tuple[int, int]:
        try:
            image = dataset.reader.image(index, draft_side=_DRAFT_SIDE)
        except (ValueError, OSError):
            return hash_bytes(dataset.ids[index].encode(errors="surrogateescape")), 0
        # black images would all be near-copies
        image = image.stretch() if isinstance(image, DeepImage) else image
        return hash_pixels(image), compute_dhash(image)

    name = hash_bytes(f"{dataset.name} {dataset.reader.place}".encode(errors="replace"))
    path = cache_dir / "copies" / f"{name:016x}.npz"
    stored = open_cached(path, lambda: read_arrays(path))
    contents = read_digests(dataset.reader, cache_dir)
    digests = contents.tolist()
    hash_of: dict[int, Sequence[int]] = {}
    if stored:
        pairs = zip(stored["digests"].tolist(), stored["hashes"].T.tolist(), strict=True)
        # zero: there were too many images
        hash_of = {digest: each for digest, each in pairs if each[0]}
    are_compared = len(digests) <= MAX_COMPARED
    missing = [index for index, each in enumerate(digests) if are_compared and each not in hash_of]
    with ThreadPoolExecutor() as pool:
        found = pool.map(hash_image, missing)
        hash_of |= {digests[index]: each for index, each in zip(missing, found, strict=True)}
    hashes = np.array([hash_of.get(digest, (0, 0)) for digest in digests], dtype=np.uint64).T
    facts = {"digests": contents, "hashes": hashes}
    if not stored or any(not np.array_equal(stored[key], facts[key]) for key in facts):
        # a cache that can't be written costs time alone
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, facts)
    return hashes if are_compared else np.stack([contents, np.zeros_like(hashes[1])])


def join_duplicates(
    groups: Sequence[str], labels: np.ndarray, hashes: np.ndarray, *, num_splits: int
) -> tuple[tuple[str, ...], int, int]:
    """Join groups that share an image or a near-copy of one.

    Near-copies that would join more than a tenth of a class, and more than ten images, aren't
    joined: only equal pixels are. A class that would have fewer groups than splits keeps its own.

    Args:
        groups: Group of each image.
        labels: Class of each image.
        hashes: Hashes of the images, see `hash_quickly`.
        num_splits: Number of splits into which the images are divided.

    Returns:
        Group of each image; the number of images that have a copy or a near-copy in their group;
        and the number of those that resemble so many others that they aren't kept together.
    """
    pairs = find_pairs(hashes)
    classes = labels.tolist()
    joined = _join(groups, pairs)
    # images of each class in each group, before and after near-copies are joined
    class_sizes = Counter(classes)
    sizes = Counter(zip(joined, classes, strict=True))
    own_sizes = Counter(zip(groups, classes, strict=True))
    largest: Counter[tuple[str, int]] = Counter()
    for group, root, label in zip(groups, joined, classes, strict=True):
        largest[root, label] = max(largest[root, label], own_sizes[group, label])
    too_large = {
        root
        for (root, label), size in sizes.items()
        if size > max(_MAX_ALIKE, _MAX_SHARE * class_sizes[label], largest[root, label])
    }
    kept = [pair for pair in pairs if pair[2] or joined[pair[0]] not in too_large]
    alike = {index for pair in set(pairs) - set(kept) for index in pair[:2]}
    copies = {index for pair in kept for index in pair[:2]}
    result = np.array(_join(groups, kept), dtype=object)
    original = np.array(groups, dtype=object)
    for label in class_sizes:
        in_class = labels == label
        if len(set(result[in_class])) < min(num_splits, len(set(original[in_class]))):
            result[in_class] = original[in_class]
            members = set(np.flatnonzero(in_class).tolist())
            alike |= copies & members
            copies -= members
    return tuple(result), len(copies), len(alike)


def _join(groups: Sequence[str], pairs: Iterable[tuple[int, int, bool]]) -> list[str]:
    """Join the groups of the images of each pair; return the group of each image."""
    parents = {group: group for group in groups}

    def find_root(group: str) -> str:
        while parents[group] != group:
            group = parents[group]
        return group

    for first, second, _ in pairs:
        roots = sorted({find_root(groups[first]), find_root(groups[second])})
        # the first by name, so that the order of the files doesn't matter
        parents[roots[-1]] = roots[0]
    return [find_root(group) for group in groups]


def choose_whole_groups(
    groups: Sequence[str],
    labels: np.ndarray,
    *,
    fraction: float,
    salt: str,
    num_splits: int = 2,
) -> np.ndarray:
    """Choose whole groups that have about a fraction of every class.

    Groups are tried in the order of the hashes of (salt, group), and chosen if they bring the
    numbers of their classes nearer to the fraction. A class without a chosen group gets its
    smallest one. At least one group of every class is not chosen. If the choice lacks a class that
    has enough groups, or leaves too few of them, the best of other orders is taken.

    Args:
        groups: Group of each image.
        labels: Class of each image.
        fraction: Fraction of the images to choose.
        salt: Text that decides which groups are chosen.
        num_splits: Splits that a class should have a group in: the chosen one, those that will be
            chosen from the other images, and the training images.

    Returns:
        Mask of the images, bool [n].
    """
    members: dict[str, Counter[int]] = {}
    for group, label in zip(groups, labels.tolist(), strict=True):
        members.setdefault(group, Counter())[label] += 1
    num_groups = Counter(label for counts in members.values() for label in counts)
    best: Set[str] = set()
    least: tuple[int, int] | None = None
    for draw in range(_NUM_DRAWS):
        others = f":{draw}" if draw else ""
        chosen, distance = _draw_groups(
            members, fraction, salt + others, num_groups if draw else None
        )
        num_chosen = Counter(label for group in chosen for label in members[group])
        # classes that lack a group on either side
        num_lacking = sum(
            not 1 <= num_chosen[label] <= count - num_splits + 1
            for label, count in num_groups.items()
            if count >= num_splits
        )
        if least is None or (num_lacking, distance) < least:
            best, least = chosen, (num_lacking, distance)
        if draw == 0 and not (fraction and num_lacking):
            break
    return np.array([group in best for group in groups])


def _draw_groups(
    members: Mapping[str, Counter[int]],
    fraction: float,
    salt: str,
    num_groups: Mapping[int, int] | None,
) -> tuple[Set[str], int]:
    """Choose groups in the order of their hashes. See `choose_whole_groups`.

    Args:
        members: Group → class → number of its images.
        fraction: Fraction of the images to choose.
        salt: Text that decides the order.
        num_groups: Number of groups of each class. A class without a chosen group then gets its
            smallest one that can be chosen, the class with the fewest groups first. None: it gets
            its smallest one or none.

    Returns:
        The groups, and by how many images of all classes they miss the fraction.
    """
    left: Counter[int] = Counter()
    for counts in members.values():
        left += counts
    # images that each class still lacks: at least one is chosen, but never all of a class
    lacking = {
        label: min(max(round(fraction * size), fraction > 0), size - 1)
        for label, size in left.items()
    }
    chosen: set[str] = set()
    texts = {group: f"{salt}:{group}".encode(errors="surrogateescape") for group in members}
    hashes = {group: hashlib.blake2b(text).digest() for group, text in texts.items()}

    def choose(group: str) -> None:
        chosen.add(group)
        lacking.update({label: lacking[label] - n for label, n in members[group].items()})
        left.subtract(members[group])

    def leaves_some(group: str) -> bool:
        return all(count < left[label] for label, count in members[group].items())

    for group in sorted(members, key=hashes.__getitem__):
        counts = members[group]
        gain = sum(abs(lacking[label]) - abs(lacking[label] - n) for label, n in counts.items())
        if gain > 0 and leaves_some(group):
            choose(group)
    found = {label for group in chosen for label in members[group]}
    # a group of a class with few groups may bring other classes, too
    for label in sorted(lacking, key=num_groups.__getitem__) if num_groups else list(lacking):
        if lacking[label] > 0 and label not in found:
            own = [group for group in members if label in members[group]]
            own.sort(key=lambda group: (members[group].total(), hashes[group]))
            candidates = own if num_groups else own[:1]
            smallest = next(filter(leaves_some, candidates), None)
            if smallest is not None:
                choose(smallest)
                found |= members[smallest].keys()
    return chosen, sum(map(abs, lacking.values()))
