"""A map is supported where it should be, and hardly ever where it should not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.stats import pearsonr

import vit
from vit.explanation.capture.forward import run_forward
from vit.explanation.checks import sanity_checks
from vit.explanation.checks.sanity_checks import (
    MAX_ALTERNATIVES,
    MIN_ALTERNATIVES,
    Evidence,
    Groups,
    SanityCheck,
    check_map,
    check_maps,
    choose_groups,
    list_alternatives,
    measure_evidence,
)
from vit.explanation.methods.maps import compute_maps


def draw_smooth(count: int, *, seed: int, side: int = 8) -> torch.Tensor:
    """Smooth noise [count, side, side]."""
    noise = np.random.default_rng(seed).standard_normal((count, side, side))
    return torch.from_numpy(np.stack([gaussian_filter(each, side / 8) for each in noise])).float()


def compare_all(maps: torch.Tensor, drops: torch.Tensor) -> list[SanityCheck]:
    return check_map(
        maps, Evidence(drops.flatten(1), Groups(torch.eye(drops[0].numel()) > 0, 1))
    ).to_list()


def count_agreeing(checks: list[SanityCheck]) -> float:
    return float(np.mean([check.verdict == "confirmed" for check in checks]))


def test_smooth_maps_of_something_else_are_supported_at_most_five_in_a_hundred_times() -> None:
    assert (
        0 < count_agreeing(compare_all(draw_smooth(400, seed=0), draw_smooth(400, seed=1))) <= 0.05
    )


def test_a_map_of_the_middle_is_not_taken_for_one_of_objects_in_the_middle() -> None:
    side = torch.linspace(-1, 1, 8)
    centre = torch.exp(-2 * (side[:, None] ** 2 + side**2)).expand(400, -1, -1)
    drops = 5 * draw_smooth(400, seed=1) - 2 * (side[:, None] ** 2 + side**2)
    assert np.mean([check.agreement for check in compare_all(centre, drops)]) > 0.5
    assert count_agreeing(compare_all(centre, drops)) <= 0.05


def test_noisy_evidence_is_found_again() -> None:
    drops = draw_smooth(100, seed=0)
    assert count_agreeing(compare_all(drops + draw_smooth(100, seed=1), drops)) > 0.9
    assert {check.verdict for check in compare_all(-drops, drops)} == {"not confirmed"}


def test_agreement_is_the_correlation_of_roots_with_the_drops() -> None:
    maps, drops = draw_smooth(5, seed=0), draw_smooth(5, seed=1)
    centred = maps.flatten(1) - maps.flatten(1).median(dim=1, keepdim=True).values
    roots = centred.sign() * centred.abs().sqrt()
    expected = [pearsonr(a, b.flatten()).statistic for a, b in zip(roots, drops, strict=True)]
    assert (
        np.abs(np.subtract([check.agreement for check in compare_all(maps, drops)], expected)).max()
        < 1e-6
    )


def test_the_p_value_counts_alternatives_that_agree_as_well() -> None:
    """One patch of 5×8 matters, and the map has its maximum there: each of the 4 mirrorings has one
    shift that does."""
    drops = torch.zeros(1, 5, 8)
    drops[0, 1, 2] = 1
    chosen = Evidence(drops.flatten(1)[:, :39], Groups(torch.eye(40)[:39] > 0, 1))
    (check,) = check_map(2 * drops, chosen).to_list()
    assert check.alternatives == 160
    assert check.p_value == pytest.approx(4 / 160)
    assert check.verdict == "confirmed"


@pytest.mark.parametrize(
    ("grid", "count"), [((4, 4), 128), ((3, 5), 60), ((14, 14), 523), ((20, 20), 640)]
)
def test_alternatives_are_rearrangements_of_the_map(grid: tuple[int, int], count: int) -> None:
    places = list_alternatives(grid)
    assert len(places) == count <= MAX_ALTERNATIVES
    assert torch.equal(places[0], torch.arange(grid[0] * grid[1]))
    assert torch.equal(places.sort(dim=1).values, places[0].expand(count, -1))
    assert len(places.unique(dim=0)) == count
    if count > 60:
        # the next patch to the right and below, by orientation: each equally often
        index = places.reshape(count, *grid)
        y, x = index // grid[1], index % grid[1]
        steps = [(side[:, 0, 1] - side[:, 0, 0]) % grid[0] for side in (y, x)]
        below = [(side[:, 1, 0] - side[:, 0, 0]) % grid[0] for side in (y, x)]
        _, numbers = torch.stack([*steps, *below]).unique(dim=1, return_counts=True)
        assert len(numbers) == 8
        assert numbers.max() - numbers.min() <= 1


@pytest.mark.parametrize(
    ("grid", "count", "side"),
    [
        ((5, 5), 25, 1),
        ((6, 6), 36, 1),
        ((7, 7), 49, 1),
        ((8, 8), 16, 2),
        ((14, 14), 49, 2),
        ((16, 16), 36, 3),
        ((37, 37), 49, 6),
        ((4, 40), 40, 2),
    ],
)
def test_groups_are_the_smallest_tiles_of_the_image(
    grid: tuple[int, int], count: int, side: int
) -> None:
    groups = choose_groups(grid)
    assert (len(groups.members), groups.side) == (count, side)
    assert groups.members.sum(dim=0).eq(1).all()


def test_what_cannot_be_checked_says_so() -> None:
    constant, tiny = (
        compare_all(torch.ones(1, 8, 8), draw_smooth(1, seed=0)),
        compare_all(*torch.rand(2, 1, 2, 2)),
    )
    assert (constant[0].verdict, constant[0].reason) == (
        "not confirmed",
        "every patch has the same value",
    )
    assert tiny[0].alternatives < MIN_ALTERNATIVES
    assert (tiny[0].verdict, tiny[0].reason.split()[0]) == ("not tested", "with")


def compare_groups(maps: torch.Tensor, drops: torch.Tensor) -> list[SanityCheck]:
    """Maps with what groups of patches lose, here the mean of `drops` over each."""
    groups = choose_groups((maps.shape[1], maps.shape[2]))
    shares = groups.members / groups.members.sum(dim=1, keepdim=True)
    return check_map(maps, Evidence(drops.flatten(1) @ shares.T, groups)).to_list()


@pytest.mark.parametrize("grid_side", [14, 16])
def test_groups_give_few_false_alarms_and_find_what_is_there(grid_side: int) -> None:
    maps = draw_smooth(60, seed=0, side=grid_side)
    drops = draw_smooth(60, seed=1, side=grid_side)
    assert count_agreeing(compare_groups(maps, drops)) <= 0.05
    mixed = maps + 0.5 * drops * maps.std() / drops.std()
    assert count_agreeing(compare_groups(mixed, maps)) > 0.8

    line = torch.linspace(-1, 1, grid_side)
    distance = line[:, None] ** 2 + line**2
    centre = torch.exp(-2 * distance).expand(60, -1, -1)
    assert count_agreeing(compare_groups(centre, 5 * drops - 2 * distance)) <= 0.05


def test_a_single_patch_that_decides_is_found_within_a_tile() -> None:
    """Such as a glyph, one patch of which the model needs: the map has noise everywhere else."""
    generator = torch.Generator().manual_seed(0)
    drops = torch.zeros(60, 196)
    drops[torch.arange(60), torch.randint(196, (60,), generator=generator)] = 1
    maps = (drops + 0.02 * torch.randn(60, 196, generator=generator)).reshape(60, 14, 14)
    assert count_agreeing(compare_groups(maps, drops.reshape(60, 14, 14))) > 0.8
    assert count_agreeing(compare_groups(maps, drops.roll(1, 0).reshape(60, 14, 14))) <= 0.05


def test_leaving_patches_out_supports_itself_and_not_its_reverse(trained) -> None:
    forward = run_forward(trained.model, trained.images[:40], gradients=True)
    (evidence,) = measure_evidence(forward, trained.classes[:40, None])
    drops = evidence.drops.reshape(40, 4, 4)
    assert count_agreeing(check_map(drops, evidence).to_list()) > 0.6
    assert count_agreeing(check_map(-drops, evidence).to_list()) == 0


def test_a_map_that_misses_planted_evidence_is_not_supported(trained) -> None:
    """Maps with their maximum on the glyph, and the same maps moved by one patch."""
    with_glyph = trained.glyph >= 0
    images, glyph = trained.images[with_glyph], trained.glyph[with_glyph]
    forward = run_forward(trained.model, images, gradients=True)
    (evidence,) = measure_evidence(forward, trained.classes[with_glyph, None])
    hits = torch.rand(len(images), 16, generator=torch.Generator().manual_seed(0))
    hits = hits.scatter(1, glyph[:, None], 2.0).reshape(-1, 4, 4)
    p_hit, p_miss = (
        [c.p_value for c in check_map(maps, evidence).to_list()] for maps in (hits, hits.roll(1, 2))
    )
    assert np.mean(np.less_equal(p_hit, 0.25)) > 0.7
    assert np.mean(np.less_equal(p_miss, 0.25)) < 0.3


def test_the_check_does_not_depend_on_the_batch(trained) -> None:
    methods, images = ["rollout", "gae", "removal-gradient"], trained.images[:6]
    found = []
    for batch in (images, images[4:5]):
        forward, targets, maps = compute_maps(trained.model, batch, methods=methods)
        found.append([checks[0].to_list() for checks in check_maps(forward, targets, maps)])
    for together, alone in zip(*found, strict=True):
        assert replace(together[4], agreement=0.0) == replace(alone[0], agreement=0.0)
        assert together[4].agreement == pytest.approx(alone[0].agreement, abs=1e-5)


@pytest.mark.extended
def test_a_photo_has_the_same_verdict_alone_and_in_a_folder() -> None:
    photos = sorted((Path(__file__).parents[3] / "docs" / "photos").glob("*.jpg"))
    options = {"methods": ("rollout", "libra-removal"), "checks": True}

    def find_checks(*paths: Path) -> list[list[SanityCheck]]:
        checks = vit.explain("imagenette", paths, **options).checks
        return [[image[0] for image in images] for images in zip(*checks.values(), strict=True)]

    together = find_checks(*photos)
    assert len(together) == len(photos) == 4
    alone = [check for photo in photos for check in find_checks(photo)]
    for expected, found in zip(together, alone, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert replace(one, agreement=0.0) == replace(other, agreement=0.0)


def test_every_class_and_method_is_tested_by_the_same_passes(build, monkeypatch) -> None:
    """The evidence of several classes is what leaving each group out by hand loses."""
    model, _ = build("ours-registers-norms")
    model.set_input_size((64, 64))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    forward, _, maps = compute_maps(model, images, methods=["rollout", "libra-removal"])
    classes = torch.tensor([[0, 1], [2, 0]])
    passes = []
    build_removal = sanity_checks.build_removal
    monkeypatch.setattr(
        sanity_checks,
        "build_removal",
        lambda *args, **options: passes.append(1) or build_removal(*args, **options),
    )
    check_maps(forward, classes[:, :1], maps)
    assert len(passes) == 1
    for column, evidence in enumerate(measure_evidence(forward, classes)):
        (alone,) = measure_evidence(forward, classes[:, column : column + 1])
        assert torch.allclose(evidence.drops, alone.drops, atol=1e-6)
        compute_kept = build_removal(forward.reader, images, grid=forward.grid)
        members = evidence.groups.members
        kept = (~members[3]).nonzero()[:, 0].expand(2, -1)
        left = compute_kept(torch.arange(2), kept).softmax(dim=1)
        before = forward.logits.softmax(dim=1)
        row = torch.arange(2)
        expected = (before - left)[row, classes[:, column]]
        assert torch.allclose(evidence.drops[:, 3], expected, atol=1e-6)


@pytest.mark.parametrize("methods", [["rollout"], ["gae", "libra-fullgrad"]])
def test_maps_are_the_same_with_and_without_checks(trained, methods: list[str]) -> None:
    images = trained.images[:8]
    forward, targets, maps = compute_maps(trained.model, images, methods=methods)
    unchecked = [found.values.clone() for found in maps]
    check_maps(forward, targets, maps)
    _, _, again = compute_maps(trained.model, images, methods=methods)
    for before, checked, later in zip(unchecked, maps, again, strict=True):
        assert torch.equal(before, checked.values)
        assert torch.equal(before, later.values)
