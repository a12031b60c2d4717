"""Says whether there is a GPU on which the checks can run. Imports torch only when it is asked."""

from __future__ import annotations

LEAST_CAPABILITY = (8, 0)  # flash attention and bfloat16


def why_no_gpu() -> str | None:
    """Return the reason why nothing can run on a GPU here; None if there is one that serves."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), capability
        return f"{name} has compute capability {major}.{minor}, and the kernels need 8.0"
    return None
