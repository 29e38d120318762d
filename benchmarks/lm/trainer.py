"""One training run: what decides its numbers, the step, and checkpoints that go on bit for bit."""

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.lm import UsageError, optimizers, variants
from benchmarks.lm.data import ByteDataset
from benchmarks.lm.model import CONFIGS, GPT
from benchmarks.lm.parallel import Alone

SCHEDULES = ("constant", "cosine", "linear")
# Name -> dtype of the weights, dtype that autocast computes in, whether the loss is scaled.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {
    "fp32": (torch.float32, None, False),
    "amp_bf16": (torch.float32, torch.bfloat16, False),
    "amp_fp16": (torch.float32, torch.float16, True),
    "bf16": (torch.bfloat16, None, False),
}
_LR_FLOOR = 0.1  # of the peak, where a schedule ends
_HELD_OUT_SEED = 1234  # the same windows at every evaluation of every run


@dataclass(frozen=True)
class Settings:
    """What decides a run's numbers; saved in its checkpoints.

    Args:
        optimizer: a key of `REGISTRY`.
        data: files of text; None is the Python standard library's source.
        model: a key of `CONFIGS`.
        layers: cuts the depth; None keeps the model's own.
        steps: optimizer steps.
        batch_size: sequences a step.
        seq_len: bytes a sequence.
        accumulate: equal parts that a step's batch is cut into.
        lr, weight_decay: None takes the optimizer's default for this model.
        schedule: of the learning rate, after the warm-up; "cosine" and "linear" end at a tenth.
        warmup: steps of linear warm-up; None is a twentieth of `steps`.
        clip: largest gradient norm, 0 for no limit.
        dtype: a key of `DTYPES`.
        int8, lora, qlora: see `variants.apply`; None is off.
        master_weight_bits: 24 or 32, of bf16 weights; None leaves it to the optimizer.
        stochastic_rounding: False rounds bf16 weights to nearest.
        compile: whether the model runs under `torch.compile`.
        deterministic: whether only deterministic kernels may be used (a GPU's default ones are not).
        seed: of the weights and the order of the data.
        eval_every: steps between held-out losses; None is a tenth of `steps`.
        eval_sequences: windows that a held-out loss is the mean of.

    Raises:
        UsageError: a value is not allowed.
    """

    optimizer: str = "lion8bit"
    data: list[str] | None = None
    model: str = "tiny"
    layers: int | None = None
    steps: int = 320
    batch_size: int = 16
    seq_len: int = 128
    accumulate: int = 1
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str = "cosine"
    warmup: int | None = None
    clip: float = 1.0
    dtype: str = "fp32"
    int8: str | None = None
    lora: int | None = None
    qlora: int | None = None
    master_weight_bits: int | None = None
    stochastic_rounding: bool = True
    compile: bool = False
    deterministic: bool = False
    seed: int = 0
    eval_every: int | None = None
    eval_sequences: int = 256

    def __post_init__(self) -> None:
        _check_choice("optimizer", self.optimizer, optimizers.REGISTRY)
        _check_choice("model", self.model, CONFIGS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("int8", self.int8, (None, *variants.INT8))
        positive = "layers", "steps", "batch_size", "seq_len", "accumulate", "lora", "qlora"
        for name in (*positive, "eval_every", "eval_sequences"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("lr", "weight_decay", "warmup", "clip", "seed"):
            _check_at_least(name, getattr(self, name), 0)
        if self.master_weight_bits not in (None, 24, 32):
            raise UsageError(f"master-weight-bits is {self.master_weight_bits}; choose from 24, 32")
        if self.optimizer_options and DTYPES[self.dtype][0] == torch.float32:
            raise UsageError(f"{', '.join(self.optimizer_options)} is of 16-bit weights; give --dtype bf16 with it")
        if self.lora and self.qlora:
            raise UsageError("--lora and --qlora are two bases for one kind of adapter; give one of them")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"batch-size {self.batch_size} cannot be cut into {self.accumulate} equal parts; "
                "choose a batch-size that accumulate divides"
            )

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """What is not left to the optimizer, by its own names."""
        options: dict[str, Any] = {}
        if self.master_weight_bits:
            options["master_weight_bits"] = self.master_weight_bits
        if not self.stochastic_rounding:
            options["stochastic_rounding"] = False
        return options

    def resolved(self) -> "Settings":
        """These settings with every default that depends on another one written out."""
        return replace(
            self,
            lr=optimizers.default_lr(self.optimizer, self.model) if self.lr is None else self.lr,
            weight_decay=(
                optimizers.default_weight_decay(self.optimizer) if self.weight_decay is None else self.weight_decay
            ),
            layers=CONFIGS[self.model].layers if self.layers is None else self.layers,
            warmup=self.steps // 20 if self.warmup is None else self.warmup,
            eval_every=max(1, self.steps // 10) if self.eval_every is None else self.eval_every,
        )


def _check_choice(name: str, value: str | None, allowed: Any) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; choose from {', '.join(filter(None, allowed))}")


def _check_at_least(name: str, value: float | None, minimum: int) -> None:
    if value is not None and not minimum <= value < math.inf:
        raise UsageError(f"{name.replace('_', '-')} is {value}; it must be a finite number of at least {minimum}")


def _check_memory_options(settings: Settings, parallel: Alone, gradient_release: bool, offload_state: bool) -> None:
    for option, is_given in {"--gradient-release": gradient_release, "--offload-state": offload_state}.items():
        if is_given and optimizers.REGISTRY[settings.optimizer].package != "lowbit-optim":
            raise UsageError(f"{option} is an option of lion8bit and lion, not of {settings.optimizer}")
    reasons = {
        "--clip 0: the norm of all gradients is not known when the first parameter is stepped": settings.clip,
        "--accumulate 1: a parameter is stepped by its first gradient": settings.accumulate > 1,
        "another --dtype than amp_fp16: an overflow would be found too late": DTYPES[settings.dtype][2],
        "--parallel fsdp, hsdp or tp: ddp averages gradients too late": getattr(parallel, "kind", None) == "ddp",
    }
    for need, is_in_the_way in reasons.items():
        if gradient_release and is_in_the_way:
            raise UsageError(f"--gradient-release needs {need}")


def lr_factor(step: int, schedule: str, steps: int, warmup: int) -> float:
    """Share of the peak learning rate that step `step`, counted from 0, is done with."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "cosine":
        return _LR_FLOOR + (1 - _LR_FLOOR) * (1 + math.cos(math.pi * progress)) / 2
    if schedule == "linear":
        return 1 - (1 - _LR_FLOOR) * progress
    return 1.0


class Trainer:
    """Model, optimizer and everything else that a step changes.

    Args:
        settings: what to train and how.
        dataset: what to train on.
        device: where.
        parallel: on which ranks.
        checkpoint_activations: whether the backward pass computes what is inside each block again.
        gradient_release: whether each parameter is stepped as its gradient arrives.
        offload_state: whether the optimizer's state is kept in host memory.

    Raises:
        UsageError: the optimizer is not installed, does not run on `device`, or has no such option.
    """

    def __init__(
        self,
        settings: Settings,
        dataset: ByteDataset,
        device: torch.device,
        parallel: Alone | None = None,
        checkpoint_activations: bool = False,
        gradient_release: bool = False,
        offload_state: bool = False,
    ) -> None:
        self.settings = settings = settings.resolved()
        self.dataset = dataset
        self.device = device
        self.parallel = parallel = parallel or Alone()
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.clock = Clock(device)

        optimizers.find(settings.optimizer, device)
        _check_memory_options(settings, parallel, gradient_release, offload_state)
        weight_dtype, compute_dtype, scaled = DTYPES[settings.dtype]
        self.autocast_dtype = compute_dtype if parallel.autocasts else None
        parallel.check(settings.dtype, settings.batch_size // settings.accumulate, CONFIGS[settings.model])
        torch.manual_seed(settings.seed)
        with device:
            model = GPT(replace(CONFIGS[settings.model], layers=settings.layers))
        self.model = model.to(weight_dtype)
        variants.apply(self.model, int8=settings.int8, lora=settings.lora, qlora=settings.qlora)
        self.model.checkpoint_activations = checkpoint_activations
        self.loss_fn = parallel.spread(self.model, compute_dtype, settings.compile)
        options = settings.optimizer_options | ({"offload_state": True} if offload_state else {})
        self.optimizer = optimizers.build(settings.optimizer, self.model, settings.lr, settings.weight_decay, options)
        if gradient_release:
            import lowbit_optim  # torchao speaks when it is imported, and `hush` comes after these modules

            lowbit_optim.gradient_release(self.model, self.optimizer)
        self.scheduler = LambdaLR(
            self.optimizer,
            partial(lr_factor, schedule=settings.schedule, steps=settings.steps, warmup=settings.warmup),
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self.generator = torch.Generator().manual_seed(settings.seed)

    def train_step(self) -> Tensor:
        """One optimizer step on the next batch; its loss before the step, fp32 `()`, on the device."""
        inputs, targets = self._to_device(*self.dataset.batch(self.settings.batch_size, *self._window))
        parts = self.settings.accumulate
        losses = []
        for part in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with self._autocast():
                loss = self.loss_fn(*map(self.parallel.own, part)) / parts
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self._clip()
        with self.clock.measure():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return self.parallel.mean(torch.stack(losses).sum())

    @property
    def _window(self) -> tuple[int, torch.Generator]:
        return self.settings.seq_len, self.generator

    def _to_device(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def _clip(self) -> None:
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            self.parallel.clip(self.model.parameters(), self.settings.clip)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss, nats a byte, over the same windows of the held-out text at every call."""
        count, seq_len = self.settings.eval_sequences, self.settings.seq_len
        generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
        inputs, targets = self.dataset.batch(count, seq_len, generator, "valid")
        part_size = self.settings.batch_size // self.settings.accumulate
        total = 0.0
        for part in zip(inputs.split(part_size), targets.split(part_size), strict=True):
            with self._autocast():
                total += self.model.loss(*self._to_device(*part)).item() * len(part[0])
        return total / count

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint to `path`: beside it first, so that whatever happens one whole checkpoint is there.

        Raises:
            UsageError: the disk is full or the folder cannot be written.
        """
        checkpoint = self._checkpoint()
        if self.parallel.rank == 0:
            self._write(checkpoint, path)

    @staticmethod
    def _write(checkpoint: dict[str, Any], path: Path) -> None:
        partial_path = path.with_name(path.name + ".partial")
        try:
            with partial_path.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial_path, path)
        except (OSError, RuntimeError) as error:
            partial_path.unlink(missing_ok=True)
            raise UsageError(f"cannot write {path} ({_disk_error(error)}); {_what_is_left(path)}") from error

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "text": _digest(self.dataset),
            "step": self.step,
            "history": self.history,
            "model": self.parallel.whole(self.model.state_dict()),
            "optimizer": self.parallel.whole(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data_order": self.generator.get_state(),
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    @classmethod
    def resume(cls, checkpoint: dict[str, Any], dataset: ByteDataset, device: torch.device, **place: Any) -> "Trainer":
        """The trainer that wrote `checkpoint`, as it was, on any number of ranks (`place`, as for a new one).

        Raises:
            UsageError: `dataset` is another text.
        """
        if checkpoint["text"] != _digest(dataset):
            raise UsageError("the text is not the one that this run was trained on; give the same --data")
        trainer = cls(Settings(**checkpoint["settings"]), dataset, device, **place)
        trainer.step = checkpoint["step"]
        trainer.history = checkpoint["history"]
        trainer.parallel.load(trainer.model, trainer.optimizer, checkpoint)
        trainer.scheduler.load_state_dict(checkpoint["scheduler"])
        trainer.scaler.load_state_dict(checkpoint["scaler"])
        trainer.generator.set_state(checkpoint["data_order"])
        torch.set_rng_state(checkpoint["rng"])
        if device.type == "cuda" and checkpoint["device_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["device_rng"], device)
        return trainer


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `Trainer.save` wrote, on the CPU.

    Raises:
        UsageError: there is no such file, or it is something else.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # torch.load raises whatever the broken bytes lead to
        raise UsageError(f"{path} is not a checkpoint of this script") from error
    if not isinstance(checkpoint, dict) or "data_order" not in checkpoint:
        raise UsageError(f"{path} is not a checkpoint of this script")
    return checkpoint


def _digest(dataset: ByteDataset) -> str:
    digest = hashlib.sha256(len(dataset.train).to_bytes(8, "big"))
    for part in (dataset.train, dataset.valid):
        digest.update(memoryview(part.numpy()))
    return digest.hexdigest()


def _disk_error(error: BaseException) -> str:
    """torch.save hides the disk's own error behind one about its archive."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return (isinstance(error, OSError) and error.strerror) or str(error).splitlines()[0]


def _what_is_left(path: Path) -> str:
    if path.exists():
        return f"the checkpoint written there before is whole: make room, then go on with --resume {path}"
    return "make room or choose another --out"


class Clock:
    """Durations of the optimizer's steps, without making a GPU wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._durations: list[Callable[[], float]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._durations.append(lambda: start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            yield
            milliseconds = (time.perf_counter() - begun) * 1e3
            self._durations.append(lambda: milliseconds)

    def milliseconds(self) -> list[float]:
        """Every duration so far; on a GPU all work must have ended."""
        return [duration() for duration in self._durations]
