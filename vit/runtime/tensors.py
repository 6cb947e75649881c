"""Types of the tensors that several modules pass to each other, with the names of their sides."""

from jaxtyping import Float
from torch import Tensor

# of B images at once
Images = Float[Tensor, "B channels height width"]
Logits = Float[Tensor, "B classes"]
# N of an image, D numbers each
Tokens = Float[Tensor, "B N D"]
