"""Lets torchvision be imported, which timm does, and transformers and lightning where they find it.

A package index has torchvision built for CUDA. Beside a CPU build of torch its compiled operators are missing, and the
import fails at the names of two of them. No client calls them.
"""

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
