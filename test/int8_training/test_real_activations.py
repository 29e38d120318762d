"""Int8 products of what a model really multiplies, which has outliers, beside the same quantisation in float64."""

import emulation
import pytest
import torch
from torch import Tensor, nn

from benchmarks.lm import data
from benchmarks.lm.trainer import Settings, Trainer
from lowbit_optim.int8_training import Int8MixedPrecisionConfig, convert_int8_mixed_precision, matmul

ALL = dict(output=True, grad_input=True, grad_weight=True)
NONE = dict.fromkeys(ALL, False)


@pytest.fixture(scope="module")
def operands() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Input, weight and gradient of the output of each linear layer of a byte-level model after some training."""
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        dataset = data.ByteDataset.from_text(data.load_text())
        trainer = Trainer(Settings(layers=2, batch_size=8, seq_len=64), dataset, torch.device("cpu"))
        for _ in range(40):
            trainer.train_step()
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def watch(name: str, layer: nn.Linear) -> None:
        def keep(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            x = args[0].detach().flatten(0, 1)
            out.register_hook(lambda grad: found.update({name: (x, layer.weight.detach(), grad.flatten(0, 1))}))

        layer.register_forward_hook(keep)

    for name, module in trainer.model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            watch(name, module)
    trainer.model.loss(*dataset.batch(4, 64)).backward()
    assert len(found) == 14
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signal_to_noise_is_that_of_an_emulation(
    operands: dict[str, tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(matmul.smallest_products, "cpu", 0)
    for name, (x, weight, grad) in operands.items():
        x, weight, grad = (t.to(dtype, copy=True) for t in (x, weight, grad))
        layer = nn.Linear(*weight.shape[::-1], bias=False)
        layer.weight = nn.Parameter(weight)
        convert_int8_mixed_precision(layer, Int8MixedPrecisionConfig(), lambda module, name: True)
        x.requires_grad_()
        out = layer(x)
        out.backward(grad)
        results = [out.detach(), x.grad, layer.weight.grad]
        emulated = emulation.linear(x.detach(), weight, grad, **ALL)
        exact = emulation.linear(x.detach(), weight, grad, **NONE)
        for product, got, wanted, right in zip(ALL, results, emulated, exact, strict=True):
            ours, theirs = emulation.snr_db(got, right), emulation.snr_db(wanted.to(dtype), right)
            assert abs(ours - theirs) < 0.5, (name, product, ours, theirs)
