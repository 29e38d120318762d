"""Train a byte-level language model and see what each optimizer makes of it.

python benchmarks/train_lm.py
python benchmarks/train_lm.py --compare lion,lion8bit,bnb.Lion8bit
python benchmarks/train_lm.py --model 124m --data books/*.txt --checkpoint-every 500
python benchmarks/train_lm.py --resume runs/…/lion8bit.pt
torchrun --nproc-per-node=2 benchmarks/train_lm.py --parallel fsdp --model 124m
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):  # run as a file: its own folder is on the path, the project's is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Read once, when torch loads OpenMP. Threads that spin while they wait make a step ten times slower where other
# programs want the cores too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from benchmarks.lm import UsageError, data, hush, loop, optimizers, report
from benchmarks.lm.model import CONFIGS
from benchmarks.lm.parallel import KINDS, Alone, Parallel
from benchmarks.lm.trainer import DTYPES, SCHEDULES, Settings, Trainer, load_checkpoint

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0, 2 for what the person at it can put right, 130 if interrupted."""
    hush()
    try:
        return run(parse(argv))
    except (UsageError, torch.OutOfMemoryError) as error:
        message = str(error).splitlines()[0]
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"train_lm: error: {message}", file=sys.stderr)
    return 2


# --- Command line ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options; those of a run's settings are absent unless given, so that `Settings` alone holds their defaults."""
    parser = Parser("train_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--optimizer", metavar="NAME", help=f"one of {', '.join(optimizers.REGISTRY)}")
    choice.add_argument("--compare", metavar="A,B,…", help="train with each of these, from the same seed")
    choice.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint, with its settings")
    _add_settings(parser.add_argument_group("the run", argument_default=argparse.SUPPRESS))
    place = parser.add_argument_group("where and how long")
    place.add_argument("--device", help="cpu, cuda, cuda:1, …; default: a GPU if there is one")
    place.add_argument("--out", type=Path, metavar="DIR", help="default: a new folder in runs/")
    place.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="default: never; --resume needs one"
    )
    place.add_argument("--parallel", metavar="HOW", help=f"under torchrun, one of {', '.join(KINDS)}")
    place.add_argument("--cpu-offload", action="store_true", help="with fsdp or hsdp: keep shards in host memory")
    place.add_argument(
        "--checkpoint-activations", action="store_true", help="compute activations again in the backward pass"
    )
    place.add_argument(
        "--gradient-release", action="store_true", help="step each parameter as its gradient arrives; needs --clip 0"
    )
    place.add_argument("--offload-state", action="store_true", help="keep the optimizer's state in host memory")
    place.add_argument("--stop-at", type=int, metavar="STEP", help="write a checkpoint there and end, to go on later")
    return parser.parse_args(argv)


def _add_settings(group: Any) -> None:
    defaults = Settings()
    group.add_argument("--data", nargs="+", metavar="FILE", help="text; default: the Python standard library's source")
    group.add_argument("--model", help=f"one of {', '.join(CONFIGS)}; default: {defaults.model}")
    group.add_argument("--layers", type=int, help="cut the model's depth")
    group.add_argument("--dtype", help=f"one of {', '.join(DTYPES)}; default: amp_bf16 on a GPU, fp32 on a CPU")
    group.add_argument("--lr", type=float, help="peak learning rate; default: by optimizer and model")
    group.add_argument("--weight-decay", type=float, help="default: by optimizer")
    group.add_argument("--schedule", help=f"one of {', '.join(SCHEDULES)}; default: {defaults.schedule}")
    group.add_argument("--warmup", type=int, help="steps; default: a twentieth of all")
    group.add_argument("--clip", type=float, help=f"largest gradient norm, 0: none; default: {defaults.clip:g}")
    group.add_argument("--steps", type=int, help=f"default: {defaults.steps}")
    group.add_argument("--batch-size", type=int, help=f"sequences a step; default: {defaults.batch_size}")
    group.add_argument("--seq-len", type=int, help=f"bytes a sequence; default: {defaults.seq_len}")
    group.add_argument("--accumulate", type=int, help="parts that a step's batch is cut into; default: 1")
    group.add_argument("--seed", type=int, help=f"of the weights and the data's order; default: {defaults.seed}")
    group.add_argument("--eval-every", type=int, help="steps; default: a tenth of all")
    group.add_argument("--eval-sequences", type=int, help=f"default: {defaults.eval_sequences}")
    group.add_argument(
        "--int8",
        nargs="?",
        const="auto",
        metavar="WHERE",
        help="int8 matmuls: where they gain (auto), or in all linear layers but the last (always)",
    )
    group.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank; needs peft")
    group.add_argument("--qlora", type=int, metavar="RANK", help="the same, beside weights stored in 4 bits")
    group.add_argument(
        "--master-weight-bits", type=int, metavar="BITS", help="24 or 32 for bf16 weights; default: the optimizer's own"
    )
    group.add_argument(
        "--no-stochastic-rounding",
        dest="stochastic_rounding",
        action="store_false",
        help="round bf16 weights to nearest",
    )
    group.add_argument("--compile", action="store_true", help="run the model under torch.compile")
    group.add_argument("--deterministic", action="store_true", help="the same bits on a GPU each time; slower")


