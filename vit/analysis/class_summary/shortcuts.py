"""Tests of whether a cluster is a shortcut: suspicious at sight, and needed by the model."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray
from scipy.special import bdtrc

from vit.analysis.class_summary.passes import Passes, PatchMask, has_class
from vit.analysis.class_summary.places import SAME_PICTURE
from vit.analysis.class_summary.records import FALSE_ALARM_RATE, PatchCluster, Removal
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.sanity_checks import list_alternatives
from vit.prediction.probabilities import Ints

# images of each cluster that are tested without it
_MAX_REMOVALS = 48
# a cluster is at the same place where its patches in two images overlap by half, and off the centre
# where at most a tenth of them lie in the middle
_SAME_PLACE = 0.5
_OFF_CENTRE = 0.1
# a cluster is small where it has at most this share of the patches of an image
_SMALL = 0.1
# the model depends on a cluster where its removal takes a third of the odds of the class, more than
# that of a copy elsewhere does
_MIN_LOG_ODDS = math.log(1.5)


def find_suspicions(
    cluster: PatchCluster, in_others: Sequence[NDArray[np.bool_]], *, is_mark: bool
) -> tuple[str, ...]:
    """Say why a cluster may be a shortcut, without a look at the images on which it is tested."""
    suspicions = []
    if is_mark:
        suspicions.append("the same picture at the same place in different images")
    if cluster.overlap >= _SAME_PLACE and cluster.centre <= _OFF_CENTRE:
        suspicions.append("at the same place off the centre")
    if cluster.likeness >= SAME_PICTURE and cluster.patches <= _SMALL:
        suspicions.append("small, and the same picture in different images")
    # alone it is no suspicion: what is typical of a class misleads in other classes as well
    if suspicions and in_others:
        # scipy.stats takes half a second to import
        from scipy.stats import fisher_exact

        table = [[int(occurs.sum()), int((~occurs).sum())] for occurs in in_others]
        if fisher_exact(table, alternative="greater").pvalue <= FALSE_ALARM_RATE:
            suspicions.append("more often in images wrongly taken for this class than in others")
    return tuple(suspicions)


def measure_removal(
    members: PatchMask,
    indices: Ints,
    class_index: int,
    passes: Passes,
    random: np.random.Generator,
) -> Removal | None:
    """Leave a cluster, and a copy of its patches elsewhere, out of correctly predicted images.

    Args:
        members: The patches of the cluster in each image.
        indices: The images.
        class_index: Their class.
        passes: The model.
        random: Draws the copies.

    Returns:
        None where the cluster occurs in no image that is predicted correctly.
    """
    num_members = members.sum(axis=1)
    is_correct = has_class(passes.predicted[indices], class_index)
    # at least one patch must stay
    is_tested = (num_members > 0) & (num_members < members.shape[1]) & is_correct
    rows = np.flatnonzero(is_tested)[:_MAX_REMOVALS]
    if not len(rows):
        return None
    removed = members[rows]
    elsewhere = np.stack([_move_at_random(mask, passes.grid, random) for mask in removed])
    nothing = np.zeros_like(removed)
    logits = passes.leave_out(
        indices[np.tile(rows, 3)], np.concatenate([nothing, removed, elsewhere])
    )
    # log-odds, because the probability hardly falls where the model is nearly certain
    log_odds = passes.compute_log_odds(logits, class_index)
    unchanged, without, without_random = log_odds.sigmoid().cpu().numpy().reshape(3, -1)
    _, odds, random_odds = log_odds.cpu().numpy().reshape(3, -1)
    # how much more the odds fall than without the copy
    differences = random_odds - odds
    kept = has_class(passes.decide(logits), class_index)
    _, is_kept, is_kept_at_random = kept.reshape(3, -1)
    num_worse = int((differences > 0).sum())
    return Removal(
        num_images=len(rows),
        flips=int((~is_kept).sum()),
        random_flips=int((~is_kept_at_random).sum()),
        fall=float((unchanged - without).mean()),
        random_fall=float((unchanged - without_random).mean()),
        log_odds=float(np.median(differences)),
        p_value=float(bdtrc(num_worse - 1, len(rows), 0.5)),
    )


def _move_at_random(
    mask: Bool[np.ndarray, " P"], grid: Grid, random: np.random.Generator
) -> Bool[np.ndarray, " P"]:
    """Draw one of the shifted copies that a map is compared with, of those with other patches:
    scattered patches would leave the object whole, which any patches together may not."""
    copies = mask[list_alternatives(grid).numpy()]
    moved = copies[(copies != mask).any(axis=1)]
    chosen: Bool[np.ndarray, " P"] = moved[random.integers(len(moved))]
    return chosen


def flag_shortcuts(clusters: list[PatchCluster]) -> int:
    """Flag the suspicious clusters on which the model depends; return the number of tests, which
    share the rate of false alarms."""
    suspicious = [cluster for cluster in clusters if cluster.suspicions]
    for cluster in suspicious:
        removal = cluster.removal
        cluster.is_flagged = (
            removal is not None
            and removal.p_value <= FALSE_ALARM_RATE / len(suspicious)
            and removal.log_odds >= _MIN_LOG_ODDS
        )
    return len(suspicious)
