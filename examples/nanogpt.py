"""A small GPT, trained by a loop with nanoGPT's idioms: torchrun --nproc-per-node 2 nanogpt.py.

The text is Python's own library, read as bytes. Without the three lines marked "pipesgd", this is a program of torch's
DistributedDataParallel.
"""

import math
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pipesgd.ddp  # pipesgd

max_iters, eval_interval, eval_iters = 200, 50, 10
batch_size, block_size, n_layer, n_head, n_embd = 8, 64, 2, 4, 64
gradient_accumulation_steps = 4  # over all ranks
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 20
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.99, 1.0
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
dtype = "float32"  # or "bfloat16", or "float16" with a scaled loss
VOCABULARY = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, n_head, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, n_embd))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks, self.ln_f = nn.Sequential(*(Block() for _ in range(n_layer))), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight  # tied
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=True)


def read_text() -> dict[str, torch.Tensor]:
    """Return the modules of Python's library as bytes: nine tenths to train on, the rest to evaluate."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return {"train": text[:cut], "val": text[cut:]}


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    share = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * share)) * (learning_rate - min_lr)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    master_process = rank == 0
    assert gradient_accumulation_steps % world_size == 0
    micro_steps = gradient_accumulation_steps // world_size
    torch.manual_seed(1337 + rank)  # DistributedDataParallel gives all ranks the first one's weights
    data = read_text()

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        begins = torch.randint(len(data[split]) - block_size, (batch_size,))
        x = torch.stack([data[split][i : i + block_size].long() for i in begins])
        y = torch.stack([data[split][i + 1 : i + 1 + block_size].long() for i in begins])
        return x.to(device), y.to(device)

    ctx = nullcontext() if dtype == "float32" else torch.autocast(device.partition(":")[0], getattr(torch, dtype))
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=dtype == "float16")
    raw_model = GPT().to(device)
    optimizer = raw_model.configure_optimizers()
    model = DistributedDataParallel(raw_model)
    state = pipesgd.ddp.compress(model, codec="int8")  # pipesgd

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        with ctx:
            losses = {
                split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
                for split in ("train", "val")
            }
        model.train()
        return losses

    inputs, targets = get_batch("train")
    for iter_num in range(max_iters + 1):
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iter_num % eval_interval == 0 and master_process:
            losses = estimate_loss()
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save(checkpoint, "ckpt.pt")
        if iter_num == max_iters:
            break
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            with ctx:
                _, loss = model(inputs, targets)
                loss = loss / micro_steps
            inputs, targets = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    state.close()  # pipesgd
    dist.barrier()  # gloo may hang or abort a rank that ends while another one is still connected


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the model has gone: torch may hang if the group goes first
