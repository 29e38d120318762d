"""What a results file calls the machine that its figures are of."""

import os

import torch


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()}-core CPU"
