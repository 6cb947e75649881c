"""Functions are marked for torch's compiler as torch marks them, without importing it."""

import torch

from vit.runtime.threads import constant_when_compiled


def test_the_mark_is_torchs_own():
    """`_dynamo_marked_constant` is private; where torch renames it, `constant_when_compiled` does
    nothing, and a compiled model draws the same random numbers in every thread's place."""

    def ours():
        return 1

    def theirs():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant_when_compiled(ours)) == vars(theirs) != {}
