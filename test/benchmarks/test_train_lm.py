"""benchmarks/train_lm.py: what it promises to whoever runs it, and the parts it is made of."""

import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_streams import streams_of
from torch import Tensor

from benchmarks import train_lm
from benchmarks.lm import UsageError, data, loop, optimizers, report
from benchmarks.lm.model import CONFIGS, GPT, Attention, ModelConfig, rotary
from benchmarks.lm.trainer import Settings, Trainer, load_checkpoint, lr_factor
from lowbit_optim.int8_training import matmul
from lowbit_optim.int8_training.linear import Int8MixedPrecisionLinear

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = ModelConfig(vocab=256, layers=2, dim=32, ff=48, heads=4, kv_heads=2, tied=False)
# Seconds, not minutes: one layer, short windows, six steps.
QUICK = [
    *("--device", "cpu", "--layers", "1", "--batch-size", "4", "--seq-len", "16", "--steps", "6", "--eval-every", "6")
]


@pytest.fixture(autouse=True)
def _quick():
    """Compiling takes longer than all of these tests together, and models this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = torch.randint(97, 105, (4000,), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_bytes(bytes(words) + b" the same few words again" * 300)
    return path


@pytest.fixture
def dataset(text: Path) -> data.ByteDataset:
    return data.ByteDataset.from_text(text.read_bytes())


def main(text: Path, out: Path, *options: str) -> int:
    return train_lm.main([*QUICK, "--data", str(text), "--out", str(out), *options])


def resuming(checkpoint: Path) -> list[str]:
    return ["--device", "cpu", "--resume", str(checkpoint), "--checkpoint-every", "6"]


def resume(checkpoint: Path) -> int:
    return train_lm.main(resuming(checkpoint))


def command(*options: str, largest_file: int | None = None, as_module: bool = False) -> subprocess.CompletedProcess:
    """The script in a process of its own, which may be forbidden to write files above a size, as a full disk would."""

    def limit() -> None:
        if largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    how = ["-m", "benchmarks.train_lm"] if as_module else [str(ROOT / "benchmarks" / "train_lm.py")]
    env = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *how, *options], cwd=ROOT, env=env, capture_output=True, text=True, preexec_fn=limit
    )


def error_line(stderr: str) -> str:
    """The one line on stderr that is not the progress bar's."""
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line.strip() and "step/s" not in line]
    assert len(lines) == 1, stderr
    return lines[0]


