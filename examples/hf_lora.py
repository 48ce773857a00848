"""LoRA adapters of a small Llama, trained by the Trainer with Pipe-SGD: torchrun --nproc-per-node 2 hf_lora.py.

Only the gradients of the adapters travel, which the line of a home can carry. The model has random weights and the text
is Python's own library, so that nothing is downloaded: put your own in their place.
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pipesgd.transformers import PipesgdCallback

LENGTH = 64


def read_text() -> list[dict[str, torch.Tensor]]:
    """Return pieces of Python's library, a byte a token."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    whole = len(text) // LENGTH * LENGTH
    pieces = torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, LENGTH).long()
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    torch.manual_seed(0)
    samples = read_text()[:2112]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,  # the layers below the adapters are never trained: larger random ones are of more use
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    arguments = TrainingArguments(
        "lora",
        use_cpu=True,
        ddp_backend="gloo",  # on GPUs, too: a group of nccl has not been run
        ddp_find_unused_parameters=False,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="epoch",
        save_on_each_node=True,  # each home needs all of a checkpoint to resume
        report_to=[],
    )
    if arguments.should_log:
        model.print_trainable_parameters()
    trainer = Trainer(model, arguments, train_dataset=samples[64:], eval_dataset=samples[:64])
    trainer.add_callback(PipesgdCallback(trainer, width=2, codec="int8"))
    trainer.train()
    trainer.save_model("lora/adapters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
