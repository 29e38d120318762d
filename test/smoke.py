"""A few steps, a checkpoint and its way back, with what is installed; prints where that is."""

import io

import torch

import lowbit_optim
from lowbit_optim import Lion8bit

model = torch.nn.Linear(256, 64)
optimizer = Lion8bit(model.parameters(), lr=1e-2)
x = torch.randn(32, 256)
losses = []
for _ in range(20):
    loss = (model(x) - x[:, :64]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses

file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
resumed = Lion8bit(model.parameters())
resumed.load_state_dict(torch.load(file))
momentum, loaded = (o.state[model.weight]["exp_avg"] for o in (optimizer, resumed))
assert type(loaded).__name__ == "OptimState8bit"
assert torch.equal(momentum.codes, loaded.codes)
print(lowbit_optim.__version__, lowbit_optim.__file__)
