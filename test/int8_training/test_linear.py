import copy
import logging
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product

import emulation
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchao import quantize_
from torchao.prototype.quantized_training import int8_mixed_precision_training
from torchao.quantization import Int8WeightOnlyConfig, to_nf4

from lowbit_optim import Lion8bit
from lowbit_optim.int8_training import (
    Int8MixedPrecisionConfig,
    convert_int8_mixed_precision,
    linear,
    matmul,
    reason_to_leave,
    undo_int8_mixed_precision,
)
from lowbit_optim.int8_training.linear import Int8MixedPrecisionLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = ("output", "grad_input", "grad_weight")
ALL_OPTIONS = [dict(zip(OPTIONS, values, strict=True)) for values in product([True, False], repeat=3)]


def anything(module: nn.Module, name: str) -> bool:
    return True


def convert(model: nn.Module, **options: bool) -> nn.Module:
    return convert_int8_mixed_precision(model, Int8MixedPrecisionConfig(**options), anything)


@pytest.fixture
def int8_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the product is."""
    monkeypatch.setattr(matmul, "smallest_products", dict.fromkeys(matmul.smallest_products, 0))


pytestmark = pytest.mark.usefixtures("int8_everywhere")


def run(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(grad)
    return [out.detach(), x.grad, layer.weight.grad]


def make_case(
    tokens: int, features: int, outputs: int, dtype: torch.dtype, device: str, bias: bool = False
) -> tuple[nn.Linear, Tensor, Tensor]:
    layer = nn.Linear(features, outputs, bias=bias, dtype=dtype, device=device)
    x = torch.randn(tokens, features, device=device).to(dtype)
    return layer, x, torch.randn(tokens, outputs, device=device).to(dtype)


# --- Numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signal_to_noise_is_that_of_an_emulation_in_float64(
    dtype: torch.dtype, options: dict[str, bool], device: str
) -> None:
    layer, x, grad = make_case(300, 200, 250, dtype, device)
    x[:, 5] *= 20  # an outlier feature, as activations have them
    exact = emulation.linear(x, layer.weight.detach(), grad, output=False, grad_input=False, grad_weight=False)
    emulated = emulation.linear(x, layer.weight.detach(), grad, **options)
    results = run(convert(layer, **options), x, grad)
    for name, got, wanted, right in zip(OPTIONS, results, emulated, exact, strict=True):
        if options[name]:
            assert abs(emulation.snr_db(got, right) - emulation.snr_db(wanted, right)) < 0.5
            assert emulation.snr_db(got, wanted) > emulation.snr_db(wanted, right) + 3
        else:
            torch.testing.assert_close(
                got, right.to(dtype), rtol=2e-2, atol=2e-2 if dtype is not torch.float32 else 1e-4
            )


@pytest.mark.parametrize("off", OPTIONS)
def test_an_option_changes_its_product_alone(off: str, device: str) -> None:
    layer, x, grad = make_case(40, 64, 48, torch.float32, device)
    plain = run(layer, x, grad)
    with_all = run(convert(layer), x, grad)
    without = run(convert(layer, **{off: False}), x, grad)
    for name, a, b, c in zip(OPTIONS, with_all, without, plain, strict=True):
        assert torch.equal(a, b) == (name != off)
        assert not torch.equal(a, c)
        if name == off:
            torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-5)


torchao_on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, torchao's op has no CPU kernel, and takes minutes to tune"
)


@torchao_on_cpu
def test_follows_torchao() -> None:
    """The same quantisation for fp32; for bf16 its scales are bf16."""
    layer, x, grad = make_case(100, 128, 96, torch.float32, "cpu", bias=True)
    other = copy.deepcopy(layer)
    quantize_(other, int8_mixed_precision_training(module_swap=True))
    for ours, theirs in zip(run(convert(layer), x, grad), run(other, x, grad), strict=True):
        assert emulation.snr_db(ours, theirs) > 90


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_is_added_before_the_one_rounding(dtype: torch.dtype, device: str) -> None:
    layer, x, _ = make_case(20, 64, 48, dtype, device, bias=True)
    without = copy.deepcopy(layer)
    without.bias = None
    exact = convert(without.float())(x.float()) + layer.bias.float()
    assert torch.equal(convert(layer)(x), exact.to(dtype))


def test_a_small_gradient_is_not_lost(device: str) -> None:
    layer, x, grad = make_case(20, 64, 48, torch.float32, device)
    convert(layer)
    for large, small in zip(run(layer, x, grad)[1:], run(layer, x, grad * 2.0**-90)[1:], strict=True):
        assert torch.equal(large, small * 2.0**90)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(value: float, device: str) -> None:
    """A gradient scaler looks for it in the weight's gradient."""
    layer, x, grad = make_case(8, 64, 48, torch.float32, device)
    convert(layer)
    x[3, 7] = value
    out, _, weight_grad = run(layer, x, grad)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()
    assert weight_grad[:, 7].isnan().all()
    assert weight_grad[:, :7].isfinite().all()


