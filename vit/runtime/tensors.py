"""Types of the tensors that modules pass to each other, with the names of their dimensions."""

from jaxtyping import Float
from torch import Tensor

# B: images in a batch.
Images = Float[Tensor, "B channels height width"]
Logits = Float[Tensor, "B classes"]
# N: tokens of an image; D: values of a token.
Tokens = Float[Tensor, "B N D"]