def assert_same(a, b, path: str = "") -> None:
    """Equal in every bit, whatever the nesting; times are not part of what a run computes."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b), path
        assert a.dtype == b.dtype, path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a.keys() - {"step_ms", "tokens_per_s"}:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b, path


# --- Text ------------------------------------------------------------------------------------------------------------


def test_train_and_held_out_text_are_disjoint_and_whole():
    text = bytes(range(100)) * 9 + bytes(range(200, 250)) * 2
    dataset = data.ByteDataset.from_text(text)
    assert bytes(dataset.train.tolist() + dataset.valid.tolist()) == text
    assert dataset.batch(500, 8, split="train")[1].max() < 100
    assert dataset.batch(500, 8, split="valid")[1].min() >= 200


def test_a_batch_is_windows_of_the_text_and_what_follows():
    dataset = data.ByteDataset(torch.arange(50, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8))
    inputs, targets = dataset.batch(200, 7, torch.Generator().manual_seed(0))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
    assert torch.equal(targets, inputs + 1)
    assert set(inputs[:, 0].tolist()) == set(range(43))


def test_the_standard_library_is_there_and_reads_the_same_twice():
    text = data.load_text()
    assert text == data.load_text()
    assert len(text) > 2_000_000
    assert b"class OrderedDict" in text


def test_byte_pair_loss_is_that_of_a_counted_table():
    train, valid = b"abab" * 50, b"abba"
    dataset = data.ByteDataset(*(torch.tensor(list(part), dtype=torch.uint8) for part in (train, valid)))
    pairs = {(x, y): 1 for x in range(256) for y in range(256)}
    for pair in itertools.pairwise(train):
        pairs[pair] += 1
    expected = [-math.log(pairs[x, y] / sum(pairs[x, z] for z in range(256))) for x, y in itertools.pairwise(valid)]
    assert data.bigram_loss(dataset) == pytest.approx(sum(expected) / 3, abs=1e-6)


# --- Model -----------------------------------------------------------------------------------------------------------


def test_a_later_token_does_not_change_earlier_logits():
    model = GPT(SMALL)
    tokens = torch.randint(256, (3, 20))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.isclose(before[:, 12:], after[:, 12:]).all(-1).any()


def test_attention_equals_a_loop_over_heads_with_complex_rotations():
    attention, x = Attention(SMALL).double(), torch.randn(2, 9, SMALL.dim, dtype=torch.float64)
    width = SMALL.head_dim
    positions = torch.arange(9, dtype=torch.float64)[:, None]
    turn = torch.polar(
        torch.ones(9, width // 2, dtype=torch.float64),
        positions * SMALL.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width),
    )

    def rotated(head: Tensor) -> Tensor:
        turned = torch.complex(head[..., : width // 2], head[..., width // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    heads = []
    for i in range(SMALL.heads):
        j = i // (SMALL.heads // SMALL.kv_heads)
        query = rotated(x @ attention.query.weight[i * width : (i + 1) * width].T)
        key = rotated(x @ attention.key.weight[j * width : (j + 1) * width].T)
        scores = (query @ key.mT / width**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ (x @ attention.value.weight[j * width : (j + 1) * width].T))
    expected = torch.cat(heads, -1) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, rotary(9, SMALL, CPU)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "parameters", "tensors"),
    [
        ("tiny", 1_016_960, 38),
        ("30m", 29_938_560, 56),
        ("124m", 123_587_328, 110),
        ("1b", 1_498_482_688, 147),
        ("8b", 8_030_261_248, 291),  # as published for Llama 3 8B
    ],
)
def test_sizes(size: str, parameters: int, tensors: int):
    with torch.device("meta"):
        model = GPT(CONFIGS[size])
    found = list(model.parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)


# --- Optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, entry in optimizers.REGISTRY.items() if not entry.device_types])
def test_every_optimizer_that_runs_here_learns(name: str):
    pytest.importorskip(optimizers.REGISTRY[name].module)
    dataset = data.ByteDataset.from_text(b"the same few words again " * 200)
    trainer = Trainer(Settings(name, layers=1, batch_size=8, seq_len=16, steps=15), dataset, CPU)
    losses = [trainer.train_step().item() for _ in range(15)]
    assert losses[-1] < 0.75 * losses[0]


def test_an_optimizer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(UsageError, match=r"lion_pytorch.Lion cannot be imported.*pip install --upgrade lion-pytorch"):
        optimizers.find("lion_pytorch.Lion", CPU)


def test_only_matrices_decay():
    model = GPT(SMALL)
    decaying, free = optimizers.build("torch.AdamW", model, 1e-3, 0.5).param_groups
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in free["params"]} == {1}
    assert len(decaying["params"]) + len(free["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, {"master_weight_bits": None}), (torch.bfloat16, {})])
def test_flashlion_is_built_as_its_weights_need(dtype: torch.dtype, expected: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizers, "find", lambda name, device: lambda groups, lr, **options: options)
    assert optimizers.build("flashoptim.FlashLion", GPT(SMALL).to(dtype), 1e-3, 0.1) == expected


def test_weights_of_other_formats(text: Path, tmp_path: Path):
    """The options reach the optimizer, the table says which they were, and a run goes on with them."""
    formats = {"24": ("--master-weight-bits", "24"), "nearest": ("--no-stochastic-rounding",)}
    for name, options in formats.items():
        assert main(text, tmp_path / name, "--dtype", "bf16", *options, "--stop-at", "3") == 0
        checkpoint = tmp_path / name / "lion8bit.pt"
        group = load_checkpoint(checkpoint)["optimizer"]["param_groups"][0]
        assert group["master_weight_bits"] == (24 if name == "24" else None)
        assert group["stochastic_rounding"] is (name == "24")
        assert train_lm.main(["--device", "cpu", "--data", str(text), "--resume", str(checkpoint)]) == 0
    names = [run.name for name in formats for run in report.read_all(tmp_path / name)]
    assert names == ["lion8bit, master_weight_bits 24", "lion8bit, rounded to nearest"]
    bytes_of = [
        run.summary["optimizer_bytes_per_parameter"] for name in formats for run in report.read_all(tmp_path / name)
    ]
    assert bytes_of[0] - bytes_of[1] == pytest.approx(1, abs=1e-6)


def test_bytes_per_parameter_of_known_states():
    pytest.importorskip("lion_pytorch")
    for name, expected in (("lion_pytorch.Lion", 4.0), ("torch.AdamW", 8 + 4 * 2 / 9)):
        parameter, bias = torch.nn.Parameter(torch.randn(2, 4)), torch.nn.Parameter(torch.randn(1))
        optimizer = optimizers.build(name, torch.nn.ParameterList([parameter, bias]), 1e-3, 0.1)
        (parameter.sum() + bias.sum()).backward()
        optimizer.step()
        assert optimizers.bytes_per_parameter(optimizer) == expected


def test_bytes_per_parameter_of_a_tensor_subclass_and_of_shared_tensors():
    from lowbit_optim.subclasses import OptimState8bit

    parameters = [torch.nn.Parameter(torch.zeros(4, 128)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    table = torch.zeros(256)
    for parameter in parameters:
        state = OptimState8bit.zeros((4, 128), block_size=64)
        optimizer.state[parameter] = {"exp_avg": {"nested": [state]}, "table": table[:], "step": 3}
    scale_bytes = state.scale.numel() * state.scale.element_size()
    assert optimizers.bytes_per_parameter(optimizer) == (2 * (4 * 128 + scale_bytes) + 256 * 4) / (2 * 4 * 128)


# --- The step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("cosine", 0.1), ("linear", 0.1)])
def test_schedules_warm_up_and_end_where_they_say(schedule: str, last: float):
    factors = [lr_factor(step, schedule, steps=100, warmup=10) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[100] == pytest.approx(last)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def gradients_of_one_step(dataset: data.ByteDataset, **options) -> tuple[Tensor, list[Tensor]]:
    trainer = Trainer(Settings("torch.AdamW", layers=1, batch_size=8, seq_len=16, **options), dataset, CPU)
    trainer.optimizer.zero_grad = lambda: None
    loss = trainer.train_step()
    return loss, [p.grad for p in trainer.model.parameters()]


def test_accumulating_parts_gives_the_gradient_of_the_whole(dataset: data.ByteDataset):
    loss, whole = gradients_of_one_step(dataset, clip=0)
    loss_of_parts, parts = gradients_of_one_step(dataset, clip=0, accumulate=4)
    torch.testing.assert_close(loss_of_parts, loss)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_clipping_limits_the_norm_of_the_whole_gradient(dataset: data.ByteDataset):
    _, free = gradients_of_one_step(dataset, clip=0)
    _, clipped = gradients_of_one_step(dataset, clip=0.01)
    norm = torch.cat([g.flatten() for g in free]).norm()
    assert norm > 0.1
    for a, b in zip(free, clipped, strict=True):
        torch.testing.assert_close(a * (0.01 / norm), b, rtol=1e-3, atol=1e-8)


def test_scaled_fp16_gradients_are_clipped_after_unscaling(dataset: data.ByteDataset):
    _, plain = gradients_of_one_step(dataset, clip=0.01)
    _, scaled = gradients_of_one_step(dataset, clip=0.01, dtype="amp_fp16")
    difference = sum((a - b).square().sum() for a, b in zip(plain, scaled, strict=True)).sqrt()
    assert difference < 0.05 * 0.01


@pytest.mark.parametrize(
    ("dtype", "stored"), [("fp32", "float32"), ("amp_bf16", "float32"), ("amp_fp16", "float32"), ("bf16", "bfloat16")]
)
def test_dtypes_store_weights_as_they_say_and_learn(dtype: str, stored: str):
    dataset = data.ByteDataset.from_text(b"the same few words again " * 200)
    trainer = Trainer(Settings(layers=1, batch_size=8, seq_len=16, steps=15, dtype=dtype), dataset, CPU)
    losses = [trainer.train_step().item() for _ in range(15)]
    assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, stored)}
    assert losses[-1] < 0.75 * losses[0]


def test_held_out_loss_is_the_mean_over_the_same_windows(dataset: data.ByteDataset):
    trainer = Trainer(Settings("torch.AdamW", layers=1, batch_size=7, seq_len=16, eval_sequences=40), dataset, CPU)
    order_before = trainer.generator.get_state()
    first = trainer.held_out_loss()
    assert trainer.held_out_loss() == first
    assert torch.equal(trainer.generator.get_state(), order_before)
    inputs, targets = dataset.batch(40, 16, torch.Generator().manual_seed(1234), "valid")
    assert first == pytest.approx(trainer.model.loss(inputs, targets).item(), rel=1e-5)


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer lion9bit", "lion9bit.*choose from lion, lion8bit, torch.AdamW"),
        ("--compare lion,flashoptim.FlashLion", "flashoptim.FlashLion runs on cuda only, not on cpu"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--steps 0", "steps is 0; it must be .* at least 1"),
        ("--lr nan", "lr is nan"),
        ("--weight-decay -1", "weight-decay is -1"),
        ("--batch-size 6 --accumulate 4", "6 cannot be cut into 4 equal parts"),
        ("--model huge", "model is 'huge'; choose from tiny, 30m"),
        ("--dtype fp8", "dtype is 'fp8'; choose from fp32"),
        ("--schedule none", "schedule is 'none'; choose from constant"),
        ("--layers 0", "layers is 0"),
        ("--seq-len 100000", "needs one more than that"),
        ("--device nowhere", "'nowhere' cannot be used"),
        ("--checkpoint-every -1", "--checkpoint-every and --stop-at count steps"),
        ("--data missing.txt", "missing.txt: No such file"),
        ("--resume missing.pt", "cannot read missing.pt: No such file"),
        ("--int8 never", "int8 is 'never'; choose from auto, always"),
        ("--lora 0", "lora is 0"),
        ("--master-weight-bits 16 --dtype bf16", "master-weight-bits is 16; choose from 24, 32"),
        ("--master-weight-bits 24", "master_weight_bits is of 16-bit weights; give --dtype bf16"),
        ("--no-stochastic-rounding --dtype bf16 --optimizer torch.AdamW", "torch.AdamW has no stochastic_rounding"),
        ("--lora 4 --qlora 4", "give one of them"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_arguments_get_one_line(options: str, message: str, text: Path, tmp_path: Path, capsys):
    assert main(text, tmp_path / "run", *options.split()) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith("train_lm: error: ")
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_comparing_gives_one_table_one_plot_and_metrics_of_each(text: Path, tmp_path: Path, capsys):
    assert main(text, tmp_path / "run", "--compare", "lion8bit,torch.AdamW") == 0
    table = capsys.readouterr().out
    runs = report.read_all(tmp_path / "run")
    assert [run.name for run in runs] == ["lion8bit", "torch.AdamW"]
    for run in runs:
        assert f"{run.summary['held_out_loss']:.3f}" in table
        assert f"{run.summary['optimizer_bytes_per_parameter']:.3f}" in table
        assert [row["step"] for row in run.rows] == list(range(1, 7))
    assert runs[0].rows[0]["loss"] == runs[1].rows[0]["loss"], "the same weights meet the same first batch"
    assert runs[0].rows[-1]["loss"] != runs[1].rows[-1]["loss"]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_times_are_those_of_compiled_steps(dataset: data.ByteDataset):
    trainer = Trainer(Settings("torch.AdamW", layers=1), dataset, CPU)
    trainer.train_step()
    spans = [(900.0, 10.0), (900.0, 10.0), (900.0, 10.0), (30.0, 300.0), (30.0, 300.0), (31.0, 290.0)]
    trainer.history = [{"loss": 1.0, "held_out_loss": 1.0, "step_ms": ms, "tokens_per_s": rate} for ms, rate in spans]
    summary = loop._summary(trainer)
    assert (summary["train_step_ms"], summary["tokens_per_s"]) == (30, 300)
    trainer.history = trainer.history[:3]
    assert loop._summary(trainer)["train_step_ms"] == 900


def test_an_earlier_run_is_not_overwritten(text: Path, tmp_path: Path, capsys):
    assert main(text, tmp_path, "--optimizer", "torch.AdamW") == 0
    before = (tmp_path / "torch.AdamW.jsonl").read_bytes()
    assert main(text, tmp_path, "--optimizer", "torch.AdamW") == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert (tmp_path / "torch.AdamW.jsonl").read_bytes() == before


def test_a_line_cut_short_by_a_full_disk_is_passed_over(text: Path, tmp_path: Path):
    assert main(text, tmp_path, "--optimizer", "torch.AdamW") == 0
    path = tmp_path / "torch.AdamW.jsonl"
    path.write_text(path.read_text()[:-5])
    assert report.read(path).summary is None
    assert len(report.read(path).rows) == 6


# --- Changed models --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--int8 always`` lowers them for the rest of the process."""
    monkeypatch.setattr(matmul, "smallest_products", dict(matmul.smallest_products))


