"""One run on several ranks: how the model is spread, who takes which part of a batch, and whole checkpoints."""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from benchmarks.lm import UsageError
from benchmarks.lm.model import GPT, next_token_loss

LossFunction = Callable[[Tensor, Tensor], Tensor]

KINDS = ("fsdp", "hsdp", "tp", "ddp")
_HSDP_REPLICAS = 2
_PATIENCE = timedelta(minutes=1)
_TP_PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
    "attention.out": RowwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


class Alone:
    """One process with the whole model."""

    rank = 0
    autocasts = True  # whether mixed precision is left to autocast

    def check(self, dtype: str, part_size: int, model: Any) -> None:
        """That a run is possible, before it starts."""

    def spread(self, model: GPT, compute_dtype: torch.dtype | None, compiled: bool) -> LossFunction:
        """Shard ``model`` in place. Returns what gives the loss of tokens and targets."""
        return torch.compile(model.loss) if compiled else model.loss

    def own(self, batch: Tensor) -> Tensor:
        """The sequences of a batch, or a part of one, that this rank trains on."""
        return batch

    def mean(self, loss: Tensor) -> Tensor:
        return loss

    def any(self, flag: bool) -> bool:
        return flag

    def clip(self, parameters: Iterable[Tensor], norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)

    def whole(self, state: Any) -> Any:
        """A state dict with whole tensors on the CPU, on the first rank; nothing on the others."""
        return state

    def load(self, model: GPT, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    def meet(self, error: Exception) -> None:
        """Wait for the other ranks after a failure, to go on with something else.

        Raises ``error`` if each rank may have failed elsewhere, and RuntimeError if others did not, and so do not come.
        """

    def close(self) -> None:
        """After the run."""


class Parallel(Alone):
    """One of the ranks that ``torchrun`` started.

    Args:
        kind: one of ``KINDS``. "hsdp" has 2 replicas, each sharded over half of the ranks. "tp" leaves the embedding,
            the head and the norms whole on each rank.
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        cpu_offload: keep shards, gradients and optimizer state in host memory; with "fsdp" and "hsdp".

    Raises:
        UsageError: it cannot be done.
    """

    def __init__(self, kind: str, device_type: str, cpu_offload: bool = False) -> None:
        if kind not in KINDS:
            raise UsageError(f"parallel is {kind!r}; choose from {', '.join(KINDS)}")
        if "RANK" not in os.environ:
            command = "torchrun --nproc-per-node=2 benchmarks/train_lm.py"
            raise UsageError(f"--parallel {kind} takes several processes: {command} --parallel {kind}")
        if cpu_offload and kind not in ("fsdp", "hsdp"):
            raise UsageError(f"--cpu-offload works with --parallel fsdp and hsdp, not {kind}")
        self.kind, self.cpu_offload = kind, cpu_offload
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._failed = dist.new_group(backend="gloo", timeout=_PATIENCE)
        if kind == "hsdp" and self.world_size % _HSDP_REPLICAS:
            raise UsageError(f"hsdp takes an even number of ranks, not {self.world_size}")
        shape, names = (self.world_size,), ("ranks",)
        if kind == "hsdp":
            shape, names = (_HSDP_REPLICAS, self.world_size // _HSDP_REPLICAS), ("replicas", "shards")
        self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        self.data_ranks = 1 if kind == "tp" else self.world_size
        self.autocasts = kind in ("tp", "ddp")

    def check(self, dtype: str, part_size: int, model: Any) -> None:
        if dtype == "amp_fp16":
            raise UsageError("amp_fp16 scales the loss on each rank alone; with --parallel use bf16 or amp_bf16")
        if part_size % self.data_ranks:
            raise UsageError(
                f"{part_size} sequences (batch-size / accumulate) cannot be shared equally by {self.data_ranks} ranks"
            )
        if self.kind == "tp" and model.kv_heads % self.world_size:
            raise UsageError(f"{self.world_size} ranks cannot share {model.kv_heads} key-value heads equally")

    def spread(self, model: GPT, compute_dtype: torch.dtype | None, compiled: bool) -> LossFunction:
        if self.kind == "tp":
            for block in model.blocks:
                parallelize_module(block, self.mesh, _TP_PLAN)
        if compiled:  # block by block: what is between is for FSDP's and DDP's hooks
            for block in model.blocks:
                block.compile()
        if self.kind == "ddp":
            replica = DistributedDataParallel(model)
            return lambda tokens, targets: next_token_loss(replica(tokens), targets)
        if self.kind in ("fsdp", "hsdp"):
            self._fully_shard(model, compute_dtype)
        return model.loss

    def _fully_shard(self, model: GPT, compute_dtype: torch.dtype | None) -> None:
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.cpu_offload else OffloadPolicy()
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload)

    def own(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.data_ranks)[self.rank % self.data_ranks]

    def mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / self.world_size

    def any(self, flag: bool) -> bool:
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def clip(self, parameters: Iterable[Tensor], norm: float) -> None:
        """Tensor parallelism has sharded parameters beside whole ones, which torch does not clip together."""
        parameters = list(parameters)
        kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
        total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for p in parameters:
            torch.nn.utils.clip_grads_with_norm_([p], norm, total)

    def whole(self, state: Any) -> Any:
        state = tree_map_only(DTensor, lambda x: x.full_tensor().cpu() if self.rank == 0 else _take_part(x), state)
        return state if self.rank == 0 else None

    def load(self, model: GPT, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            live = model.state_dict()
            for name, tensor in checkpoint["model"].items():
                live[name].copy_(_sharded_like(live[name], tensor))
        saved = checkpoint["optimizer"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {i: {k: _sharded_like(parameters[i], v) for k, v in s.items()} for i, s in saved["state"].items()}
        optimizer.load_state_dict({**saved, "state": state})

    def meet(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        dist.barrier(self._failed)

    def close(self) -> None:
        dist.destroy_process_group()


def _take_part(x: DTensor) -> None:
    x.full_tensor()


def _sharded_like(live: Tensor, saved: Any) -> Any:
    if not isinstance(live, DTensor) or not isinstance(saved, Tensor) or saved.shape != live.shape:
        return saved
    device = live.to_local().device
    return distribute_tensor(saved.to(device), live.device_mesh, live.placements, src_data_rank=None)
