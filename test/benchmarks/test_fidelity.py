"""The fidelity benchmark's figures: right where the answer is known, and able to tell codecs apart."""

import dataclasses

import pytest
import torch
from reference import lion_reference

from benchmarks import fidelity
from benchmarks import peer_codecs as peers

SIZE = fidelity.Size(layers=1, dim=128, vocab=256, batch=4, seq_len=16, steps=12, lr=1e-3, held_out=8)
EXACT = peers.Codec("exact", 64, 2, lambda blocks: blocks.clone())
COARSE = peers.Codec(
    "coarse", 64, 2, lambda blocks: peers._divide(blocks, peers._absmax(blocks)).round() * peers._absmax(blocks)
)


@pytest.fixture(scope="module")
def task():
    config = fidelity.ModelConfig(vocab=64, layers=1, dim=128, ff=128, heads=2, kv_heads=2, tied=False)
    tokens = torch.randint(64, (2000,), generator=torch.Generator().manual_seed(0))
    return fidelity.Task("random", tokens[:1500], tokens[1500:], config)


def test_an_exact_codec_flips_nothing_and_a_coarse_one_much(task):
    flips, errors = fidelity.measure_flips(task, SIZE, [EXACT, fidelity.OURS, COARSE])
    assert flips[0] == 0
    assert errors[0] < 1e-6
    assert 0 < flips[1] < 0.02 < 0.05 < flips[2]
    assert 0 < errors[1] < 0.03 < 0.3 < errors[2]


def test_an_exact_codec_trains_like_fp32_and_a_seed_repeats(task):
    fp32, exact, ours = fidelity.train_losses(task, SIZE, [EXACT, fidelity.OURS], seed=3)
    assert fp32 == exact
    assert fp32 != ours
    assert fidelity.train_losses(task, SIZE, [fidelity.OURS], seed=3) == pytest.approx([fp32, ours], abs=1e-6)
    assert fidelity.train_losses(task, SIZE, [], seed=4)[0] != pytest.approx(fp32, abs=1e-6)


def test_training_is_lion(task):
    """Against the reference optimizer, tensor by tensor on the module itself."""
    size = dataclasses.replace(SIZE, steps=5)
    model = fidelity.FlatModel(task.config)
    flat = model.initial(0, "cpu")
    module = model.model
    momentum = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for lr, tokens, targets in fidelity.batches(task, size, 0, ""):
        module.zero_grad()
        module.loss(tokens, targets).backward()
        for name, p in module.named_parameters():
            p.data, momentum[name] = lion_reference(p.data, p.grad, momentum[name], lr, 0.9, 0.99, size.weight_decay)
    expected = fidelity.held_out_losses(task, size, model, flat_weights(model)[None])
    assert not torch.equal(flat, flat_weights(model))
    assert fidelity.train_losses(task, size, [], seed=0) == pytest.approx(expected, abs=1e-4)


def flat_weights(model):
    parameters = dict(model.model.named_parameters())
    return torch.cat([parameters[name].detach().flatten() for name in model.names])


def test_only_large_matrices_count_as_quantised():
    config = fidelity.ModelConfig(vocab=16, layers=1, dim=128, ff=128, heads=2, kv_heads=2, tied=False)
    model = fidelity.FlatModel(config)
    small = 2 * 16 * 128 + 3 * 128  # embedding and head of 2048 elements each, three norms
    assert sum(shape.numel() for shape in model.shapes) - model.n_quantised == small


def test_blocks_that_would_cross_rows_are_refused():
    with pytest.raises(ValueError, match="dim 96 must be a multiple of 128"):
        fidelity.FlatModel(fidelity.ModelConfig(vocab=64, layers=1, dim=96, ff=96, heads=2, kv_heads=2, tied=True))


def test_words_are_numbered_by_frequency():
    tokens = fidelity.word_tokens(512)
    assert len(tokens) > 100_000
    counts = torch.bincount(tokens, minlength=512)
    assert len(counts) == 512
    assert (counts[1:-1] >= counts[2:]).all()