def test_int8_is_in_the_layers_asked_for(dataset: data.ByteDataset):
    always = Trainer(Settings(layers=1, int8="always"), dataset, CPU).model
    auto = Trainer(Settings(layers=1, int8="auto"), dataset, CPU).model
    names = {name for name, module in always.named_modules() if isinstance(module, Int8MixedPrecisionLinear)}
    assert len(names) == 7
    assert "head" not in names
    assert set(matmul.smallest_products.values()) == {0}
    assert not any(isinstance(module, Int8MixedPrecisionLinear) for module in auto.modules())  # all are small


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_only_adapters_are_trained(kind: str, dataset: data.ByteDataset):
    pytest.importorskip("peft")
    trainer = Trainer(Settings(layers=1, int8="always", **{kind: 4}), dataset, CPU)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 14
    assert all("lora_" in name for name in trained)
    base = trainer.model.blocks[0].mlp.up.base_layer
    assert type(base) is Int8MixedPrecisionLinear
    assert (type(base.weight.data).__name__ == "NF4Tensor") == (kind == "qlora")
    before = base.weight.to(torch.float32).clone()
    losses = [trainer.train_step().item() for _ in range(12)]
    assert losses[-1] < losses[0]
    assert torch.equal(base.weight.to(torch.float32), before)


