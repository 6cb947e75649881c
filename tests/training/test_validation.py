"""The probabilities that outlast the epochs are of epochs that their images did not choose."""

import numpy as np
import pytest
import torch

from vit.evaluation.metrics import Scores, score_logits
from vit.training.validation import HeldAside

# the first two images are one half, the last two the other
DIGESTS = np.array([0, 2, 1, 3], dtype=np.uint64)
LABELS = np.zeros(4, dtype=np.int64)


def make_logits(*probabilities: float) -> np.ndarray:
    """Of two classes, of which the first is right."""
    right = np.array(probabilities)
    return np.log(np.stack([right, 1 - right], axis=1)).astype(np.float32)


def make_scores(*probabilities: float) -> Scores:
    return score_logits(make_logits(*probabilities), LABELS)


def update(held_aside: HeldAside, *probabilities: float, digests: np.ndarray = DIGESTS) -> None:
    held_aside.update(make_scores(*probabilities), make_logits(*probabilities), digests)


def test_each_half_has_the_probabilities_of_the_epoch_that_the_other_half_chooses() -> None:
    held_aside = HeldAside("top1")
    update(held_aside, 0.6, 0.4, 0.3, 0.3)
    np.testing.assert_allclose(held_aside.probabilities, [0.6, 0.4, 0.3, 0.3], rtol=1e-6)

    # better by the first half alone: the second half's are taken, though they are worse
    update(held_aside, 0.7, 0.8, 0.1, 0.2)
    np.testing.assert_allclose(held_aside.probabilities, [0.6, 0.4, 0.1, 0.2], rtol=1e-6)

    # better by the second half alone
    update(held_aside, 0.1, 0.2, 0.9, 0.9)
    np.testing.assert_allclose(held_aside.probabilities, [0.1, 0.2, 0.1, 0.2], rtol=1e-6)

    # by neither
    update(held_aside, 0.5, 0.5, 0.4, 0.4)
    np.testing.assert_allclose(held_aside.probabilities, [0.1, 0.2, 0.1, 0.2], rtol=1e-6)
    np.testing.assert_array_equal(held_aside.logits, make_logits(0.1, 0.2, 0.1, 0.2))


def test_of_many_logits_those_of_evenly_spaced_images_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vit.training.validation._MAX_LOGITS", 4)
    held_aside = HeldAside("top1")
    update(held_aside, 0.6, 0.4, 0.3, 0.2)
    assert held_aside.indices == [0, 2]
    np.testing.assert_array_equal(held_aside.logits, make_logits(0.6, 0.3))
    # better by the first half alone: the second half's are taken
    update(held_aside, 0.7, 0.8, 0.1, 0.2)
    np.testing.assert_array_equal(held_aside.logits, make_logits(0.6, 0.1))


def test_a_checkpoint_brings_them_back() -> None:
    before = HeldAside("loss")
    update(before, 0.6, 0.4, 0.3, 0.3)
    state = before.state_dict()
    after = HeldAside("loss")
    after.load_state_dict(state, num_images=4, num_classes=state["logits"].shape[1])
    # what comes later doesn't change what was saved
    for held_aside in (before, after):
        update(held_aside, 0.9, 0.8, 0.7, 0.6)
    np.testing.assert_array_equal(before.probabilities, after.probabilities)
    np.testing.assert_array_equal(before.logits, after.logits)
    assert before.best == after.best
    torch.testing.assert_close(
        state["probabilities"], torch.tensor([0.6, 0.4, 0.3, 0.3]).double(), atol=1e-6, rtol=0
    )


def test_images_that_are_all_in_one_half_choose_for_themselves() -> None:
    held_aside = HeldAside("macro_f1")
    update(held_aside, 0.6, 0.4, 0.3, 0.3, digests=np.zeros(4, dtype=np.uint64))
    assert (held_aside.probabilities > 0).all()
