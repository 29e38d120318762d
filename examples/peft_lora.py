"""PEFT: train LoRA adapters with Lion8bit, save both, resume bit for bit.

pip install peft
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit_optim import Lion8bit


def make_base(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(dtype)


def make_optimizer(model: nn.Module) -> Lion8bit:
    # frozen parameters may be left in: they get no state. Names make the errors of a load clear.
    return Lion8bit([(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    # From rank 16 on, adapters have rows of 16 and, in real models, 4,096 elements: their momentum is in 8 bits.
    config = LoraConfig(r=16, target_modules="all-linear")
    model = get_peft_model(make_base(), config)
    optimizer = make_optimizer(model)
    with tempfile.TemporaryDirectory() as folder:
        train(model, optimizer, range(4))
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
        train(model, optimizer, range(4, 8))

        resumed = PeftModel.from_pretrained(make_base(), folder, is_trainable=True)
        optimizer = make_optimizer(resumed)
        optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
        train(resumed, optimizer, range(4, 8))
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    print("resumed run has the same weights:", all(torch.equal(a, b) for a, b in pairs))
