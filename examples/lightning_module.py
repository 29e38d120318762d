"""PyTorch Lightning: train with Lion8bit, then resume from a checkpoint, bit for bit.

pip install lightning
"""

import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowbit_optim import Lion8bit


class Regressor(lightning.LightningModule):
    def __init__(self, automatic_optimization: bool = True) -> None:
        super().__init__()
        lightning.seed_everything(0, verbose=False)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.automatic_optimization = automatic_optimization

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = Lion8bit(self.named_parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: Regressor, epochs: int, checkpoint: str | None = None, **options: Any) -> lightning.Trainer:
    options = {"logger": False, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(max_epochs=epochs, **options)
    batches = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(0)).unbind(1)
    trainer.fit(model, DataLoader(TensorDataset(*batches), batch_size=8), ckpt_path=checkpoint, weights_only=True)
    return trainer


if __name__ == "__main__":
    whole, resumed = Regressor(), Regressor()
    fit(whole, epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        # at the end of an epoch: within one, Lightning starts the data anew
        fit(Regressor(), epochs=1).save_checkpoint(f"{folder}/half.ckpt")
        fit(resumed, epochs=2, checkpoint=f"{folder}/half.ckpt")
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print("resumed run has the same weights:", same)
