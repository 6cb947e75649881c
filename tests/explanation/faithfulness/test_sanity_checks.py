"""Sanity checks say what they should of maps that are known to be good or bad."""

import numpy as np
import torch
from scipy.stats import spearmanr

from vit.explanation.faithfulness.sanity_checks import (
    RandomDeletion,
    SanityChecker,
    _judge,
    randomise_weights,
    rank_correlation,
)
from vit.explanation.faithfulness.token_ablation import build_predictor, leave_one_out
from vit.explanation.methods.table import MapOptions, compute_maps


def test_rank_correlation_equals_scipys_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 6, (5, 4, 4), generator=generator).float()
    second = torch.randint(0, 6, (5, 4, 4), generator=generator).float()
    expected = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first, second, strict=True)]
    assert np.abs(rank_correlation(first, second).numpy() - expected).max() < 1e-6


def test_rank_correlation_with_a_constant_is_zero() -> None:
    assert rank_correlation(torch.ones(1, 4, 4), torch.rand(1, 4, 4)) == 0


def test_leave_one_out_beats_random_orders_and_its_reverse_does_not(trained) -> None:
    images, classes = trained.images[:40], trained.classes[:40]
    deletion = RandomDeletion(trained.model, images, classes, grid=(4, 4))
    predict = build_predictor(trained.model, images, classes, grid=(4, 4))
    drops = leave_one_out(predict, batch=40, patches=16, device=images.device).reshape(40, 4, 4)
    gap, beaten = deletion.compare(drops)
    reverse_gap, reverse_beaten = deletion.compare(-drops)
    assert gap.mean() > 0.2
    assert beaten.mean() > 0.8
    assert set(beaten.tolist()) <= {tenths / 10 for tenths in range(11)}  # 9 of 10 is no less than 0.9
    assert reverse_gap.mean() < 0
    assert reverse_beaten.mean() < 0.4


def test_randomising_keeps_every_parameters_numbers_and_loses_what_was_learned(trained) -> None:
    randomised = randomise_weights(trained.model)
    for before, after in zip(trained.model.parameters(), randomised.parameters(), strict=True):
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
    with torch.no_grad():
        accuracy = (randomised(trained.images).argmax(dim=1) == trained.classes).float().mean()
    assert accuracy < 0.4


def test_the_cascade_randomises_from_the_head_down(trained) -> None:
    changed = {}
    for share in (0.0, 0.34, 1.0):
        randomised = randomise_weights(trained.model, fraction_of_blocks=share)
        changed[share] = {
            name
            for (name, before), after in zip(trained.model.named_parameters(), randomised.parameters(), strict=True)
            if not torch.equal(before, after)
        }
    assert {name.split(".")[0] for name in changed[0.0]} <= {"norm", "head"}
    assert "head.weight" in changed[0.0]
    assert {name.split(".")[1] for name in changed[0.34] if name.startswith("blocks")} == {"2"}
    assert {"patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"} <= changed[1.0]


def test_judges_do_not_depend_on_the_batch(trained) -> None:
    checker, options = SanityChecker(trained.model), MapOptions()
    images = trained.images[:6]
    forward, targets, maps = compute_maps(trained.model, images, methods=["rollout", "gae"])
    together = checker.check(images, forward.logits, targets, maps, options)
    one_forward, one_targets, one_maps = compute_maps(trained.model, images[4:5], methods=["rollout", "gae"])
    alone = checker.check(images[4:5], one_forward.logits, one_targets, one_maps, options)
    for method in range(2):
        assert abs(together[method][4][0].deletion_gap - alone[method][0][0].deletion_gap) < 1e-5
        assert together[method][4][0].better_than_random == alone[method][0][0].better_than_random


def test_each_threshold_that_fails_has_its_sentence() -> None:
    def report(**changes: float) -> tuple[str, ...]:
        good = {
            "deletion_gap": 0.2,
            "better_than_random": 1.0,
            "randomised_correlation": 0.1,
            "prefix_mass": 0.2,
            "entropy": 3.0,
        }
        return _judge(**good | changes, patches=196).warnings

    assert report() == ()
    assert report(better_than_random=0.8) == ("no better than random for this image",)
    assert "randomised weights (rank correlation -0.50)" in report(randomised_correlation=-0.5)[0]
    assert report(prefix_mass=0.75) == ("75 % of the relevance is in prefix tokens, not in patches",)
    assert report(entropy=float(np.log(196.0))) == ("nearly uniform",)


def test_a_few_patches_need_a_stronger_correlation_to_be_told_from_chance() -> None:
    assert not _judge(0.2, 1.0, 0.5, 0.1, 1.0, patches=16).warnings
    assert _judge(0.2, 1.0, 0.5, 0.1, 1.0, patches=196).warnings
