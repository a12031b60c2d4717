"""Model FLOPs utilisation: the share of a GPU's peak that the arithmetic of the step uses.

The peak is the dense one in bfloat16 with float32 accumulation, whatever the compute type, so that
figures can be compared. If the peak is not known, as on a CPU, the MFU is None.
"""

from __future__ import annotations

import torch

# Dense bfloat16 FLOP/s from the vendors' data sheets, by words in the device's name. If several entries
# match, the first one is used.
PEAK_FLOPS = (
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("RTX A6000", 154.8e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # the value of one of its two dies, each of which is a device
)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its driver's device name; None if it is not known."""
    words = f" {name.upper().replace('-', ' ')} "
    return next((peak for part, peak in PEAK_FLOPS if f" {part.upper()} " in words), None)


def mfu(flops: float, *, seconds: float, devices: int, peak: float | None) -> float | None:
    """Return flops / (seconds × devices × peak); None without a peak.

    Args:
        flops: the FLOPs of all passes on all devices, without recomputation by activation checkpointing.
        peak: the peak FLOP/s of one device.
    """
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)