def test_peft_that_is_missing_is_named(dataset: data.ByteDataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="need peft"):
        Trainer(Settings(layers=1, lora=4), dataset, CPU)


# --- Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("lion8bit", "fp32"),
        ("lion8bit", "bf16"),
        ("lion8bit", "amp_fp16"),
        ("lion", "bf16"),
        ("torch.AdamW", "amp_fp16"),
        ("bnb.Lion8bit", "fp32"),
    ],
)
def test_resuming_equals_not_stopping(optimizer: str, dtype: str, text: Path, tmp_path: Path):
    pytest.importorskip(optimizers.REGISTRY[optimizer].module)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["--optimizer", optimizer, "--dtype", dtype, "--accumulate", "2"]
    assert main(text, whole, *options, "--checkpoint-every", "6") == 0
    assert main(text, parts, *options, "--stop-at", "3") == 0
    torch.manual_seed(99)
    assert resume(parts / f"{optimizer}.pt") == 0
    ends = [load_checkpoint(folder / f"{optimizer}.pt") for folder in (whole, parts)]
    assert ends[0]["step"] == 6
    assert_same(*ends)
    assert_same(*(report.read(folder / f"{optimizer}.jsonl").rows for folder in (whole, parts)))


@pytest.mark.parametrize("options", ["--int8 always", "--lora 4", "--qlora 4 --int8 always --dtype bf16"])
def test_resuming_a_changed_model_equals_not_stopping(options: str, text: Path, tmp_path: Path):
    if "lora" in options:
        pytest.importorskip("peft")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(text, whole, *options.split(), "--checkpoint-every", "6") == 0
    assert main(text, parts, *options.split(), "--stop-at", "3") == 0
    assert resume(parts / "lion8bit.pt") == 0
    assert_same(*(report.read(folder / "lion8bit.jsonl").rows for folder in (whole, parts)))


