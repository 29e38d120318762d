"""Hugging Face Trainer: train with Lion8bit, then resume from a checkpoint, bit for bit.

pip install transformers accelerate
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lowbit_optim import Lion8bit


class RandomTokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(dtype)
    args = TrainingArguments(
        folder,
        learning_rate=1e-3,
        weight_decay=0.1,  # the Trainer makes two groups, and keeps norms and biases from decaying
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=4,
        logging_steps=4,
        report_to="none",
        **arguments,
    )
    # The Trainer passes on the groups alone: of its arguments, learning_rate, adam_beta1 and optim_args are not used.
    options = {"lr": args.learning_rate, "betas": (0.9, 0.99)}
    return Trainer(model, args, train_dataset=RandomTokens(), optimizer_cls_and_kwargs=(Lion8bit, options))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        trainer.train()
        resumed = make_trainer(folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
        print("resumed run has the same weights:", all(torch.equal(a, b) for a, b in pairs))
