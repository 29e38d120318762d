from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowbit_optim.int8_training import matmul
from lowbit_optim.int8_training.matmul import int32_matmul, scaled_matmul

SHAPES = [(1, 1, 16), (5, 7, 48), (33, 8, 400), (64, 96, 2064)]


def random_codes(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)


def operand(rows: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    return random_codes(rows, k, device=device), torch.rand(rows, device=device) + 0.5


def exact_sums(a: Tensor, b: Tensor) -> Tensor:
    return (a.cpu().long() @ b.cpu().long().t()).to(a.device)


@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (0, 3, 16), (3, 0, 16), (3, 4, 0)])
def test_sums_are_exact(m: int, n: int, k: int, device: str) -> None:
    a, b = random_codes(m, k, device=device), random_codes(n, k, device=device)
    out = int32_matmul(a, b)
    assert out.dtype is torch.int32
    assert torch.equal(out.long(), exact_sums(a, b))


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_codes_are_exact(sign: int, device: str) -> None:
    a = torch.full((4, 4096), 127, dtype=torch.int8, device=device)
    assert torch.equal(int32_matmul(a, sign * a).long(), exact_sums(a, sign * a))


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_exact_on_a_cpu_whose_own_matmul_saturates(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_codes(9, 5000), random_codes(6, 5000)
    a[0], b[0] = 127, -127
    monkeypatch.setattr(matmul, "_cpu_matmul_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(int32_matmul(a, b).long(), exact_sums(a, b))


def test_a_cpu_whose_own_matmul_saturates_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI a CPU multiplies unsigned by signed numbers, and sums pairs of products in 16 bits."""

    def saturating(a: Tensor, b: Tensor) -> Tensor:
        products = (a.int() + 128)[:, :, None] * b.int()[None]
        pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(1 << 15), (1 << 15) - 1)
        return (pairs.sum(1) - 128 * b.sum(0)).int()

    is_exact = matmul._cpu_matmul_is_exact.__wrapped__
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.long() @ b.long()).int())
    assert is_exact()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not is_exact()


@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_results_are_scaled_sums(
    m: int, n: int, k: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, device: str
) -> None:
    a, b = operand(m, k, device), operand(n, k, device)
    bias = None if bias_dtype is None else torch.randn(n, device=device).to(bias_dtype)
    expected = exact_sums(a[0], b[0]).float() * (a[1] / 1000)[:, None] * b[1]
    if bias is not None:
        expected = expected + bias.float()
    assert torch.equal(scaled_matmul((a[0], a[1] / 1000), b, dtype, bias), expected.to(dtype))


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16])
def test_sums_longer_than_int32_allows(default_dtype: torch.dtype, device: str) -> None:
    k = 2 * matmul.LONGEST_SUM + 160
    a = torch.full((2, k), 127, dtype=torch.int8, device=device)
    b = torch.full((3, k), -127, dtype=torch.int8, device=device)
    ones = torch.ones(3, device=device)
    assert k * 127**2 > 2**31
    torch.set_default_dtype(default_dtype)
    try:
        out = scaled_matmul((a, ones[:2]), (b, ones), torch.float32, bias=ones)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(out, torch.full_like(out, -k * 127.0**2 + 1), rtol=2**-23, atol=0)


def test_the_longest_sum_fits_int32() -> None:
    assert matmul.LONGEST_SUM * 127**2 < 2**31
    assert matmul.LONGEST_SUM % 16 == 0


def test_a_scale_that_is_not_finite_spoils_its_row_or_column_alone(device: str) -> None:
    a, b = operand(4, 32, device), operand(5, 32, device)
    expected = scaled_matmul(a, b, torch.float32)
    a[0][1], a[1][1] = 0, torch.inf
    b[0][2], b[1][2] = 0, torch.nan
    out = scaled_matmul(a, b, torch.float32)
    assert out[1].isnan().all()
    assert out[:, 2].isnan().all()
    kept_rows, kept_columns = [0, 2, 3], [0, 1, 3, 4]
    assert torch.equal(out[kept_rows][:, kept_columns], expected[kept_rows][:, kept_columns])


@pytest.mark.parametrize("k", [32, 0])
def test_the_op_is_what_torch_compile_wants_of_ops(k: int, device: str) -> None:
    a, b = operand(6, k, device), operand(3, k, device)
    args = a[0], b[0], a[1], b[1], torch.randn(3, device=device), torch.bfloat16
    torch.library.opcheck(torch.ops.lowbit_optim.scaled_matmul.default, args)


@pytest.mark.parametrize(("m", "n", "size"), [(8192, 14336, "large"), (128, 256 * 131, "small"), (1, 1, "small")])
def test_size_classes(m: int, n: int, size: str) -> None:
    assert matmul.size_class(m, n, multiprocessors=132) == size


@pytest.mark.parametrize(("world_size", "programs"), [(None, 6), (1, 6), (2, 0)])
def test_beside_collectives_programs_do_not_go_from_tile_to_tile(
    world_size: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("lowbit_optim.int8_training.kernels")
    launched = []
    monkeypatch.setattr(kernels, "scaled_matmul", lambda *args: launched.append(args[-1]))
    monkeypatch.setattr(matmul, "gpu", lambda index: ("sm90", 3))
    a, b = operand(6, 16, "cpu"), operand(5, 16, "cpu")
    if world_size:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        matmul._scaled_matmul_triton(a[0], b[0], a[1], b[1], None, torch.bfloat16)
    finally:
        if world_size:
            dist.destroy_process_group()
    assert launched == [programs]


@pytest.mark.parametrize(
    ("major", "shared_memory", "architecture"),
    [(8, 166_912, "sm80"), (8, 101_376, "sm80"), (9, 232_448, "sm90"), (10, 232_448, "sm100"), (12, 101_376, "sm80")],
)
def test_descriptors_where_there_are_some_and_their_tiles_fit(
    major: int, shared_memory: int, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(major=major, shared_memory_per_block_optin=shared_memory, multi_processor_count=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert matmul.gpu.__wrapped__(0) == (architecture, 5)


def test_the_table_fits_the_shared_memory() -> None:
    """What a program loads ahead, and a part of the result on its way out; Triton adds some bytes for barriers."""
    pytest.importorskip("triton")
    limits = {"sm100": matmul.HOPPER_SHARED_MEMORY, "sm90": matmul.HOPPER_SHARED_MEMORY, "sm80": 101_376}
    for (architecture, _, itemsize), config in matmul.configurations().items():
        loads = config.stages * (config.block_m + config.block_n) * config.block_k
        result = config.block_m * config.block_n * itemsize // config.parts
        needed = loads + result if config.descriptors else max(loads, result)
        assert needed + 1024 <= limits[architecture] // max(1, config.resident), (architecture, itemsize, config)
