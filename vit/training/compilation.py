"""When a run is long enough for compilation to pay, and where compiled code is kept."""

import os
import shutil
from pathlib import Path

# FLOPs at one image size from which compiling for that size pays. CPU: the step gains 8 to 13 % and compiling takes
# 32 s (2-core Zen 5), even after 6 minutes at 0.45 TFLOP/s; the next run finds it compiled. CUDA: assumed, 30 % and
# 60 s at 80 TFLOP/s.
_WORTHWHILE_FLOPS = {"cpu": 1.6e14, "cuda": 1.6e16}


def should_compile(device_type: str, *, total_flops: float, num_sizes: int = 1) -> bool:
    """Whether a run of `total_flops`, forward and backward, over `num_sizes` image sizes is to be compiled. It depends
    on nothing that is measured, so that a resumed run decides as the interrupted one did."""
    pays = total_flops / num_sizes >= _WORTHWHILE_FLOPS.get(device_type, float("inf"))
    return pays and any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))


def keep_compiled_code(directory: Path) -> None:
    """Let torch keep what it compiles in `directory`, unless TORCHINDUCTOR_CACHE_DIR names another: its own choice is
    the folder for temporary files, which is emptied now and then."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory))
