"""`vit faithfulness`: how far attention maps can be believed, measured beside controls."""


def faithfulness() -> None:
    """Measure how faithful each kind of attention map is to the model."""
    raise ValueError("faithfulness is not built yet")
