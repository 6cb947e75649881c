"""Clusters of patches: k-means of their tokens, weighted by their relevance."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from vit.analysis.class_summary.passes import Explained, PatchMask, PatchTokens, Relevance
from vit.prediction.probabilities import Ints

_NUM_CLUSTERS = 12
# the members of a cluster are those nearest to its centre that hold this share of its relevance
_REACH = 0.95


class Clusters(NamedTuple):
    """A clustering of tokens. Tokens within `reach` of a centre belong to its cluster."""

    mean: Float[np.ndarray, "S D"]
    centres: Float[np.ndarray, "K SD"]
    reach: Float[np.ndarray, " K"]

    def find(self, tokens: PatchTokens) -> tuple[Ints, Relevance]:
        """Find the cluster of each patch, [n, P], -1 for patches far from all, and the distance to
        the nearest centre."""
        units = _center(tokens, self.mean)
        squares = (self.centres**2).sum(axis=1) - 2 * units @ self.centres.T
        nearest = squares.argmin(axis=-1)
        squared = np.take_along_axis(squares, nearest[..., None], axis=-1)[..., 0]
        squared += (units**2).sum(axis=-1)
        distances = np.sqrt(np.maximum(squared, 0))
        return np.where(distances <= self.reach[nearest], nearest, -1), distances


def fit_clusters(explained: Explained, *, seed: int) -> Clusters:
    """Cluster the tokens of the patches that have relevance."""
    # takes a second, which other commands don't need
    from sklearn.cluster import KMeans

    weights = explained.relevance.ravel()
    tokens = explained.tokens.reshape(len(weights), *explained.tokens.shape[2:])
    mean = tokens.mean(axis=0)
    is_relevant = weights > 0
    # patches without relevance would have no weight, but take time
    units = _center(tokens[is_relevant], mean)
    weights = weights[is_relevant]
    count = min(_NUM_CLUSTERS, len(units))
    clustering = KMeans(count, n_init=3, random_state=seed).fit(units, sample_weight=weights)
    centres = clustering.cluster_centers_
    distances = np.linalg.norm(units - centres[clustering.labels_], axis=1)

    reach = np.zeros(count)
    for number in range(count):
        is_member = clustering.labels_ == number
        order = np.argsort(distances[is_member], kind="stable")
        share = weights[is_member][order].cumsum() / weights[is_member].sum()
        place = min(int(np.searchsorted(share, _REACH)), len(order) - 1)
        # rounding must not leave out the member at the edge
        reach[number] = distances[is_member][order][place] * (1 + 1e-5)
    return Clusters(mean, centres, reach)


def _center(
    tokens: Float[np.ndarray, "*shape S D"], mean: Float[np.ndarray, "S D"]
) -> Float[np.ndarray, "*shape SD"]:
    """Subtract the mean token, scale the part of each block to length one, and join the parts."""
    differences = tokens - mean
    lengths = np.linalg.norm(differences, axis=-1, keepdims=True)
    units: np.ndarray = differences / np.maximum(lengths, 1e-9)
    return units.reshape(*units.shape[:-2], -1)


def measure_overlap(members: PatchMask) -> float:
    """Mean intersection over union of the patches in two images; 0 for one image."""
    if len(members) < 2:
        return 0.0
    values = members.astype(np.float64)
    shared = values @ values.T
    sizes = values.sum(axis=1)
    union = sizes[:, None] + sizes - shared
    pairs = np.triu_indices(len(members), k=1)
    return float((shared[pairs] / union[pairs]).mean())