# --- What it does ----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    if args.checkpoint_every < 0 or (args.stop_at is not None and args.stop_at < 1):
        raise UsageError("--checkpoint-every and --stop-at count steps: give a positive number")
    device = pick_device(args.device)
    parallel = Parallel(args.parallel, device.type, args.cpu_offload) if args.parallel else Alone()
    device = parallel.device if isinstance(parallel, Parallel) else device
    given = {name: value for name, value in vars(args).items() if name in Settings.__dataclass_fields__}
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    if checkpoint:
        refuse_changes(given, checkpoint)
        settings = [Settings(**checkpoint["settings"])]
    else:
        settings = choose_settings(args, given, device)
    if settings[0].deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    dataset = load_dataset(given.get("data", settings[0].data), settings[0].seq_len)
    out = make_folder(args, settings, parallel)
    options = ("checkpoint_activations", "gradient_release", "offload_state")
    place = {"parallel": parallel, **{name: getattr(args, name) for name in options}}
    header = {"device": device_name(device), "torch": torch.__version__, "bigram_loss": data.bigram_loss(dataset)}
    for each in settings:
        start = partial(Trainer.resume, checkpoint) if checkpoint else partial(Trainer, each)
        try:
            code = train(partial(start, dataset, device, **place), out, header, args)
        except Exception as error:
            if len(settings) == 1 or isinstance(error, UsageError):
                raise
            parallel.meet(error)
            say_what_failed(each.optimizer, error, parallel)
        else:
            if code is not None:
                return code
        free_memory()
    parallel.close()
    if parallel.rank == 0:
        show(out)
    return 0


def train(start: Callable[[], Trainer], out: Path, header: dict[str, Any], args: argparse.Namespace) -> int | None:
    """To the end; else the exit code of a run that was stopped."""
    trainer = start()
    if loop.train(trainer, out, header=header, checkpoint_every=args.checkpoint_every, stop_at=args.stop_at):
        return None
    return say_how_to_resume(trainer, out, args)


def pick_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used ({reason}); try --device cpu") from error
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {os.cpu_count()} cores"


def choose_settings(args: argparse.Namespace, given: dict[str, Any], device: torch.device) -> list[Settings]:
    """The settings of every run asked for, each known to be possible before the first one starts."""
    default = {"dtype": "amp_bf16"} if device.type == "cuda" else {}
    names = args.compare.split(",") if args.compare else [args.optimizer or Settings.optimizer]
    settings = [Settings(**{**default, **given, "optimizer": name}).resolved() for name in names]
    for name in names:
        optimizers.find(name, device)
        optimizers.check_accepts(name, settings[0].optimizer_options)
    return settings


def refuse_changes(given: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    for name, value in given.items():
        saved = checkpoint["settings"][name]
        if name != "data" and value is not None and value != saved:
            option = "--no-stochastic-rounding" if name == "stochastic_rounding" else "--" + name.replace("_", "-")
            raise UsageError(f"{option} {value} is not the {saved} that the checkpoint was trained with; leave it out")
    if checkpoint["step"] >= checkpoint["settings"]["steps"]:
        raise UsageError(f"the checkpoint is complete: all {checkpoint['step']} steps are done")


def load_dataset(files: list[str] | None, seq_len: int) -> data.ByteDataset:
    dataset = data.ByteDataset.from_text(data.load_text(files))
    for split in ("train", "valid"):
        dataset.batch(1, seq_len, torch.Generator(), split)  # says so if the text is too short, before anything starts
    return dataset


def make_folder(args: argparse.Namespace, settings: list[Settings], parallel: Alone) -> Path:
    """The folder to write to; an earlier run's files are never overwritten, except by going on with it."""
    if parallel.rank > 0:
        return args.out or Path()  # only the first rank writes
    if args.resume:
        out = args.out or args.resume.parent
    else:
        out = args.out or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    out.mkdir(parents=True, exist_ok=True)
    for each in settings:
        path = report.metrics_path(out, each.optimizer)
        if path.exists() and not args.resume:
            raise UsageError(f"{path} holds an earlier run; choose another --out, or go on with it: --resume")
    return out


def free_memory() -> None:
    """Give each run of a comparison the start that the first one had."""
    gc.collect()  # sharded modules are in cycles
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def say_how_to_resume(trainer: Trainer, out: Path, args: argparse.Namespace) -> int:
    path = report.checkpoint_path(out, trainer.settings.optimizer)
    if trainer.parallel.rank == 0:
        print(f"train_lm: stopped at step {trainer.step}; go on with: --resume {path}", file=sys.stderr)
    return 0 if trainer.step == args.stop_at else INTERRUPTED


def say_what_failed(optimizer: str, error: Exception, parallel: Alone) -> None:
    """One optimizer that cannot do it leaves the others of a comparison to be compared."""
    if parallel.rank == 0:
        reason = " ".join(str(error).split())[:300]
        print(
            f"train_lm: {optimizer} failed and is left out: {type(error).__name__}: {reason} "
            f"(all of it: --optimizer {optimizer})",
            file=sys.stderr,
        )


def show(out: Path) -> None:
    runs = [run for run in report.read_all(out) if run.summary]
    if not runs:
        raise UsageError("no run is complete, so there is nothing to compare")
    print(f"\n{report.table(runs)}\n", flush=True)
    report.plot(runs, out / "loss.png")
    print(f"losses in nats a byte; curve: {out / 'loss.png'}; metrics: {out}/*.jsonl")


def leave(status: int) -> NoReturn:
    """End the process; a rank without Python's own end, which aborts where a thread of gloo still holds a tensor."""
    if torch.distributed.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
