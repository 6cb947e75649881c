"""The page of a summary, one HTML file."""

from pathlib import Path

import numpy as np
from PIL import Image

from vit.analysis.class_summary.places import cut_patch
from vit.analysis.class_summary.records import PatchCluster, Summary
from vit.explanation.render.page import encode_map, encode_picture, name_model, render_page
from vit.explanation.render.scale import ColourScale, fit_scale

_TEMPLATE = Path(__file__).with_name("class_summary.html.jinja")
# clusters that are shown for each class; flagged ones always are
_MAX_CLUSTERS = 5
# in pixels
_PATCH_SIDE = 56
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
                "clusters": [(cluster, _draw_strip(cluster, summary)) for cluster in shown],
            }
        )
    context = {"summary": summary, "model": name_model(summary.model), "rows": rows}
    return render_page(_TEMPLATE, context)


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