# --- What a linear layer has to cope with ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (2, 5, 64), (2, 0, 64), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_leading_shape(shape: tuple[int, ...], bias: bool, device: str) -> None:
    layer = convert(nn.Linear(64, 48, bias=bias, device=device))
    x = torch.randn(shape, device=device, requires_grad=True)
    flat = x.detach().reshape(-1, 64).clone().requires_grad_()
    out, expected = layer(x), layer(flat)
    assert out.shape == (*shape[:-1], 48)
    assert torch.equal(out.reshape(-1, 48), expected)
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    expected_grads = torch.autograd.grad(expected.square().sum(), [flat, *layer.parameters()])
    for a, b in zip(grads, expected_grads, strict=True):
        assert torch.equal(a.reshape(b.shape), b)
    if x.numel() == 0:
        assert not any(grad.any() for grad in grads)


def test_strides_of_inputs_do_not_matter(device: str) -> None:
    layer = convert(nn.Linear(64, 48, device=device))
    x = torch.randn(64, 2, 10, device=device).permute(1, 2, 0)
    assert torch.equal(layer(x), layer(x.contiguous()))
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert torch.equal(layer(x), layer(x.contiguous()))
    layer(x).sum().backward()  # an expanded gradient


def test_the_meta_device() -> None:
    layer, x = convert(nn.Linear(64, 48, device="meta")), torch.randn(3, 64, device="meta", requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert (out.shape, out.dtype, out.device) == ((3, 48), torch.float32, x.device)
    assert layer.weight.grad.shape == (48, 64)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast(autocast_dtype: torch.dtype, device: str) -> None:
    layer, x, grad = make_case(40, 64, 48, torch.float32, device, bias=True)
    convert(layer)
    out, _, expected_grad = run(layer, x, grad.to(autocast_dtype).float())
    with torch.autocast(device, autocast_dtype):
        assert layer(x).dtype is autocast_dtype
        assert torch.equal(layer(x), out.to(autocast_dtype))
        layer.zero_grad()
        result = layer(x)
    result.backward(grad.to(autocast_dtype))
    assert layer.weight.grad.dtype is torch.float32
    assert torch.equal(layer.weight.grad, expected_grad)
    assert layer.bias.grad.dtype is torch.float32


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_autocast_with_any_options(options: dict[str, bool], device: str) -> None:
    layer, x, grad = make_case(40, 64, 48, torch.float32, device, bias=True)
    with torch.autocast(device, torch.bfloat16):
        plain = run(layer, x, grad.bfloat16())
        results = run(convert(layer, **options), x, grad.bfloat16())
    for got, wanted in zip(results, plain, strict=True):
        assert got.dtype is wanted.dtype
        assert emulation.snr_db(got, wanted) > 30


def test_other_dtypes_run_as_before(device: str) -> None:
    layer, x, grad = make_case(8, 64, 48, torch.float64, device)
    plain = run(layer, x, grad)
    assert all(map(torch.equal, plain, run(convert(layer), x, grad)))


def test_without_features_and_for_nested_tensors_runs_as_before(device: str) -> None:
    layer, x, grad = make_case(8, 0, 48, torch.float32, device, bias=True)
    plain = run(layer, x, grad)
    assert all(map(torch.equal, plain, run(convert(layer), x, grad)))

    layer = nn.Linear(64, 48, device=device)
    nested = torch.nested.nested_tensor([torch.randn(n, 64, device=device) for n in (3, 5)], layout=torch.jagged)
    plain = layer(nested).values()
    assert torch.equal(convert(layer)(nested).values(), plain)


def test_accumulation_over_calls(device: str) -> None:
    layer, x, grad = make_case(32, 64, 48, torch.float32, device, bias=True)
    convert(layer)
    parts = [run(layer, x[part], grad[part])[2].clone() for part in (slice(0, 16), slice(16, 32))]
    layer.zero_grad()
    for part in (slice(0, 16), slice(16, 32)):
        layer(x[part]).backward(grad[part])
    assert torch.equal(layer.weight.grad, parts[0] + parts[1])
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


def test_one_layer_used_twice(device: str) -> None:
    layer, x, grad = make_case(16, 64, 64, torch.float32, device)
    convert(layer)
    other = copy.deepcopy(layer)
    layer(layer(x)).backward(grad)
    other(copy_of_the_other := layer(x).detach().requires_grad_()).backward(grad)
    layer_alone = copy.deepcopy(other)
    layer_alone.zero_grad()
    layer_alone(x).backward(copy_of_the_other.grad)
    assert torch.equal(layer.weight.grad, other.weight.grad + layer_alone.weight.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool, device: str) -> None:
    layer, x, grad = make_case(16, 64, 48, torch.float32, device, bias=True)
    convert(layer)
    expected = run(layer, x, grad)
    layer.zero_grad()
    x.requires_grad_()
    out = checkpoint(layer, x, use_reentrant=use_reentrant)
    out.backward(grad)
    assert all(map(torch.equal, expected, [out, x.grad, layer.weight.grad]))


def test_tied_weights(device: str) -> None:
    embedding = nn.Embedding(48, 64, device=device)
    head = nn.Linear(64, 48, bias=False, device=device)
    head.weight = embedding.weight
    model = convert(nn.Sequential(embedding, head))
    assert head.weight is embedding.weight
    tokens = torch.randint(48, (3, 7), device=device)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    together = embedding.weight.grad.clone()
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    torch.testing.assert_close(together, embedding.weight.grad + head.weight.grad)


class Saved:
    """What autograd keeps for the backward pass."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.tensors: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x):
            self.out = call()

    def _keep(self, x: Tensor) -> Tensor:
        self.tensors.append(x)
        return x

    def bytes_besides(self, *others: Tensor) -> int:
        addresses = {other.data_ptr() for other in others}
        return sum(x.nbytes for x in self.tensors if x.data_ptr() not in addresses)


def test_activations_are_kept_in_half_their_bytes(device: str) -> None:
    layer, x, _ = make_case(1024, 512, 256, torch.bfloat16, device)
    saved = Saved(lambda: convert(layer)(x.requires_grad_()))
    assert saved.bytes_besides(layer.weight) == x.nbytes // 2 + 4 * 512


def test_frozen_weights_keep_no_activations_and_get_no_gradient(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = make_case(32, 64, 48, torch.float32, device)
    convert(layer)
    expected = run(layer, x, grad)[1]
    layer.requires_grad_(False)
    layer.zero_grad()
    products = count_calls(monkeypatch, linear, "scaled_matmul")
    saved = Saved(lambda: layer(x.requires_grad_()))
    saved.out.backward(grad)
    assert saved.bytes_besides(layer.weight) == 0
    assert torch.equal(x.grad, expected)
    assert layer.weight.grad is None
    assert len(products) == 2


def test_a_first_layer_computes_no_gradient_of_its_input(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = make_case(32, 64, 48, torch.float32, device)
    products = count_calls(monkeypatch, linear, "scaled_matmul")
    convert(layer)(x).backward(grad)
    assert len(products) == 2


def test_without_gradients_nothing_is_kept_or_prepared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = make_case(32, 64, 48, torch.float32, device)
    expected = run(convert(layer), x, grad)[0]
    asked = count_calls(monkeypatch, linear, "quantize")
    with torch.no_grad():
        out = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    assert asked == [{"by_rows": True, "by_columns": False}] * 2


def count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[dict[str, object]]:
    """Keyword arguments of each call of ``module.name`` from now on."""
    original, calls = getattr(module, name), []

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_products_too_small_to_gain_run_as_before(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = make_case(32, 64, 48, torch.float32, device)
    plain = run(layer, x, grad)
    convert(layer)
    monkeypatch.setattr(matmul, "smallest_products", dict.fromkeys(matmul.smallest_products, 32 * 64 * 48 + 1))
    assert all(map(torch.equal, plain, run(layer, x, grad)))
    monkeypatch.setattr(matmul, "smallest_products", dict.fromkeys(matmul.smallest_products, 32 * 64 * 48))
    assert not any(map(torch.equal, plain, run(layer, x, grad)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_in_nf4(dtype: torch.dtype, compiled: bool, device: str) -> None:
    """QLoRA: a frozen base weight that decodes on conversion."""
    layer = nn.Linear(256, 128, bias=False, device=device, dtype=torch.bfloat16)
    x, grad = torch.randn(16, 256, device=device).to(dtype), torch.randn(16, 128, device=device).to(dtype)
    stored = to_nf4(layer.weight.detach(), block_size=64, scaler_block_size=32)
    decoded = nn.Linear(256, 128, bias=False, device=device)
    decoded.weight = nn.Parameter(stored.to(dtype))
    layer.weight = nn.Parameter(stored, requires_grad=False)
    x.requires_grad_()
    convert(layer)
    torch._dynamo.reset()
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x) if compiled else layer(x)
    out.backward(grad)
    expected = run(convert(decoded), x.detach(), grad)
    assert torch.equal(out, expected[0])
    assert torch.equal(x.grad, expected[1])


# --- torch.compile ---------------------------------------------------------------------------------------------------


def mlp(device: str) -> nn.Module:
    return convert(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))).to(device)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@pytest.mark.compiler
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_is_eager(autocast: bool, device: str) -> None:
    """Whole, forward and backward; the model has nothing whose compiled kernels round differently."""
    model, x = mlp(device), torch.randn(5, 64, device=device)
    torch._dynamo.reset()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        expected = gradients(model, x)
        got = gradients(torch.compile(model, fullgraph=True), x)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.compiler
def test_transposed_operands_compile(device: str) -> None:
    layer, x, _ = make_case(48, 48, 48, torch.float32, device)
    layer.weight = nn.Parameter(layer.weight.detach().t())
    convert(layer)

    def loss(x: Tensor, layer: nn.Module) -> Tensor:
        return (layer(x.t()).t() @ x).square().sum()

    torch._dynamo.reset()
    expected = torch.autograd.grad(loss(x, layer), layer.weight)
    (got,) = torch.autograd.grad(torch.compile(loss)(x, layer), layer.weight)
    torch.testing.assert_close(got, *expected, rtol=1e-6, atol=1e-6)


@pytest.mark.compiler
def test_a_new_length_compiles_nothing_after_the_second(device: str) -> None:
    model = mlp(device)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (8, 21, 33, 17, 100, 64, 5):
        x = torch.randn(tokens, 64, device=device)
        assert all(map(torch.equal, gradients(model, x), gradients(compiled, x)))
    assert counter.frame_count == 2


@pytest.mark.compiler
def test_a_shared_input_is_quantised_once_in_a_graph(device: str) -> None:
    gate, up = (convert(nn.Linear(64, 32, bias=False, device=device)) for _ in range(2))
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(record(graph, inputs)),
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    x = torch.randn(8, 64, device=device)
    torch.compile(lambda x: gate(x) * up(x), backend=backend, fullgraph=True)(x).sum().backward()
    assert names.count("lowbit_optim.quantize_rows_and_columns.default") == 1


# --- Conversion ------------------------------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    pass


def decoder() -> nn.ModuleDict:
    layers = {
        "up": nn.Linear(512, 1024),
        "small": nn.Linear(512, 16),
        "own": OwnLinear(512, 512),
        "attention": nn.MultiheadAttention(512, 8),
        "head": nn.Linear(512, 32_000, bias=False, device="meta"),
    }
    return nn.ModuleDict(layers)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Int8MixedPrecisionLinear)}


def test_the_default_filter_leaves_out_what_does_not_gain(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    with caplog.at_level(logging.INFO):
        assert convert_int8_mixed_precision(model) is model
    assert converted(model) == {"up"}
    assert reason_to_leave(model["up"]) is None
    assert "16 features on one side" in reason_to_leave(model["small"])
    assert "OwnLinear is not nn.Linear itself" in reason_to_leave(model["own"])
    assert "LM head" in reason_to_leave(model["head"])
    assert {message.split()[0] for message in caplog.messages} == {"small", "own", "head", "attention.out_proj"}


def test_the_default_filter_leaves_weights_that_do_not_decode() -> None:
    model = nn.Sequential(nn.Linear(512, 512))
    quantize_(model, Int8WeightOnlyConfig())
    x = torch.randn(2, 512)
    plain = model(x)
    convert_int8_mixed_precision(model)
    assert torch.equal(model(x), plain)
    assert f"stored as {type(model[0].weight).__name__}" in reason_to_leave(model[0])


def test_a_model_of_which_nothing_is_converted_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    convert_int8_mixed_precision(nn.Sequential(nn.Linear(512, 512)))
    assert not caplog.messages
    convert_int8_mixed_precision(nn.Sequential(nn.Linear(512, 16)))
    assert caplog.messages[0].startswith("no layer computes in int8 now")


def test_a_filter_of_ones_own() -> None:
    model = decoder()
    seen = []
    convert_int8_mixed_precision(model, filter_fn=lambda module, name: seen.append(name) or name != "up")
    assert converted(model) == {"small", "head"}
    assert seen == ["up", "small", "own", "attention.out_proj", "head"]


def test_torchaos_quantize() -> None:
    model = decoder()
    config = Int8MixedPrecisionConfig(grad_weight=False)
    quantize_(model, config, filter_fn=lambda module, name: name in ("up", "small"))
    assert converted(model) == {"up", "small"}
    assert model["up"].int8_config is config


def test_a_linear_layer_itself_can_be_converted_and_again() -> None:
    layer = nn.Linear(8, 8)
    assert convert(layer) is layer
    assert type(layer) is Int8MixedPrecisionLinear
    convert(layer, output=False)
    assert not layer.int8_config.output


def test_parameters_and_state_dict_stay_what_they_were() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False))
    before, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    convert(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(type(value) is Tensor for value in after.values())
    assert all(torch.equal(state[name], after[name]) for name in state)
    nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False)).load_state_dict(after)


def test_undo() -> None:
    model = nn.Sequential(nn.Linear(64, 32), OwnLinear(32, 8))
    reference = copy.deepcopy(model)
    assert undo_int8_mixed_precision(convert(model)) is model
    assert [type(module) for module in model] == [nn.Linear, OwnLinear]
    assert str(model) == str(reference)
    assert vars(model[0]).keys() == vars(reference[0]).keys()
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))


def replace_forward(layer: nn.Module) -> None:
    """As Accelerate adds its hooks."""
    layer.forward = partial(layer.forward)


def test_a_layer_that_something_else_has_changed_stays_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    for change in (parametrizations.weight_norm, replace_forward):
        layer, converted = nn.Linear(64, 32), convert(nn.Linear(64, 32))
        for model in (layer, converted):
            change(model)
        before = type(layer), type(converted)
        caplog.clear()
        convert(layer)
        undo_int8_mixed_precision(nn.ModuleDict({"name": converted}))
        assert (type(layer), type(converted)) == before
        assert caplog.messages[0].startswith("left as it is: ")
        assert caplog.messages[-1].startswith("name stays in int8: ")
        converted(torch.randn(3, 64))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    layer = convert(nn.Linear(16, 16), grad_input=False)
    other, x = duplicate(layer), torch.randn(2, 16)
    assert other.int8_config == layer.int8_config
    assert torch.equal(layer(x), other(x))


def test_the_config_is_frozen_and_takes_keywords_only() -> None:
    config = Int8MixedPrecisionConfig()
    assert (config.output, config.grad_input, config.grad_weight) == (True, True, True)
    with pytest.raises(AttributeError):
        config.output = False
    with pytest.raises(TypeError):
        Int8MixedPrecisionConfig(True)
    with pytest.raises(TypeError, match="output is 'no', True or False is expected"):
        Int8MixedPrecisionConfig(output="no")


# --- Errors ----------------------------------------------------------------------------------------------------------


def test_errors_say_what_came_in(device: str) -> None:
    with pytest.raises(TypeError, match="a filter is filter_fn"):
        convert_int8_mixed_precision(nn.Linear(64, 48), anything)
    layer = convert(nn.Linear(64, 48, device=device))
    with pytest.raises(ValueError, match="input has no dimension, expected 64"):
        layer(torch.tensor(1.0, device=device))
    with pytest.raises(ValueError, match="input has 32 features in its last dimension, expected 64"):
        layer(torch.randn(2, 32, device=device))
    with pytest.raises(TypeError, match=r"input is torch.bfloat16, the weight torch.float32"):
        layer(torch.randn(2, 64, device=device).bfloat16())


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(convert(nn.Linear(16, 16))(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- Together with the optimizer -------------------------------------------------------------------------------------


def train(model: nn.Module, device: str, steps: int = 60) -> float:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 8, generator=generator).to(device)
    optimizer = Lion8bit(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(128, 64, generator=generator).to(device)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_trains_with_lion8bit_like_unquantised_matmuls(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    start = copy.deepcopy(model)
    plain = train(model, device)
    assert plain < 1.6  # of 2.08, chance
    assert abs(train(convert(start), device) - plain) < 0.05


@torchao_on_cpu
@pytest.mark.parametrize("module_swap", [True, False])
def test_a_model_prepared_by_torchao_trains_with_lion8bit(module_swap: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    start = copy.deepcopy(model)
    plain = train(model, "cpu")
    quantize_(start, int8_mixed_precision_training(module_swap=module_swap))
    assert abs(train(start, "cpu") - plain) < 0.05
