"""A map is supported where it should be, and hardly ever where it should not."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.stats import pearsonr

from vit.explanation.capture.forward import run_forward
from vit.explanation.checks import sanity_checks
from vit.explanation.checks.sanity_checks import (
    MAX_ALTERNATIVES,
    SanityCheck,
    check_map,
    check_maps,
    choose_tiles,
    describe_check,
    list_alternatives,
    measure_drops,
    tile_patches,
)
from vit.explanation.methods.maps import compute_maps


def draw_smooth(count: int, *, seed: int, side: int = 8) -> torch.Tensor:
    """Smooth noise [count, side, side]."""
    noise = np.random.default_rng(seed).standard_normal((count, side, side))
    return torch.from_numpy(np.stack([gaussian_filter(each, side / 8) for each in noise])).float()


def compare_all(maps: torch.Tensor, drops: torch.Tensor) -> list[SanityCheck]:
    """Maps with what is lost without tiles, here the mean of `drops` over each."""
    grid = (maps.shape[1], maps.shape[2])
    tiles = tile_patches(grid, choose_tiles(grid, torch.device("cpu")).side)
    shares = tiles / tiles.sum(dim=1, keepdim=True)
    numbers = check_map(maps, drops.flatten(1) @ shares.T)
    return [describe_check(*row, grid) for row in numbers.tolist()]


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
    (check,) = compare_all(2 * drops, drops)
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
        ((8, 8), 64, 1),
        ((7, 9), 63, 1),
        ((6, 11), 66, 1),
        ((8, 9), 20, 2),
        ((14, 14), 49, 2),
        ((16, 16), 36, 3),
        ((37, 37), 49, 6),
        ((4, 40), 40, 2),
    ],
)
def test_groups_are_the_smallest_tiles_of_the_image(
    grid: tuple[int, int], count: int, side: int
) -> None:
    tiles = choose_tiles(grid, torch.device("cpu"))
    assert tiles.side == side
    kept = [row for rows in tiles.kept for row in rows.tolist()]
    patches = set(range(grid[0] * grid[1]))
    assert sorted(patch for row in kept for patch in patches - set(row)) == sorted(patches)
    assert len(kept) == count


def test_what_cannot_be_checked_says_so() -> None:
    (constant,) = compare_all(torch.ones(1, 8, 8), draw_smooth(1, seed=0))
    assert constant.verdict == "not confirmed"
    # a patch that decides is also that of 8 of the 128 shifted copies
    for side in (2, 4):
        drops = torch.rand(1, side, side)
        (tiny,) = compare_all(drops, drops)
        assert tiny.verdict == "not tested"
        assert f"with {side} × {side} patches" in tiny.reason


def test_a_perfect_map_of_8_x_8_patches_is_confirmed_and_noise_is_not() -> None:
    """A patch decides, as with a glyph: 16 tiles could not show it."""
    drops = torch.zeros(100, 64)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(64, (100,), generator=generator)
    drops[torch.arange(100), places] = 1
    drops = drops.reshape(100, 8, 8)
    assert count_agreeing(compare_all(drops, drops)) == 1
    noise = torch.rand(100, 8, 8, generator=generator)
    assert count_agreeing(compare_all(noise, drops)) <= 0.08


@pytest.mark.parametrize("grid_side", [14, 16])
def test_groups_give_few_false_alarms_and_find_what_is_there(grid_side: int) -> None:
    maps = draw_smooth(60, seed=0, side=grid_side)
    drops = draw_smooth(60, seed=1, side=grid_side)
    assert count_agreeing(compare_all(maps, drops)) <= 0.05
    mixed = maps + 0.5 * drops * maps.std() / drops.std()
    assert count_agreeing(compare_all(mixed, maps)) > 0.8

    line = torch.linspace(-1, 1, grid_side)
    distance = line[:, None] ** 2 + line**2
    centre = torch.exp(-2 * distance).expand(60, -1, -1)
    assert count_agreeing(compare_all(centre, 5 * drops - 2 * distance)) <= 0.05


def test_a_single_patch_that_decides_is_found_within_a_tile() -> None:
    """Such as a glyph, one patch of which the model needs: the map has noise everywhere else."""
    generator = torch.Generator().manual_seed(0)
    drops = torch.zeros(60, 196)
    drops[torch.arange(60), torch.randint(196, (60,), generator=generator)] = 1
    maps = (drops + 0.02 * torch.randn(60, 196, generator=generator)).reshape(60, 14, 14)
    assert count_agreeing(compare_all(maps, drops.reshape(60, 14, 14))) > 0.8
    assert count_agreeing(compare_all(maps, drops.roll(1, 0).reshape(60, 14, 14))) <= 0.05


@pytest.mark.extended
def test_a_map_that_misses_planted_evidence_is_not_supported(trained) -> None:
    """Maps with their maximum on the glyph, and the same maps moved by one patch."""
    with_glyph = trained.glyph >= 0
    images, glyph = trained.images[with_glyph], trained.glyph[with_glyph]
    forward = run_forward(trained.model, images, gradients=True)
    (drops,) = measure_drops(forward, trained.classes[with_glyph, None])
    hits = torch.rand(len(images), 16, generator=torch.Generator().manual_seed(0))
    hits = hits.scatter(1, glyph[:, None], 2.0).reshape(-1, 4, 4)
    p_hit, p_miss = (check_map(maps, drops)[:, 0] for maps in (hits, hits.roll(1, 2)))
    assert (p_hit <= 0.25).double().mean() > 0.7
    assert (p_miss <= 0.25).double().mean() < 0.3


def test_the_check_does_not_depend_on_the_batch(trained) -> None:
    methods, images = ["rollout", "gae", "removal-gradient"], trained.images[:6]
    found = []
    for batch in (images, images[4:5]):
        forward, targets, maps = compute_maps(trained.model, batch, methods=methods)
        found.append(torch.stack(check_maps(forward, targets, maps)))
    together, alone = found
    assert torch.equal(together[:, 4, 0, 0], alone[:, 0, 0, 0])
    assert (together[:, 4, 0, 1] - alone[:, 0, 0, 1]).abs().max() < 1e-5


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
    before = forward.logits.softmax(dim=1)
    for column, drops in enumerate(measure_drops(forward, classes)):
        (alone,) = measure_drops(forward, classes[:, column : column + 1])
        assert torch.allclose(drops, alone, atol=1e-6)
        compute_kept = build_removal(forward.reader, images, grid=forward.grid)
        kept = torch.tensor([patch for patch in range(64) if patch != 3]).expand(2, -1)
        left = compute_kept(torch.arange(2), kept).softmax(dim=1)
        expected = (before - left)[torch.arange(2), classes[:, column]]
        assert torch.allclose(drops[:, 3], expected, atol=1e-6)