def test_resuming_in_a_new_process_equals_not_stopping(text: Path, tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [*QUICK, "--data", str(text), "--dtype", "bf16", "--checkpoint-every", "6"]
    for how in ([*common, "--out", str(whole)], [*common, "--out", str(parts), "--stop-at", "3"]):
        assert command(*how).returncode == 0
    resumed = command(*resuming(parts / "lion8bit.pt"), as_module=True)
    assert resumed.returncode == 0, resumed.stderr
    assert_same(*(load_checkpoint(folder / "lion8bit.pt") for folder in (whole, parts)))


def test_resuming_goes_on_with_the_global_generator(dataset: data.ByteDataset, tmp_path: Path):
    trainer = Trainer(Settings("torch.AdamW", layers=1), dataset, CPU)
    torch.rand(5)
    trainer.save(tmp_path / "a.pt")
    expected = torch.rand(3)
    Trainer.resume(load_checkpoint(tmp_path / "a.pt"), dataset, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupt_ends_the_step_and_writes_a_checkpoint(text: Path, tmp_path: Path, monkeypatch, capsys):
    step = Trainer.train_step

    def interrupted(self: Trainer) -> Tensor:
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)  # a shell that starts this in the background has it ignored
    assert main(text, tmp_path / "run", "--optimizer", "torch.AdamW") == 130
    assert "stopped at step 3; go on with: --resume" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run" / "torch.AdamW.pt")["step"] == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_resuming_refuses_what_would_change_the_run(text: Path, tmp_path: Path, capsys):
    assert main(text, tmp_path / "run", "--optimizer", "torch.AdamW", "--stop-at", "3", "--checkpoint-every", "6") == 0
    resume = ["--resume", str(tmp_path / "run" / "torch.AdamW.pt")]
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[1:])
    assert train_lm.main([*resume, "--lr", "0.5"]) == 2
    assert "--lr 0.5 is not the 0.005 that the checkpoint was trained with" in capsys.readouterr().err
    assert train_lm.main([*resume, "--data", str(other)]) == 2
    assert "the text is not the one" in capsys.readouterr().err
    assert train_lm.main(["--resume", str(text)]) == 2
    assert "is not a checkpoint of this script" in capsys.readouterr().err
    assert train_lm.main([*resume, "--data", str(text), "--checkpoint-every", "6"]) == 0
    assert train_lm.main(resume) == 2
    assert "the checkpoint is complete" in capsys.readouterr().err


