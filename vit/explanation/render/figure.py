"""A map as a figure for a paper: text, lines and colour bar can be edited, the photo is a raster."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from threading import Lock

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vit.data.preprocess import Geometry
from vit.explanation.render.outline import trace_outline
from vit.explanation.render.overlay import MAX_SIDE, UNIT, blend, draw_colours, panel_size
from vit.explanation.render.scale import ColourScale, PatchMap

_FONT_POINTS = 6
_ONE_AT_A_TIME = Lock()  # matplotlib's settings hold for all threads
_GAP_INCHES = 0.05
_BAR_INCHES = 0.1  # width of the colour bar
_CHARACTER_INCHES = 0.048  # mean width of a character


def save_figure(
    path: Path,
    image: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    kind: str,
    scale: ColourScale,
    caption: Sequence[str],
    smooth: bool = True,
    max_side: int = MAX_SIDE,
    dpi: int = 300,
) -> None:
    """Write the photo, its map with lines, a colour bar and the lines of the caption.

    Equal arguments give equal bytes.

    Args:
        path: The file.
        image: The whole upright original.
        values: The map, in multiples of the average patch.
        geometry: Box of the model's input in the original.
        kind: "svg" or "pdf".
        scale: Scale of the colours.
        caption: Lines below the pictures; none for pictures and colour bar alone.
        smooth: Interpolate between patches.
        max_side: Largest side of the photo in pixels; 0 for no limit.
        dpi: Pixels of the photo per inch.
    """
    width, height = (side / dpi for side in panel_size(image.size, max_side))
    total = (2 * width + 2 * _GAP_INCHES + _BAR_INCHES, height)
    characters = max(int(total[0] / _CHARACTER_INCHES), 10)
    lines = [line for text in caption for line in wrap(text, characters)]
    # texts stay text in the file; the salt makes its ids the same each time
    settings = rc_context(
        {
            "svg.fonttype": "none",
            "pdf.fonttype": 42,
            "svg.hashsalt": "vit",
            "font.size": _FONT_POINTS,
        }
    )
    with _ONE_AT_A_TIME, settings:
        figure = Figure(figsize=total, dpi=dpi)

        def add_axes(left: float, right: float) -> Axes:
            return figure.add_axes((left / total[0], 0, (right - left) / total[0], 1))

        photo = image.resize(panel_size(image.size, max_side), Image.Resampling.LANCZOS)
        heat = blend(photo, values, geometry, scale=scale, smooth=smooth, lines=False)
        for picture, left in ((photo, 0.0), (heat, width + _GAP_INCHES)):
            axes = add_axes(left, left + width)
            axes.set_axis_off()
            axes.imshow(picture, extent=(0, image.width, image.height, 0), aspect="auto")
        _draw_lines(axes, values, geometry, scale)
        if not scale.is_flat:
            left = 2 * (width + _GAP_INCHES)
            _draw_bar(add_axes(left, left + _BAR_INCHES), scale)
        figure.text(0, -_GAP_INCHES / height, "\n".join(lines), va="top", linespacing=1.3)
        dates = {"svg": "Date", "pdf": "CreationDate"}
        # the page grows to hold caption and numbers
        figure.savefig(
            path,
            format=kind,
            bbox_inches="tight",
            pad_inches=0.02,
            metadata={dates[kind]: None},
        )


def _draw_lines(axes: Axes, values: PatchMap, geometry: Geometry, scale: ColourScale) -> None:
    """Draw the outline of half of the evidence, and the frame of the model's input."""
    outline = trace_outline(values, geometry, scale)
    for colour, points in (("black", 1.5), ("white", 0.8)):
        lines = LineCollection(outline, colors=colour, linewidths=points, capstyle="projecting")
        axes.add_collection(lines)
    left, top, right, bottom = geometry.box
    if (right - left, bottom - top) != geometry.original_size:
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="white")
        frame.set_linewidth(0.5)
        axes.add_patch(frame)


def _draw_bar(axes: Axes, scale: ColourScale) -> None:
    ramp = np.linspace(scale.high, scale.low, 256, dtype=np.float32)[:, None]
    axes.imshow(draw_colours(ramp, scale), extent=(0, 1, scale.low, scale.high), aspect="auto")
    middle = [0.0] if scale.low < 0 < scale.high else []
    ends = [scale.low, *middle, scale.high]
    axes.set_xticks([])
    axes.set_yticks(ends, [f"{end:.3g}" for end in ends])
    axes.tick_params(length=2, width=0.5, pad=1)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.set_ylabel(f"{UNIT}, {scale.label}" if scale.label else UNIT, labelpad=1)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
