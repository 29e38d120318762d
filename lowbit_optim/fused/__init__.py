"""The fused step: all tensors of a group and dtype in one launch of a Triton kernel. Importing it needs Triton."""

from lowbit_optim.fused.launch import FusedLion as FusedLion