def test_a_checkpoint_needs_nothing_to_be_read(text: Path, tmp_path: Path):
    assert main(text, tmp_path, "--stop-at", "3") == 0
    code = "import sys, torch; torch.load(sys.argv[1], weights_only=True); assert 'lowbit_optim' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lion8bit.pt")], check=True, cwd=tmp_path)


def test_a_full_disk_costs_nothing_that_was_written(text: Path, tmp_path: Path):
    assert main(text, tmp_path, "--optimizer", "torch.AdamW", "--stop-at", "3") == 0
    checkpoint = tmp_path / "torch.AdamW.pt"
    before = checkpoint.read_bytes()
    failed = command("--resume", str(checkpoint), "--checkpoint-every", "2", largest_file=100_000)
    assert failed.returncode == 2
    line = error_line(failed.stderr)
    assert f"cannot write {checkpoint} (File too large)" in line
    assert f"go on with --resume {checkpoint}" in line
    assert checkpoint.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
    assert train_lm.main(["--resume", str(checkpoint)]) == 0


def test_metrics_are_json_with_the_settings_first(text: Path, tmp_path: Path):
    assert main(text, tmp_path, "--optimizer", "torch.AdamW", "--lr", "0.25") == 0
    lines = [json.loads(line) for line in (tmp_path / "torch.AdamW.jsonl").read_text().splitlines()]
    saved = Settings(**lines[0]["settings"])
    assert (
        replace(saved, data=None)
        == Settings("torch.AdamW", layers=1, batch_size=4, seq_len=16, steps=6, lr=0.25, eval_every=6).resolved()
    )
    assert "summary" in lines[-1]


# --- Several ranks ---------------------------------------------------------------------------------------------------


