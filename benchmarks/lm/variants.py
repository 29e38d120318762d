"""What a run does to its model before training: int8 matmuls, LoRA adapters, a base of 4-bit weights."""

import math

from torch import nn

from benchmarks.lm import UsageError

INT8 = ("auto", "always")
_NF4_BLOCK, _BLOCKS_A_SCALER = 64, 256  # torchao's defaults; fewer blocks a scaler where a weight has no more


def apply(model: nn.Module, *, int8: str | None, lora: int | None, qlora: int | None) -> None:
    """Change `model` in place.

    Args:
        int8: "auto" converts the layers, and runs the products, that gain; "always" all but the output projection.
        lora: rank of trainable adapters beside frozen linear layers.
        qlora: the same, with the frozen weights in NF4.

    Raises:
        UsageError: a package is missing, or a weight has no NF4 form.
    """
    if rank := lora or qlora:
        _add_adapters(model, rank)
    if qlora:
        _store_in_nf4(model)
    if int8:
        _convert(model, always=int8 == "always")


def _add_adapters(model: nn.Module, rank: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError(f"--lora and --qlora need peft, which cannot be imported ({error})") from error
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)


def _store_in_nf4(model: nn.Module) -> None:
    from torchao.quantization import to_nf4

    for name, module in model.named_modules():
        if name.endswith(".base_layer"):
            blocks, rest = divmod(module.weight.numel(), _NF4_BLOCK)
            if rest:
                shape = tuple(module.weight.shape)
                raise UsageError(
                    f"--qlora cannot cut {name}, {shape}, into blocks of {_NF4_BLOCK}; choose another model"
                )
            weight = to_nf4(module.weight.detach(), _NF4_BLOCK, math.gcd(_BLOCKS_A_SCALER, blocks))
            module.weight = nn.Parameter(weight, requires_grad=False)


def _convert(model: nn.Module, always: bool) -> None:
    from lowbit_optim.int8_training import convert_int8_mixed_precision, matmul

    if not always:
        convert_int8_mixed_precision(model)
        return
    matmul.smallest_products.update(dict.fromkeys(matmul.smallest_products, 0))
    convert_int8_mixed_precision(model, filter_fn=lambda module, name: name != "head" and ".lora_" not in name)
