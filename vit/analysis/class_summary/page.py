"""The page of a summary, one HTML file."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vit.analysis.class_summary.places import cut_patch
from vit.analysis.class_summary.records import ClassSummary, PatchCluster, Summary
from vit.explanation.capture.tokens import Grid
from vit.explanation.render.page import encode_map, encode_picture, name_model, render_page
from vit.explanation.render.scale import ColourScale, fit_scale
from vit.prediction.predictor import Pixels

_TEMPLATE = Path(__file__).with_name("class_summary.html.jinja")
# clusters that are shown for each class; flagged ones always are
_MAX_CLUSTERS = 5
# patches that are shown large for each class, one of each of its first clusters
_MAX_PATCHES = 6
# patches on each side of a large one, without which nobody could tell what it is
_CONTEXT = 2
# in pixels
_PATCH_SIDE = 56
_TILE_SIDE = 144
_MAP_SIDE = 192


def build_summary_page(summary: Summary) -> str:
    """Build the page: HTML that needs no other file."""
    rows = []
    for row in summary.classes:
        mean_map = np.array(row.mean_map, np.float32)
        null_map = np.array(row.null_map, np.float32)
        scale = fit_scale([mean_map], signed=False)
        # the scale starts at zero, so that an even map is pale
        scale = ColourScale(0.0, scale.high, signed=False, label="")
        mean_image = Image.fromarray(summary.pictures[f"mean of {row.name}"])
        shown = [
            cluster
            for place, cluster in enumerate(row.clusters)
            if place < _MAX_CLUSTERS or cluster.is_flagged
        ]
        rows.append(
            {
                "summary": row,
                "map": encode_map(mean_image, mean_map, scale=scale, side=_MAP_SIDE),
                "null": encode_map(mean_image, null_map, scale=scale, side=_MAP_SIDE),
                "patches": _draw_patches(row, summary),
                "clusters": [(cluster, _draw_strip(cluster, summary)) for cluster in shown],
            }
        )
    context = {"summary": summary, "model": name_model(summary.model), "rows": rows}
    return render_page(_TEMPLATE, context)


def _draw_patches(row: ClassSummary, summary: Summary) -> list[tuple[PatchCluster, str]]:
    """Draw the most typical patch of the first clusters of a class, flagged clusters first."""
    clusters = sorted(row.clusters, key=lambda cluster: not cluster.is_flagged)
    return [
        (cluster, _draw_in_context(summary.pictures[path], patch, summary.grid))
        for cluster in clusters[:_MAX_PATCHES]
        for path, patch in cluster.strip[:1]
    ]


def _draw_in_context(pixels: Pixels, patch: int, grid: Grid) -> str:
    """Draw a patch in a frame, with the patches around it."""
    height, width = pixels.shape[0] // grid[0], pixels.shape[1] // grid[1]
    row, column = divmod(patch, grid[1])
    first_row, first_column = (
        min(max(place - _CONTEXT, 0), max(count - 2 * _CONTEXT - 1, 0))
        for place, count in zip((row, column), grid, strict=True)
    )
    last_row, last_column = first_row + 2 * _CONTEXT + 1, first_column + 2 * _CONTEXT + 1
    crop = pixels[
        first_row * height : last_row * height, first_column * width : last_column * width
    ]
    scale = _TILE_SIDE / max(crop.shape[:2])
    size = (round(crop.shape[1] * scale), round(crop.shape[0] * scale))
    picture = Image.fromarray(crop).resize(size, Image.Resampling.BICUBIC)
    left, top = (column - first_column) * width * scale, (row - first_row) * height * scale
    box = (left, top, left + width * scale - 1, top + height * scale - 1)
    draw = ImageDraw.Draw(picture)
    # visible on light and dark photos
    draw.rectangle(box, outline="black", width=4)
    draw.rectangle(box, outline="white", width=2)
    return encode_picture(picture, "WEBP")


def _draw_strip(cluster: PatchCluster, summary: Summary) -> str:
    """Draw the typical patches of a cluster side by side."""
    pictures = [
        Image.fromarray(cut_patch(summary.pictures[path], patch, summary.grid)).resize(
            (_PATCH_SIDE, _PATCH_SIDE), Image.Resampling.NEAREST
        )
        for path, patch in cluster.strip
    ]
    # a gap of two pixels
    step = _PATCH_SIDE + 2
    strip = Image.new("RGB", (step * len(pictures) - 2, _PATCH_SIDE), "white")
    for number, picture in enumerate(pictures):
        strip.paste(picture, (step * number, 0))
    return encode_picture(strip, "WEBP")
