"""A small language model, trained by the Trainer with Pipe-SGD: torchrun --nproc-per-node 2 hf_trainer.py."""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pipesgd.transformers import PipesgdCallback


def main() -> None:
    torch.manual_seed(0)
    # Sequences that count up from a random number.
    begins = torch.randint(0, 48, (512, 1))
    samples = [{"input_ids": row, "labels": row} for row in begins + torch.arange(16)]
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        "counting",
        use_cpu=True,  # else it makes no DistributedDataParallel on a machine without a GPU
        ddp_find_unused_parameters=False,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        warmup_steps=10,  # while the rate rises, no gradient is late
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=samples[64:], eval_dataset=samples[:64])
    trainer.add_callback(PipesgdCallback(trainer, width=2, codec="int8"))
    trainer.train()
    trainer.save_model("counting/final")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