def torchrun(
    ranks: int, *options: str, script: Path = ROOT / "benchmarks" / "train_lm.py"
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(script), *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("how", ["fsdp", "hsdp --cpu-offload", "tp", "ddp"])
def test_ranks_train_as_one_process_does(how: str, text: Path, tmp_path: Path):
    """Stopped on 2 ranks, with activations computed again, and gone on with in one process, which writes the end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(text, whole) == 0
    options = ["--parallel", *how.split(), "--checkpoint-activations", "--stop-at", "3", "--out", str(parts)]
    stopped = torchrun(2, *QUICK, "--data", str(text), *options)
    assert stopped.returncode == 0, stopped.stderr
    assert train_lm.main(["--resume", str(parts / "lion8bit.pt")]) == 0
    alone, together = (report.read(folder / "lion8bit.jsonl").rows for folder in (whole, parts))
    for a, b in zip(alone, together, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=0.02)  # sums in another order, and Lion sees their signs


FAILING = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from datetime import timedelta
from benchmarks import train_lm
from benchmarks.lm import parallel

class Failing(torch.optim.AdamW):
    def step(self, closure=None):
        if os.environ["RANK"] in {ranks!r}:
            raise ValueError("no step of this\\noptimizer")
        return super().step(closure)

parallel._PATIENCE = timedelta(seconds=2)
torch.optim.AdamW = Failing
sys.exit(train_lm.main())
"""


def compare_with_a_failing_one(ranks: str, text: Path, folder: Path) -> subprocess.CompletedProcess:
    script = folder / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), ranks=ranks))
    options = ["--parallel", "fsdp", "--compare", "lion,torch.AdamW,lion8bit", "--out", str(folder / "run")]
    return torchrun(2, *QUICK, "--data", str(text), *options, script=script)


def test_an_optimizer_that_fails_leaves_the_others_compared(text: Path, tmp_path: Path):
    done = compare_with_a_failing_one("01", text, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert lines == [
        "train_lm: torch.AdamW failed and is left out: ValueError: no step of this optimizer "
        "(all of it: --optimizer torch.AdamW)"
    ]
    table = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("lion", "torch"))]
    assert table == ["lion", "lion8bit"]


def test_an_optimizer_that_fails_on_one_rank_ends_all(text: Path, tmp_path: Path):
    """The others are in the middle of a collective call, and would wait there."""
    done = compare_with_a_failing_one("1", text, tmp_path)
    assert done.returncode != 0
    assert "ValueError: no step of this" in done.stderr
    assert "lion8bit" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parallel pp", "parallel is 'pp'; choose from fsdp, hsdp, tp, ddp"),
        ("--parallel fsdp", "processes: torchrun --nproc-per-node=2 benchmarks/train_lm.py --parallel fsdp"),
    ],
)
def test_bad_ways_of_being_parallel_get_one_line(options: str, message: str, text: Path, tmp_path: Path, capsys):
    assert main(text, tmp_path / "run", *options.split()) == 2
    assert message in error_line(capsys.readouterr().err)


@pytest.mark.parametrize(("rank", "printed"), [({}, "main\nend\n"), ({"TORCHELASTIC_RUN_ID": "1"}, "main\n")])
def test_a_rank_ends_without_the_end_of_python_and_with_its_status(rank: dict[str, str], printed: str):
    """That end can abort, where a thread of gloo still holds a tensor; what was printed before is not lost."""
    script = (
        "import atexit; atexit.register(print, 'end'); from benchmarks.train_lm import leave; print('main'); leave(3)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")} | rank
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 3, result.stderr
    assert result.stdout == printed


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_options_that_save_memory_change_no_number(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowbit_optim.offload.is_offloaded", lambda p: True)
    monkeypatch.setattr("lowbit_optim.offload._CudaStreams", streams_of)
    plain, saving = tmp_path / "plain", tmp_path / "saving"
    assert main(text, plain, "--clip", "0", "--dtype", "bf16") == 0
    options = ("--gradient-release", "--offload-state", "--stop-at", "3")
    assert main(text, saving, "--clip", "0", "--dtype", "bf16", *options) == 0
    checkpoint = str(saving / "lion8bit.pt")
    assert train_lm.main(["--resume", checkpoint, "--gradient-release", "--device", "cpu"]) == 0
    a, b = (report.read(folder / "lion8bit.jsonl").rows for folder in (plain, saving))
    assert_same(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gradient-release", "--gradient-release needs --clip 0"),
        ("--gradient-release --clip 0 --accumulate 2", "--gradient-release needs --accumulate 1"),
        ("--gradient-release --clip 0 --dtype amp_fp16", "another --dtype than amp_fp16"),
        ("--offload-state --optimizer torch.AdamW", "--offload-state is an option of lion8bit and lion"),
    ],
)
def test_what_gradient_release_cannot_have_gets_one_line(
    options: str, message: str, text: Path, tmp_path: Path, capsys
):
    assert main(text, tmp_path / "run", *options.split()) == 2
    assert message in error_line(capsys.readouterr().err)
