"""Groups of images that must stay on one side of a split: those of one animal, site, patient or
burst, and copies. Otherwise a test measures how well the model has memorised them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from vit.data.dataset import ImageDataset
from vit.data.duplicates import compute_dhash, find_pairs, hash_pixels
from vit.data.frames import MIN_SIDE, find_frames, shrink
from vit.data.patterns import search_group
from vit.data.sources.base import compute_once, hash_bytes, read_digests
from vit.runtime.arguments import shorten
from vit.runtime.files import default_cache_dir

# largest number of images that are decoded and compared with one another; it takes a minute
MAX_COMPARED = 20_000
# Near-copies, and frames, that aren't joined: more groups of a class than this number, and than
# these shares of the class. A scene is smaller; photos of one texture or one object are more.
_MAX_ALIKE = 10
_MAX_SHARES = (0.1, 0.5)
# orders in which groups are tried until every class with enough groups is in each split
_NUM_DRAWS = 20
# smallest side in pixels at which JPEG files are decoded for their hashes
_DRAFT_SIDE = 128


def find_groups(dataset: ImageDataset, group_by: int | str) -> tuple[str, ...]:
    """Find the group of each image, by its path: 1 for the name of the folder that it is in, 2 for
    the folder above it, and so on; or a regular expression with one group. An image whose path
    doesn't match is a group of its own. Raises ValueError if none matches."""
    pattern = str(group_by)
    if pattern.isdecimal() and pattern != "0":
        pattern = f"([^/]+)(?:/[^/]+){{{pattern}}}$"
    names = search_group(pattern, dataset.ids, name="data.group_by")
    if not any(names):
        text = f"data.group_by {shorten(repr(group_by))} finds no group in paths such as"
        raise ValueError(f"{text} {shorten(dataset.ids[0])!r}; try another one")
    return tuple(name or image_id for name, image_id in zip(names, dataset.ids, strict=True))


