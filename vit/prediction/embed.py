"""Pooled features of any images: `vit.embed`."""

import numpy as np
from numpy.typing import NDArray

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.data.images import ImageInputs
from vit.model.logits import count_features
from vit.prediction.predict import predict_images
from vit.runtime.arguments import check_arguments


@keeps_mode
@check_arguments(batch_size=(1, None))
def embed(
    model: ModelLike,
    images: ImageInputs,
    *,
    batch_size: int = 64,
    device: str = "auto",
    precision: str = "auto",
) -> NDArray[np.float32]:
    """Compute the pooled features of images, which the model's head reads.

    Args:
        model: See `vit.evaluate`.
        images: See `vit.predict`.
        batch_size: Images at a time.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        Features [N, D], float32, in the order of the images. The features of
        similar images have a large cosine.

    Raises:
        ValueError: The model can't be opened, or an image can't be read.

    Example:
        >>> features = vit.embed("runs/digits", ["photo.png", "other.png"])
        >>> features.shape  # (2, D)
    """
    bundle = open_model(model, device=device)
    predictions = predict_images(
        bundle, images, top_k=1, batch_size=batch_size, precision=precision, with_features=True
    )
    features = []
    for prediction in predictions:
        if prediction.features is None:
            raise ValueError(f"{prediction.path} has no features: {prediction.error}")
        features.append(prediction.features)
    if not features:
        return np.zeros((0, count_features(bundle.model)), dtype=np.float32)
    return np.stack(features)
