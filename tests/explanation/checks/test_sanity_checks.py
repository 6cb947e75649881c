"""A map is supported where it should be, and hardly ever where it should not."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from vit.explanation.capture.forward import run_forward
from vit.explanation.checks.sanity_checks import (
    MAX_COPIES,
    SanityCheck,
    check_map,
    choose_tiles,
    list_copies,
    list_kept,
    measure_drops,
)
from vit.explanation.checks.token_ablation import build_removal
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import CLASS


def draw_smooth(count: int, *, seed: int, side: int = 8) -> torch.Tensor:
    """Smooth noise [count, side, side]."""
    noise = np.random.default_rng(seed).standard_normal((count, side, side))
    return torch.from_numpy(np.stack([gaussian_filter(each, side / 8) for each in noise])).float()


def compare_all(maps: torch.Tensor, drops: torch.Tensor) -> list[SanityCheck]:
    """Maps with what is lost without tiles, here the mean of `drops` over each."""
    tiles = choose_tiles((maps.shape[1], maps.shape[2]))
    shares = tiles / tiles.sum(dim=1, keepdim=True)
    return [
        check_map(*pair) for pair in zip(maps.numpy(), drops.flatten(1) @ shares.T, strict=True)
    ]


def count_agreeing(maps: torch.Tensor, drops: torch.Tensor) -> float:
    checks = compare_all(maps, drops)
    return float(np.mean([check.verdict == "confirmed" for check in checks]))


@pytest.mark.parametrize(
    ("side", "count", "noise", "expected"),
    [(8, 400, 1.0, 0.9), (14, 60, 0.5, 0.8), (16, 60, 0.5, 0.8)],
)
def test_what_is_there_is_found_and_false_alarms_are_few(
    side: int, count: int, noise: float, expected: float
) -> None:
    maps = draw_smooth(count, seed=0, side=side)
    drops = draw_smooth(count, seed=1, side=side)
    assert count_agreeing(maps + noise * drops * maps.std() / drops.std(), maps) > expected
    # the others are further from their bounds
    maps, drops = maps[:150], drops[:150]
    assert count_agreeing(maps, drops) <= 0.05
    # a map of the middle is not taken for one of objects in the middle
    line = torch.linspace(-1, 1, side)
    distance = line[:, None] ** 2 + line**2
    centre = torch.exp(-2 * distance).expand(len(maps), -1, -1).contiguous()
    assert count_agreeing(centre, 5 * drops - 2 * distance) <= 0.05
    assert {check.verdict for check in compare_all(-drops, drops)} == {"not confirmed"}


def test_a_map_must_agree_with_the_losses_and_with_what_is_left_of_their_trend() -> None:
    """A map that is right about what deviates from a trend, and wrong about the trend itself."""
    line = torch.linspace(-1, 1, 8)
    trend = 3 * line.expand(8, 8)
    signal = draw_smooth(1, seed=3)[0]
    signal /= signal.std()
    (right,) = compare_all((signal + trend)[None], (signal + trend)[None])
    (wrong,) = compare_all((signal - trend)[None], (signal + trend)[None])
    assert right.verdict == "confirmed"
    assert wrong.verdict == "not confirmed"


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
    places = list_copies(grid)
    assert len(places) == count <= MAX_COPIES
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
        ((8, 8), 64, 1),
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
    assert choose_tiles(grid).sum(dim=1).max() == side**2
    kept = [row for rows in list_kept(grid, torch.device("cpu")) for row in rows.tolist()]
    patches = set(range(grid[0] * grid[1]))
    assert sorted(patch for row in kept for patch in patches - set(row)) == sorted(patches)
    assert len(kept) == count


def test_what_cannot_be_checked_says_so() -> None:
    (constant,) = compare_all(torch.ones(1, 8, 8), draw_smooth(1, seed=0))
    assert constant.verdict == "not confirmed"
    # a patch that decides is also that of 8 of the 128 shifted copies
    drops = torch.rand(1, 4, 4)
    (tiny,) = compare_all(drops, drops)
    assert tiny.verdict == "not tested"
    assert tiny.reason == "with 4 × 4 patches, the test can't tell"


@pytest.mark.parametrize(("side", "noise", "expected"), [(8, 0, 0.999), (14, 0.02, 0.8)])
def test_a_single_patch_that_decides_is_found(side: int, noise: float, expected: float) -> None:
    """Such as a glyph, one patch of which the model needs: also within a tile, and where the map
    has noise everywhere else."""
    generator = torch.Generator().manual_seed(0)
    drops = torch.zeros(100, side**2)
    drops[torch.arange(100), torch.randint(side**2, (100,), generator=generator)] = 1
    drops = drops.reshape(100, side, side)
    maps = drops + noise * torch.randn(100, side, side, generator=generator)
    assert count_agreeing(maps, drops) > expected
    assert count_agreeing(torch.rand(100, side, side, generator=generator), drops) <= 0.08
    assert count_agreeing(maps, drops.roll(1, 0)) <= 0.05


@pytest.mark.extended
def test_a_map_that_misses_planted_evidence_is_not_supported(trained) -> None:
    """Maps with their maximum on the glyph, and the same maps moved by one patch."""
    with_glyph = trained.glyph >= 0
    images, glyph = trained.images[with_glyph], trained.glyph[with_glyph]
    forward = run_forward(trained.model, images, gradients=True)
    drops = measure_drops(forward, trained.classes[with_glyph, None])[:, 0]
    hits = torch.rand(len(images), 16, generator=torch.Generator().manual_seed(0))
    hits = hits.scatter(1, glyph[:, None], 2.0).reshape(-1, 4, 4)
    for maps, is_right in ((hits, True), (hits.roll(1, 2), False)):
        checks = [check_map(*pair) for pair in zip(maps.numpy(), drops, strict=True)]
        share = np.mean([check.p_value <= 0.25 for check in checks])
        assert share > 0.7 if is_right else share < 0.3


def test_the_evidence_of_a_class_is_what_leaving_each_patch_out_loses(build) -> None:
    """Whatever other classes and images there are."""
    model, _ = build("ours-registers-norms")
    model.set_input_size((64, 64))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    forward, _, _ = compute_maps(model, images, methods=["rollout"])
    classes = torch.tensor([[0, 1], [2, 0]])
    drops = measure_drops(forward, classes)
    before = forward.logits.softmax(dim=1)
    compute_kept = build_removal(forward.reader, images, grid=forward.grid)
    kept = torch.tensor([patch for patch in range(64) if patch != 3]).expand(2, -1)
    left = compute_kept(torch.arange(2), kept).softmax(dim=1)
    assert torch.allclose(drops[:, :2, 3], (before - left).gather(1, classes), atol=1e-6)
    assert torch.allclose(measure_drops(forward, classes[:1, :1]), drops[:1, :1], atol=1e-6)


def test_maps_of_no_class_are_tested_by_the_predicted_one(build) -> None:
    forward = run_forward(*build("ours"))
    predicted = forward.logits.argmax(dim=1)
    others = (predicted + 1) % 5
    forward.target = CLASS.with_classes(others)
    drops = measure_drops(forward, others[:, None])
    assert torch.equal(drops[:, 1], measure_drops(forward, predicted[:, None])[:, 0])
    assert not torch.allclose(drops[:, 0], drops[:, 1])