def hash_images(dataset: ImageDataset) -> np.ndarray:
    """Compute the hashes of `vit.data.duplicates` and the bytes of the thumbnails of
    `vit.data.frames`, black ones of images that are too small, uint64 [2 + 288, n], from JPEG files
    decoded at a fraction of their size. The cache keeps them by the bytes of the images. More than
    20,000 images are hashed by the bytes of their files alone, uint64 [2, n], which finds copies
    only."""

    def hash_image(index: int) -> np.ndarray:
        hashes = np.zeros(2 + MIN_SIDE**2 // 8, np.uint64)
        try:
            image = dataset.reader.image(index, draft_side=_DRAFT_SIDE)
        except (ValueError, OSError):
            hashes[0] = hash_bytes(dataset.ids[index].encode(errors="surrogateescape"))
            return hashes
        hashes[:2] = hash_pixels(image), compute_dhash(image)
        if min(image.size) >= MIN_SIDE:
            hashes[2:] = shrink(image).view(np.uint64).ravel()
        return hashes

    cache_dir = default_cache_dir()
    digests = read_digests(dataset.reader, cache_dir)
    if len(dataset) > MAX_COMPARED:
        return np.stack([digests, np.zeros_like(digests)])
    name = hash_bytes(f"{dataset.name} {dataset.reader.place}".encode(errors="replace"))
    path = cache_dir / "thumbnails" / f"{name:016x}.npz"
    return compute_once(path, digests[:, None], hash_image).T


def join_duplicates(
    groups: Sequence[str], labels: np.ndarray, hashes: np.ndarray, *, num_splits: int
) -> tuple[tuple[str, ...], int, int, int]:
    """Join groups that share an image, a near-copy of one, or a scene, by `hash_images`.

    Near-copies that would join more than a tenth of the groups of a class, and more than ten,
    aren't joined, nor frames that would join more than half: only equal pixels are. A class that
    would have fewer groups than splits keeps its own.

    Returns:
        Group of each image, the number of images that have a copy or another frame in their group,
        that of these groups, and that of the images that resemble so many others that they aren't
        joined.
    """
    classes = labels.tolist()
    found: list[tuple[int, int, bool]] = []
    kept: list[tuple[int, int, bool]] = []
    thumbnails = np.ascontiguousarray(hashes[2:].T).view(np.uint8).reshape(-1, MIN_SIDE, MIN_SIDE)
    frames = [(first, second, False) for first, second in find_frames(thumbnails).tolist()]
    for pairs, max_share in zip((find_pairs(hashes), frames), _MAX_SHARES, strict=True):
        joined = _join(groups, pairs)
        # groups of each class, in all and in those that they become
        own = set(zip(groups, joined, classes, strict=True))
        class_sizes = Counter(label for _, _, label in own)
        sizes = Counter((root, label) for _, root, label in own)
        too_large = {
            root
            for (root, label), size in sizes.items()
            if size > max(_MAX_ALIKE, max_share * class_sizes[label])
        }
        found += pairs
        kept += [pair for pair in pairs if pair[2] or joined[pair[0]] not in too_large]
    copies, all_found = ({index for pair in part for index in pair[:2]} for part in (kept, found))
    result = np.array(_join(groups, kept), dtype=object)
    original = np.array(groups, dtype=object)
    for label in set(classes):
        in_class = labels == label
        if len(set(result[in_class])) < min(num_splits, len(set(original[in_class]))):
            result[in_class] = original[in_class]
            copies -= set(np.flatnonzero(in_class).tolist())
    return tuple(result), len(copies), len(set(result[list(copies)])), len(all_found - copies)


def _join(groups: Sequence[str], pairs: Sequence[tuple[int, int, bool]]) -> list[str]:
    """Join the groups of the images of each pair; return the group of each image: of those that are
    joined, the first by name, so that the order of the files doesn't matter."""
    # takes long to import
    from scipy.cluster.hierarchy import DisjointSet

    joined = DisjointSet(groups)
    for first, second, _ in pairs:
        joined.merge(groups[first], groups[second])
    first_of = {name: min(names) for names in joined.subsets() for name in names}
    return [first_of[name] for name in groups]


def rank_names(names: Iterable[str], salt: str) -> list[int]:
    """Return 64 bits of the hash of (salt, name) for each name: their order is that of a draw."""
    texts = (f"{salt}:{name}".encode(errors="surrogateescape") for name in names)
    return [int.from_bytes(hashlib.blake2b(text).digest()[:8], "big") for text in texts]


def choose_whole_groups(
    groups: Sequence[str],
    labels: np.ndarray,
    *,
    fraction: float,
    salt: str,
    num_splits: int = 2,
) -> np.ndarray:
    """Choose whole groups that have about a fraction of every class, bool [n], from the group and
    the class of each image. Each class should have a group in `num_splits` splits: the chosen one,
    those that will be chosen from the other images, and the training images.

    If the choice of `_draw_groups` lacks a class that has enough groups, or leaves too few of them,
    the best of other orders is taken. The salt decides the orders.
    """
    members: dict[str, Counter[int]] = {}
    for group, label in zip(groups, labels.tolist(), strict=True):
        members.setdefault(group, Counter())[label] += 1
    num_groups = Counter(label for counts in members.values() for label in counts)
    draws: list[tuple[int, int, Set[str]]] = []
    for order in (salt, *(f"{salt}:{draw}" for draw in range(1, _NUM_DRAWS))):
        chosen, distance = _draw_groups(members, fraction, order, num_groups, again=order != salt)
        num_chosen = Counter(label for group in chosen for label in members[group])
        # classes that lack a group on either side
        num_lacking = sum(
            not 1 <= num_chosen[label] <= count - num_splits + 1
            for label, count in num_groups.items()
            if count >= num_splits
        )
        draws.append((num_lacking, distance, chosen))
        if order == salt and not (fraction and num_lacking):
            break
    _, _, best = min(draws, key=lambda found: found[:2])
    return np.array([group in best for group in groups])


def _draw_groups(
    members: Mapping[str, Counter[int]],
    fraction: float,
    salt: str,
    num_groups: Mapping[int, int],
    *,
    again: bool,
) -> tuple[Set[str], int]:
    """Choose groups of `members`, group → class → number of images, and return by how many images
    of all classes they miss the fraction, too.

    Groups are chosen in the order of the hashes of (salt, group) if they bring the numbers of their
    classes nearer to the fraction. Then a class without a chosen group gets its smallest one, if
    that leaves some; at least one group of every class is not chosen. If the first order has failed,
    `again`, the class with the fewest groups gets its smallest one first, and one that leaves none
    is passed over for the next.
    """
    sizes = Counter[int]()
    for counts in members.values():
        sizes.update(counts)
    # images of each class that aren't chosen
    left = sizes.copy()
    # images that each class still lacks: at least one is chosen, but never all of a class
    lacking = {
        label: min(max(round(fraction * size), fraction > 0), size - 1)
        for label, size in sizes.items()
    }
    chosen: set[str] = set()
    ranks = dict(zip(members, rank_names(members, salt), strict=True))

    def choose(group: str) -> None:
        chosen.add(group)
        lacking.update({label: lacking[label] - n for label, n in members[group].items()})
        left.subtract(members[group])

    def leaves_some(group: str) -> bool:
        return all(count < left[label] for label, count in members[group].items())

    for group in sorted(members, key=ranks.__getitem__):
        counts = members[group]
        gain = sum(abs(lacking[label]) - abs(lacking[label] - n) for label, n in counts.items())
        if gain > 0 and leaves_some(group):
            choose(group)
    # a group of a class with few groups may bring other classes, too
    for label in sorted(lacking, key=lambda label: again and num_groups[label]):
        if lacking[label] > 0 and left[label] == sizes[label]:
            own = [group for group in members if label in members[group]]
            own.sort(key=lambda group: (members[group].total(), ranks[group]))
            smallest = next(filter(leaves_some, own if again else own[:1]), None)
            if smallest is not None:
                choose(smallest)
    return chosen, sum(map(abs, lacking.values()))
