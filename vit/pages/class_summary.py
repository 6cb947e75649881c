"""The page of what each class is recognised by. One HTML file."""

import numpy as np
from PIL import Image

from vit.data.images import Geometry
from vit.explanation.render.overlay import ColourScale, blend, fit_scale
from vit.explanation.summary import PatchCluster, Summary, cut_patch
from vit.pages.page import encode_picture, name_model, render_page, resize_picture

# clusters of a class that are shown; flagged ones always are
_MAX_CLUSTERS = 5
# pixels
_PATCH_SIDE = 56
_MAP_SIDE = 192


def build_summary_page(summary: Summary) -> str:
    """Build the page: HTML that needs no other file."""
    rows = []
    for row in summary.classes:
        scale = fit_scale([np.array(row.mean_map, np.float32)], signed=False)
        # from nothing, so that an even map is pale
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
                "map": _draw_map(mean_image, row.mean_map, scale),
                "null": _draw_map(mean_image, row.null_map, scale),
                "clusters": [(cluster, _draw_strip(cluster, summary)) for cluster in shown],
            }
        )
    context = {
        "summary": summary,
        "model": name_model(summary.model),
        "rows": rows,
    }
    return render_page("class_summary.html.jinja", context)


def _draw_map(photo: Image.Image, values: list[list[float]], scale: ColourScale) -> str:
    shown = resize_picture(photo, min_side=_MAP_SIDE, max_side=_MAP_SIDE)
    geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    overlay = blend(shown, np.array(values, np.float32), geometry, scale=scale)
    return encode_picture(overlay)


def _draw_strip(cluster: PatchCluster, summary: Summary) -> str:
    """The typical patches of a cluster side by side."""
    pictures = [
        Image.fromarray(cut_patch(summary.pictures[path], patch, summary.grid)).resize(
            (_PATCH_SIDE, _PATCH_SIDE), Image.Resampling.NEAREST
        )
        for path, patch in cluster.strip
    ]
    # a gap of two pixels
    step = _PATCH_SIDE + 2
    strip = Image.new("RGB", (step * max(len(pictures), 1) - 2, _PATCH_SIDE), "white")
    for number, picture in enumerate(pictures):
        strip.paste(picture, (step * number, 0))
    return encode_picture(strip, "WEBP")
