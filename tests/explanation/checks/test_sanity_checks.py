"""A map is supported where it should be, and hardly ever where it should not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.stats import pearsonr, rankdata, spearmanr
from torch import nn

from tests.explanation.model_zoo import build_timm, prepare
from vit.explanation.capture.forward import AttentionRecord, Forward, run_forward
from vit.explanation.capture.reader import ModelReader
from vit.explanation.checks import sanity_checks
from vit.explanation.checks.sanity_checks import (
    MAX_ALTERNATIVES,
    MAX_GROUPS,
    MIN_ALTERNATIVES,
    Evidence,
    SanityCheck,
    _alternatives,
    check_map,
    check_maps,
    choose_group_size,
    choose_groups,
    occlusion_reference,
    randomise_weights,
    rank_correlation,
)
from vit.explanation.methods.maps import compute_maps


def test_rank_correlation_equals_scipys_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 6, (5, 4, 4), generator=generator).float()
    second = torch.randint(0, 6, (5, 4, 4), generator=generator).float()
    expected = [
        spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first, second, strict=True)
    ]
    assert np.abs(rank_correlation(first, second).numpy() - expected).max() < 1e-6


def test_rank_correlation_with_a_constant_is_zero() -> None:
    assert rank_correlation(torch.ones(1, 4, 4), torch.rand(1, 4, 4)) == 0


def test_randomising_keeps_every_parameters_numbers_and_loses_what_was_learned(trained) -> None:
    randomised = randomise_weights(trained.model)
    for before, after in zip(trained.model.parameters(), randomised.parameters(), strict=True):
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
    with torch.no_grad():
        accuracy = (randomised(trained.images).argmax(dim=1) == trained.classes).float().mean()
    assert accuracy < 0.4


def draw_smooth(count: int, *, seed: int, side: int = 8) -> torch.Tensor:
    """Smooth noise [count, side, side]."""
    noise = np.random.default_rng(seed).standard_normal((count, side, side))
    return torch.from_numpy(np.stack([gaussian_filter(each, side / 8) for each in noise])).float()


def compare_all(maps: torch.Tensor, drops: torch.Tensor) -> list[SanityCheck]:
    return check_map(
        maps, Evidence("leave-one-out", drops.flatten(1), torch.eye(drops[0].numel()) > 0)
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


def test_agreement_is_the_correlation_of_ranks_with_the_drops() -> None:
    maps, drops = draw_smooth(5, seed=0), draw_smooth(5, seed=1)
    expected = [
        pearsonr(rankdata(a), b.flatten()).statistic for a, b in zip(maps, drops, strict=True)
    ]
    assert (
        np.abs(np.subtract([check.agreement for check in compare_all(maps, drops)], expected)).max()
        < 1e-6
    )


def test_the_p_value_counts_alternatives_that_agree_as_well() -> None:
    """One patch of 5×8 matters, and the map has its maximum there: each of the 4 mirrorings has one
    shift that does."""
    drops = torch.zeros(1, 5, 8)
    drops[0, 1, 2] = 1
    chosen = Evidence("leave-one-out", drops.flatten(1)[:, :39], torch.eye(40)[:39] > 0)
    (check,) = check_map(2 * drops, chosen).to_list()
    assert check.alternatives == 160
    assert check.p_value == pytest.approx(4 / 160)
    assert check.verdict == "confirmed"


@pytest.mark.parametrize(
    ("grid", "count"), [((4, 4), 128), ((3, 5), 60), ((14, 14), 784), ((37, 37), 996)]
)
def test_alternatives_are_rearrangements_of_the_map(grid: tuple[int, int], count: int) -> None:
    places = _alternatives(grid)
    assert len(places) == count <= MAX_ALTERNATIVES
    assert torch.equal(places[0], torch.arange(grid[0] * grid[1]))
    assert torch.equal(places.sort(dim=1).values, places[0].expand(count, -1))
    assert len(places.unique(dim=0)) == count


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


def compare_groups(maps: torch.Tensor, drops: torch.Tensor, *, side: int) -> list[SanityCheck]:
    """Maps with what groups of patches lose, here the mean of `drops` over each."""
    groups = choose_groups((maps.shape[1], maps.shape[2]), side)
    means = drops.flatten(1) @ (groups / groups.sum(dim=1, keepdim=True)).T
    evidence = Evidence("leave-one-out", means, groups)
    return check_map(maps, evidence).to_list()


@pytest.mark.parametrize(("side", "grid_side"), [(1, 14), (4, 16)])
def test_groups_give_few_false_alarms_and_find_what_is_there(side: int, grid_side: int) -> None:
    maps = draw_smooth(60, seed=0, side=grid_side)
    drops = draw_smooth(60, seed=1, side=grid_side)
    assert count_agreeing(compare_groups(maps, drops, side=side)) <= 0.05
    mixed = maps + 0.5 * drops * maps.std() / drops.std()
    assert count_agreeing(compare_groups(mixed, maps, side=side)) > 0.8

    line = torch.linspace(-1, 1, grid_side)
    distance = line[:, None] ** 2 + line**2
    centre = torch.exp(-2 * distance).expand(60, -1, -1)
    assert count_agreeing(compare_groups(centre, 5 * drops - 2 * distance, side=side)) <= 0.05


@pytest.mark.parametrize("grid", [(14, 14), (16, 16), (37, 37), (8, 8), (4, 40)])
@pytest.mark.parametrize("side", [1, 2, 4])
def test_groups_are_spread_over_the_image(grid: tuple[int, int], side: int) -> None:
    groups = choose_groups(grid, side)
    assert len(groups) <= MAX_GROUPS
    assert groups.sum(dim=0).max() == 1
    if grid[0] * grid[1] >= 16 * side**2:
        assert len(groups) >= 16
        quarters = groups.any(dim=0).reshape(grid).float()
        rows, columns = (length // 2 for length in grid)
        for down in (slice(rows), slice(rows, None)):
            for across in (slice(columns), slice(columns, None)):
                assert quarters[down, across].sum() >= 3 * side**2 / 2


@pytest.mark.parametrize("reacts_to", [1, 2, 4, 5])
def test_the_smallest_groups_that_two_ways_of_removal_rank_alike(
    monkeypatch: pytest.MonkeyPatch, reacts_to: int
) -> None:
    """Smaller groups change nothing but noise."""
    generator = torch.Generator().manual_seed(0)

    def remove(
        predict: object, *, batch: int, groups: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        noise = torch.randn(batch, len(groups), generator=generator)
        signal = groups.float() @ torch.arange(256.0) ** 0.5
        return noise + (signal if groups[0].sum() >= reacts_to**2 else 0)

    monkeypatch.setattr(sanity_checks, "leave_one_out", remove)
    monkeypatch.setattr(sanity_checks, "build_removal", lambda *args, **options: abs)
    forward = Forward(
        reader=ModelReader(nn.Identity()),
        images=torch.zeros(4, 3, 8, 8),
        logits=torch.eye(4),
        record=AttentionRecord([]),
        pool_weights=torch.zeros(4, 256),
        num_prefix_tokens=0,
        grid=(16, 16),
        tokens=torch.zeros(4, 256, 8),
        pooling={},
    )
    size = choose_group_size(forward)
    assert size.side == {1: 1, 2: 2, 4: 4, 5: None}[reacts_to]
    (check,) = check_map(
        torch.rand(1, 16, 16),
        Evidence("leave-one-out", torch.rand(1, 256), torch.eye(256) > 0, size),
    ).to_list()
    if size.side is None:
        assert check.verdict == "not tested"
        assert "rank them differently" in check.reason
    else:
        assert check.patches == ("single patches" if reacts_to == 1 else str(size))
        assert check.patches in check.reason


def test_leaving_patches_out_supports_itself_and_not_its_reverse(trained) -> None:
    forward = run_forward(trained.model, trained.images[:40], gradients=True)
    evidence = occlusion_reference(forward, trained.classes[:40])
    assert evidence.name == "leave-one-out"
    drops = evidence.drops.reshape(40, 4, 4)
    assert count_agreeing(check_map(drops, evidence).to_list()) > 0.6
    assert count_agreeing(check_map(-drops, evidence).to_list()) == 0


def test_a_map_that_misses_planted_evidence_is_not_supported(trained) -> None:
    """Maps with their maximum on the glyph, and the same maps moved by one patch."""
    with_glyph = trained.glyph >= 0
    images, glyph = trained.images[with_glyph], trained.glyph[with_glyph]
    forward = run_forward(trained.model, images, gradients=True)
    evidence = occlusion_reference(forward, trained.classes[with_glyph])
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
        forward, targets, maps = compute_maps(
            trained.model, batch, methods=methods, keep="gradients"
        )
        found.append([checks[0].to_list() for checks in check_maps(forward, targets, maps)])
    for together, alone in zip(*found, strict=True):
        assert replace(together[4], agreement=0.0) == replace(alone[0], agreement=0.0)
        assert together[4].agreement == pytest.approx(alone[0].agreement, abs=1e-5)


def test_the_removal_gradient_is_not_checked_with_itself(build) -> None:
    model, images = build("ours-registers-norms")
    names = ["libra-fullgrad", "removal-gradient"]
    forward, targets, maps = compute_maps(model, images, methods=names, keep="gradients")
    libra, removal = check_maps(forward, targets, maps)
    assert (libra[0].evidence, removal[0].evidence) == (
        "leave-one-out",
        "leave-one-out",
    )  # 24 patches
    larger = model
    larger.set_input_size((64, 64))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    forward, targets, maps = compute_maps(larger, images, methods=names, keep="gradients")
    libra, removal = check_maps(forward, targets, maps)
    assert (libra[0].evidence, removal[0].evidence) == ("removal-gradient", "leave-one-out")
    assert (
        16 <= len(occlusion_reference(forward, targets[:, 0], circular=True).groups) <= MAX_GROUPS
    )
    # the evidence is the model's own gradient, also where every map is of LibraGrad's
    evidence = occlusion_reference(forward, targets[:, 0]).drops
    assert torch.allclose(evidence, maps[1].values[:, 0].flatten(1), rtol=1e-4, atol=1e-7)
    libra_only, _, _ = compute_maps(larger, images, methods=["libra-fullgrad"], keep="gradients")
    assert torch.allclose(
        occlusion_reference(libra_only, targets[:, 0]).drops, evidence, rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize(("side", "count"), [(1, 2), (2, 1)])
def test_groups_are_left_out_once_for_all_methods(
    build, monkeypatch, side: int, count: int
) -> None:
    """Of single patches, what the removal gradient is made of needs other evidence."""
    model, _ = build("ours-registers-norms")
    model.set_input_size((64, 64))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    names = ["rollout", "libra-removal"]
    forward, targets, maps = compute_maps(model, images, methods=names, keep="gradients")
    asked = []

    def watch(*args, **options) -> Evidence:
        asked.append(options)
        return occlusion_reference(*args, **options)

    monkeypatch.setattr(sanity_checks, "occlusion_reference", watch)
    size = sanity_checks.GroupSize(side)
    checks = check_maps(forward, targets, maps, predicted_first=True, group_size=size)
    assert len(asked) == count
    assert checks[1][0].evidence == "leave-one-out"


def test_a_pooling_without_a_removal_gradient_is_checked_by_leaving_patches_out() -> None:
    model, images = prepare(
        nn.Sequential(nn.Identity(), build_timm(global_pool="max", class_token=False)), (64, 96)
    )
    images = images.repeat(1, 1, 2, 2)
    model[1].set_input_size((128, 192))
    forward, targets, maps = compute_maps(model, images, methods=["rollout"], keep="gradients")
    with pytest.raises(ValueError, match="pools by something other than a mean"):
        compute_maps(model, images, methods=["removal-gradient"])
    assert check_maps(forward, targets, maps)[0][0].evidence == "leave-one-out"
    assert 16 <= len(occlusion_reference(forward, targets[:, 0]).groups) <= MAX_GROUPS


@pytest.mark.parametrize("methods", [["rollout"], ["gae", "libra-fullgrad"]])
def test_maps_are_the_same_with_and_without_checks(trained, methods: list[str]) -> None:
    found = [
        compute_maps(
            trained.model,
            trained.images[:8],
            methods=methods,
            keep="gradients" if keep else "nothing",
        )
        for keep in (True, False)
    ]
    for checked, unchecked in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(checked.values, unchecked.values)
