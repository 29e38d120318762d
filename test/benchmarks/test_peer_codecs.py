"""The peers' codecs do what the peers do: compared with their own packages where these are installed."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks import peer_codecs as peers

CODECS = [
    peers.lowbit(64),
    peers.dynamic_map(),
    peers.softsign(),
    peers.softsign(64, torch.bfloat16),
    peers.mu_law(16, 64),
    peers.square_root(64),
    peers.linear(64),
]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_dynamic_map_is_bitsandbytes(generator):
    bnb = pytest.importorskip("bitsandbytes.functional")
    torch.testing.assert_close(peers.dynamic_values(), bnb.create_dynamic_map(), rtol=2e-7, atol=0)

    x = torch.randn(64, 256, generator=generator) * torch.logspace(-9, 0, 64)[:, None]
    codes, state = bnb.quantize_blockwise(x, blocksize=256)
    ours, theirs = peers.dynamic_map().roundtrip(x), bnb.dequantize_blockwise(codes, state)
    differ = (ours - theirs).abs() > 1e-5 * theirs.abs()
    # The package's search on the CPU now and then takes the neighbour of the nearest value; never the other way round.
    assert differ.float().mean() < 2e-3
    assert ((ours - x).abs() <= (theirs - x).abs() * (1 + 1e-5))[differ].all()


# Triton's interpreter runs the package's kernels without a GPU, but only in a process that asks for it before importing
# triton; the autotuner around them needs a GPU and is stepped around.
_FLASHOPTIM_ROUNDTRIP = """
import sys
import torch, triton.language as tl
import flashoptim.optimizers as flash

x = torch.load(sys.argv[1], map_location=sys.argv[3])
n = x.numel()
codes, scales = torch.empty_like(x, dtype=torch.int8), torch.empty_like(x[:, 0], dtype=torch.float16)
flash._triton_quantize_kernel.fn[(1,)](x, codes, scales, n, 127.0, tl.int8, 32, False, True, BLOCK_SIZE_N=1024)
y = torch.empty_like(x)
flash._triton_dequantize_kernel.fn[(1,)](codes, scales, y, n, 127.0, 32, False, True, BLOCK_SIZE_N=1024)
torch.save(y.cpu(), sys.argv[2])
"""


def test_softsign_is_flashoptim(generator, tmp_path):
    pytest.importorskip("flashoptim")
    x = torch.randn(64, 32, generator=generator) * torch.logspace(-5, 0, 64)[:, None]
    torch.save(x, tmp_path / "x.pt")
    on_gpu = torch.cuda.is_available()
    command = [sys.executable, "-c", _FLASHOPTIM_ROUNDTRIP, tmp_path / "x.pt", tmp_path / "y.pt"]
    command.append("cuda" if on_gpu else "cpu")
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": str(int(not on_gpu))})
    torch.testing.assert_close(peers.softsign().roundtrip(x), torch.load(tmp_path / "y.pt"))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_roundtrip_keeps_zero_and_the_maximum_and_is_odd(codec, generator):
    x = torch.randn(8, 512, generator=generator)
    x[0] = 0
    x[:, 7] = 0
    y = codec.roundtrip(x)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    assert not y[0].any()
    assert not y[:, 7].any()
    assert (y * x >= 0).all()
    x_max, y_max = (t.view(-1, codec.block).abs().amax(1) for t in (x, y))
    torch.testing.assert_close(y_max, x_max, rtol=2**-7, atol=0)
    if not codec.name.startswith("dynamic"):  # the dynamic map has 1 but not -1
        torch.testing.assert_close(codec.roundtrip(-x), -y, rtol=0, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_relative_error_of_a_gaussian_is_within_8_bits(codec, generator):
    x = torch.randn(64, 512, generator=generator)
    error = (codec.roundtrip(x) - x).norm() / x.norm()
    assert 1e-3 < error < 0.03


def test_a_short_last_block_is_coded_like_a_padded_one(generator):
    codec = peers.mu_law(16, 64)
    x = torch.randn(100, generator=generator)
    padded = torch.cat((x, torch.zeros(28)))
    torch.testing.assert_close(codec.roundtrip(x), codec.roundtrip(padded)[:100], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (peers.lowbit(64), 1 + 2 / 64),
        (peers.dynamic_map(), 1 + 4 / 256),
        (peers.softsign(), 1 + 2 / 32),
        (peers.linear(128), 1 + 2 / 128),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bytes_per_param(codec, expected):
    assert codec.bytes_per_param == expected
