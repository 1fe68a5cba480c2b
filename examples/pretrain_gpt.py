"""Pre-train a small GPT on English text that ships with Python, and log it with llmtrack.

    python -m torch.distributed.run --nproc-per-node 2 examples/pretrain_gpt.py --root runs --checkpoint-dir checkpoints

Kill it and start the same command again: it resumes from its newest checkpoint, repeats exactly the batches that it
would have seen, and llmtrack records a second segment of the same run. One rank without a launcher, and GPUs where
there are any, work as well. What llmtrack adds to the script: open_run, a Reducer, meta and state_dict into the
checkpoint, run.checkpoint behind it, and the `with`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import llmtrack

VOCAB_SIZE = 256  # bytes: a tokenizer would be one more thing to download


# --- data ---------------------------------------------------------------------------------------------------------


def load_text() -> Tensor:
    """Return the reference of the Python language, about 460,000 bytes of English and code: ``[bytes]``, uint8."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Sequences:
    """Cut a text into training sequences whose order is a function of the seed and the position, and of nothing else.

    Position p is the p-th sequence of the run, counted over all epochs and ranks. So a run that resumes at p goes on
    with the sequences that it would have seen, on any number of ranks.
    """

    def __init__(self, text: Tensor, context: int, seed: int) -> None:
        self.text = text.long()
        self.context = context
        self.seed = seed
        self.per_epoch = (len(text) - 1) // context - 1  # one less: every epoch starts at another offset
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        offset = torch.randint(self.context, (), generator=generator)
        return torch.randperm(self.per_epoch, generator=generator) * self.context + offset

    def batch(self, positions: range) -> tuple[Tensor, Tensor]:
        """Return the inputs and the next bytes at these positions: two of ``[positions, context]``, int64."""
        window = self._starts(positions)[:, None] + torch.arange(self.context)
        return self.text[window], self.text[window + 1]

    def ids(self, positions: range) -> list[str]:
        """Return which bytes of the text the sequences at these positions are: what an alert names for a person."""
        return [f"bytes {start} to {start + self.context}" for start in self._starts(positions).tolist()]

    def _starts(self, positions: range) -> Tensor:
        return torch.stack([self._epoch(p // self.per_epoch)[p % self.per_epoch] for p in positions])


# --- model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every place look at itself and what came before it: ``[batch, length, width]`` in and out."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention, then the MLP, have to say: ``[batch, length, width]`` in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predict the next byte; the output layer is the embedding, transposed."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2: what is added to the residual stream starts smaller the more layers add to it
                residual = name.endswith(("out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over ``[batch, context]`` tokens, in nats."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.token.weight.T
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# --- schedules: functions of the tokens seen, so that a resumed run needs no state for them -----------------------


def learning_rate(tokens: int, args: argparse.Namespace) -> float:
    """Return the rate at this many tokens: linear warm-up, then half a cosine down to a tenth."""
    peak = float(args.learning_rate)
    if tokens < args.warmup_tokens:
        return peak * (tokens + 1) / float(args.warmup_tokens)
    done = (tokens - args.warmup_tokens) / max(1, args.max_tokens - args.warmup_tokens)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def batch_size(tokens: int, args: argparse.Namespace) -> int:
    """Return the sequences of the next step over all ranks: it grows from ``batch_start`` in equal jumps."""
    if tokens >= args.ramp_tokens:
        return int(args.batch_size)
    jumps = args.batch_size // args.batch_start - 1
    return int(args.batch_start * (1 + jumps * tokens // args.ramp_tokens))


# --- ranks and checkpoints ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world_size: int
    device: torch.device


def join_ranks() -> Ranks:
    """Join the other ranks if a launcher started several."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return Ranks(0, 1, torch.device("cuda" if cuda else "cpu"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def sum_over_ranks(values: Tensor) -> list[float]:
    """Return the element-wise sum over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return [float(value) for value in values.tolist()]


def load_checkpoint(folder: Path, resume: str) -> dict[str, Any] | None:
    """Return the checkpoint to resume from, the same on every rank, or None to start from nothing."""
    choice = [None if resume == "none" else resume]
    if resume == "auto":
        found = sorted(folder.glob("step-*.pt"))
        choice = [str(found[-1]) if found else None]
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    if choice[0] is None:
        return None
    checkpoint: dict[str, Any] = torch.load(choice[0], map_location="cpu", weights_only=True)
    return checkpoint


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that is there complete or not at all, whenever the process or the node dies."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


# --- training -----------------------------------------------------------------------------------------------------


class Trainer:
    """The state of a training run, which is all in the checkpoint, and one step of it."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args = args
        self.ranks = ranks
        torch.manual_seed(args.seed)
        text = load_text()
        self.text_sha256 = hashlib.sha256(text.numpy().tobytes()).hexdigest()
        cut = len(text) * 95 // 100
        self.data = Sequences(text[:cut], args.context, args.seed)
        self.held_out = Sequences(text[cut:], args.context, args.seed)

        self.gpt = GPT(args.context, args.width, args.layers, args.heads).to(ranks.device)
        self.ddp = DistributedDataParallel(self.gpt) if ranks.world_size > 1 else None
        parameters = list(self.gpt.parameters())
        groups = [  # matrices decay, the gains of the norms do not
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=ranks.device.type == "cuda")

        self.step = 0
        self.position = 0  # sequences seen by all ranks

    @property
    def tokens(self) -> int:
        """Tokens seen by all ranks."""
        return int(self.position * self.args.context)

    @property
    def finished(self) -> bool:
        """Whether every token that was asked for has been seen."""
        return bool(self.tokens >= self.args.max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds. Nothing else is random: there is no dropout, and data goes by position."""
        return {
            "model": self.gpt.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.gpt.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.position = state["step"], state["position"]

    def take_step(self, reducer: llmtrack.Reducer) -> None:
        """Take one optimiser step over as many micro-batches as the batch size of the moment needs."""
        lr = learning_rate(self.tokens, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sequences = batch_size(self.tokens, self.args)
        mine = range(self.position + self.ranks.rank, self.position + sequences, self.ranks.world_size)
        micro_batches = [mine[i : i + self.args.micro_batch] for i in range(0, len(mine), self.args.micro_batch)]
        for micro in micro_batches:
            alone = self.ddp if micro is not micro_batches[-1] else None
            with reducer.data_wait():
                batch = self.data.batch(micro)
            with alone.no_sync() if alone else contextlib.nullcontext():  # the ranks' gradients meet once a step
                loss = self._loss(self.ddp or self.gpt, batch)
                (loss * (len(micro) / len(mine))).backward()  # type: ignore[no-untyped-call]
            reducer.mean("train/loss", loss, weight=len(micro) * self.args.context)
        grad_norm = nn.utils.clip_grad_norm_(self.gpt.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.position += sequences
        reducer.grad_norm(grad_norm)
        reducer.last("train/lr", lr)
        reducer.last("train/batch_size", sequences)
        # The ids are kept in memory; those of the steps around an alert come into the log, from all ranks.
        reducer.step(self.step, self.tokens, batch_ids=self.data.ids(mine), position=self.position)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on text that training never sees; every rank calls it and computes its share."""
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        positions = range(min(self.args.eval_sequences, self.held_out.per_epoch))
        mine = positions[self.ranks.rank :: self.ranks.world_size]
        for i in range(0, len(mine), self.args.micro_batch):
            micro = mine[i : i + self.args.micro_batch]
            loss = self._loss(self.gpt, self.held_out.batch(micro)).double()
            total += torch.stack([loss, total.new_ones(())]) * len(micro)
        loss_sum, sequences = sum_over_ranks(total)
        return loss_sum / sequences

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = (part.to(self.ranks.device) for part in batch)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
            loss: Tensor = model(inputs, targets)
        return loss

    def flops(self) -> llmtrack.flops.Flops | None:
        """Return what a token costs, for the share of the GPUs' peak that is used; None without a GPU."""
        if self.ranks.device.type != "cuda":
            return None
        return llmtrack.flops.estimate(
            "palm",
            parameters=sum(parameter.numel() for parameter in self.gpt.parameters()),
            layers=self.args.layers,
            heads=self.args.heads,
            head_dim=self.args.width // self.args.heads,
            sequence=self.args.context,
        )


def say(ranks: Ranks, message: str) -> None:
    """Print once, not once a rank."""
    if ranks.rank == 0:
        print(message, flush=True)


def train(args: argparse.Namespace) -> None:
    """Train until ``max_tokens``, from the newest checkpoint if there is one."""
    ranks = join_ranks()
    print(f"rank {ranks.rank} of {ranks.world_size}: pid {os.getpid()}, {ranks.device}", flush=True)
    if args.batch_start % ranks.world_size:
        raise SystemExit(f"--batch-start {args.batch_start} must be a multiple of the {ranks.world_size} ranks")
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)

    trainer = Trainer(args, ranks)
    checkpoint = load_checkpoint(args.checkpoint_dir, args.resume)
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)

    flops = trainer.flops()
    run = llmtrack.open_run(
        args.root,
        project="pretrain-gpt",
        run_name=args.run_name,
        config={name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        # What makes another curve when it changes. With another recipe a checkpoint becomes the start of a child run.
        recipe={name: getattr(args, name) for name in RECIPE} | {"data": trainer.text_sha256, "optimizer": "adamw"},
        checkpoint=checkpoint["llmtrack"] if checkpoint is not None else None,
        preempt_signal=signal.SIGTERM,  # what a launcher or Slurm sends before it kills
        flops=flops,
    )
    if checkpoint is not None:
        run.load_state_dict(checkpoint.get("llmtrack_state"))  # what the detectors of alerts had learned by then
    reducer = llmtrack.Reducer(run, every=args.log_every, throughput=llmtrack.Throughput(flops))
    size = sum(parameter.numel() for parameter in trainer.gpt.parameters())
    say(ranks, f"run {run.run_id}, segment {run.segment}: {size:,} parameters, from {trainer.tokens:,} tokens")

    with run:
        while not trainer.finished:
            trainer.take_step(reducer)
            step, tokens = trainer.step, trainer.tokens

            if step % args.log_every == 0 or trainer.finished:
                at, newest = reducer.newest()  # what has come from all ranks by now: nothing is waited for
                loss, speed = newest.get("train/loss", math.nan), newest.get("throughput/tokens_per_s", math.nan)
                known = f"  at step {at:5d}: loss {loss:.4f}  {speed:7,.0f} tokens/s" if newest else ""
                say(ranks, f"step {step:5d}  tokens {tokens:9,d}{known}")

            if step % args.checkpoint_every == 0 or trainer.finished:
                reducer.flush(step, tokens)  # the last point before a checkpoint covers what the checkpoint has seen
                with reducer.pause():
                    held_out_loss = trainer.held_out_loss()
                    run.log({"eval/held_out/loss": held_out_loss}, step=step, tokens=tokens)
                    path = args.checkpoint_dir / f"step-{step:08d}.pt"
                    if ranks.rank == 0:
                        place = {"llmtrack": run.meta(step=step, tokens=tokens), "llmtrack_state": run.state_dict()}
                        save_checkpoint(path, trainer.state_dict() | place)
                    run.checkpoint(path, step=step, tokens=tokens)
                say(ranks, f"saved {path}  held-out loss {held_out_loss:.4f}")
    if dist.is_initialized():
        dist.barrier()  # a rank that exits while Gloo still cleans up behind its last collective may be aborted
        dist.destroy_process_group()


RECIPE = (
    *("seed", "context", "width", "layers", "heads", "max_tokens", "batch_start", "batch_size", "ramp_tokens"),
    *("learning_rate", "warmup_tokens", "weight_decay", "clip"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments, checked as far as they can be without the other ranks."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    where = parser.add_argument_group("where")
    where.add_argument("--root", type=Path, default=os.environ.get("LLMTRACK_DIR", "runs"), help="for llmtrack's log")
    where.add_argument("--checkpoint-dir", type=Path, default="checkpoints", help="for the model")
    where.add_argument("--run-name", default="gpt-small", help="what people call the run")
    where.add_argument("--resume", default="auto", help="auto: the newest checkpoint; none; or a checkpoint's path")
    where.add_argument("--log-every", type=int, default=5, help="steps")
    where.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    where.add_argument("--eval-sequences", type=int, default=64, help="held-out sequences, at each checkpoint")
    where.add_argument("--micro-batch", type=int, default=8, help="sequences in one forward pass of one rank")
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--seed", type=int, default=1, help="of the weights and of the order of the data")
    recipe.add_argument("--context", type=int, default=64, help="tokens in one sequence")
    recipe.add_argument("--width", type=int, default=128, help="of the residual stream")
    recipe.add_argument("--layers", type=int, default=4, help="transformer blocks")
    recipe.add_argument("--heads", type=int, default=4, help="of each attention")
    recipe.add_argument("--max-tokens", type=int, default=500_000, help="over all ranks")
    recipe.add_argument("--batch-start", type=int, default=8, help="sequences in the first step, over all ranks")
    recipe.add_argument("--batch-size", type=int, default=32, help="sequences after the ramp, over all ranks")
    recipe.add_argument("--ramp-tokens", type=int, default=200_000, help="over which the batch grows")
    recipe.add_argument("--learning-rate", type=float, default=2e-3, help="the peak")
    recipe.add_argument("--warmup-tokens", type=int, default=20_000, help="up to the peak")
    recipe.add_argument("--weight-decay", type=float, default=0.1, help="of matrices")
    recipe.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    args = parser.parse_args(argv)
    if args.batch_size % args.batch_start:
        parser.error("--batch-size must be a multiple of --batch-start")
    return args


if __name__ == "__main__":
    train(parse_arguments())
