"""Train the tokeniser and the small target that ship as ``dflash_nb/assets/sample_target``.

A causal model of the reference target's family (gated delta net layers, full attention every fourth) learns the train split of
the sample corpus; held-out modules are never seen. Muon moves the matrices and AdamW the rest; the rate warms up, stays, and
falls linearly over the last part, so a checkpoint of the flat part serves a run of any length: ``--steps N --resume`` goes on
from it and ends as the longer run would have. The shipped target took 64 minutes of about a third of each of two busy cores.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.sample import (
    END,
    MASK,
    PAD,
    SPECIAL_TOKENS,
    START,
    Function,
    is_heldout,
    read_functions,
    sample_target_path,
    write_sample,
)
from dflash_nb.home import cache_dir, user_path, write_aside

VOCAB_SIZE = 2048
PIECES = r"\n[\n ]*|[^\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"  # a line break keeps the indentation behind it
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TOKENS_PER_BATCH = 1536  # padded, in each process; a longer sample is a batch of its own
PROMPT_WEIGHT = 0.3  # of a prompt token's loss against a body token's
WARMUP_STEPS = 40
DECAY_SHARE = 0.35
SORT_WINDOW = 512
CHECKPOINT_EVERY = 100


def train_tokenizer(functions: list[Function]) -> Tokenizer:
    """Byte-level BPE over whole functions. The four special tokens take the ids 0 to 3 and never come from text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for function in functions for text in (function.prompt, function.body)), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that ``transformers.AutoTokenizer`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [START],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def target_config(tokenizer: Tokenizer) -> Qwen3_5TextConfig:
    """Eight layers, LLLF LLLF. Two wide delta net heads run a third faster on a CPU than four narrow ones of the same size."""
    return Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_key_head_dim=48,
        linear_num_value_heads=2,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        eos_token_id=tokenizer.token_to_id(END),
    )


@dataclass(frozen=True)
class Run:
    """What decides the result, and whether to ``resume``. ``steps`` counts from the first step, also when resumed."""

    steps: int
    seed: int
    lr: float
    workers: int
    bf16: bool
    resume: bool

    def command(self) -> str:
        """The command that makes the same target in one go."""
        words = f"--steps {self.steps} --seed {self.seed} --lr {self.lr} --workers {self.workers}"
        return f"python -m dflash_nb.model.train_sample_target {words}{' --bf16' if self.bf16 else ''}"


def checkpoint_path() -> Path:
    """The last state of the flat part of the last run."""
    return cache_dir() / "train_sample_target" / "flat.pt"


def read_batch(dataset: TokenDataset, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ``ids [B, T]``, ``real [B, T]`` and ``supervised [B, T]``."""
    batch = dataset.collate(rows, int(dataset.lengths[rows].max()))
    real_BT = torch.arange(batch.padded_length) < torch.from_numpy(batch.lengths_B)[:, None]
    return torch.from_numpy(batch.input_ids_BT).long(), real_BT, torch.from_numpy(batch.loss_mask_BT)


def length_batches(lengths: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """One epoch: rows shuffled, sorted by length in windows, cut at the token budget, batches shuffled."""
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), SORT_WINDOW):
        window = order[start : start + SORT_WINDOW]
        current: list[int] = []
        for row in window[np.argsort(-lengths[window], kind="stable")]:
            if current and (len(current) + 1) * lengths[current[0]] > TOKENS_PER_BATCH:
                batches.append(np.array(current))
                current = []
            current.append(int(row))
        batches.append(np.array(current))
    return [batches[i] for i in rng.permutation(len(batches))]


def endless_batches(lengths: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Batches of one epoch after another; the order depends on the seed and the epoch alone."""
    epoch = 0
    while True:
        yield from length_batches(lengths, np.random.default_rng([seed, epoch]))
        epoch += 1


def token_losses(model: Qwen3_5ForCausalLM, ids_BT: torch.Tensor, real_BT: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Nats of every token after the first, ``[B, T-1]``, in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none").view(ids_BT.shape[0], -1)


@torch.no_grad()
def heldout_loss(model: Qwen3_5ForCausalLM, dataset: TokenDataset, tokenizer: Tokenizer) -> dict[str, float]:
    """Mean nats a supervised token over a split, in float32, and bits a byte of the supervised text (the end tokens' nats included)."""
    model.eval()
    nats = tokens = text_bytes = 0
    order = np.argsort(dataset.lengths, kind="stable")
    for chosen in np.array_split(order, max(1, len(order) // 16)):
        ids_BT, real_BT, supervised_BT = read_batch(dataset, chosen)
        nats += float(token_losses(model, ids_BT, real_BT, bf16=False)[supervised_BT[:, 1:]].sum(dtype=torch.float64))
        tokens += int(supervised_BT.sum())
        bodies = [ids[mask].tolist() for ids, mask in zip(ids_BT, supervised_BT, strict=True)]
        text_bytes += sum(len(text.encode()) for text in tokenizer.decode_batch(bodies, skip_special_tokens=True))
    model.train()
    return {
        "heldout_loss_nats_per_token": nats / tokens,
        "heldout_bits_per_byte": nats / math.log(2) / text_bytes,
        "heldout_functions": len(dataset),
        "heldout_supervised_tokens": tokens,
    }


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak at a 0-based step: warm-up, flat, linear to zero."""
    flat_until = first_decay_step(steps)
    if step < flat_until:
        return min(1.0, (step + 1) / WARMUP_STEPS)
    return (steps - step) / (steps - flat_until)


def first_decay_step(steps: int) -> int:
    return steps - int(DECAY_SHARE * steps)


def make_optimizers(model: Qwen3_5ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for the embedding, norms, convolutions, gates and decay rates."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and min(p.shape) > 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(rank: int, run: Run, data: Path, out: Path) -> None:
    """One of ``run.workers`` processes, each with its own batches; they add up their gradients at every step.

    Threads inside an operator wait for each other a thousand times a step, processes once: on a busy machine that is what counts.
    Process 0 keeps the checkpoints and, at the end, writes the weights into ``out``.
    """
    dist.init_process_group("gloo", init_method=(data / "meeting").as_uri(), rank=rank, world_size=run.workers)
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = Qwen3_5ForCausalLM(target_config(tokenizer)).train()
    parameters = list(model.parameters())
    optimizers = make_optimizers(model, run.lr)
    first = 0
    if run.resume:
        saved = torch.load(checkpoint_path(), weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]
    dataset = TokenDataset.open(data, "train")
    batches = itertools.islice(endless_batches(dataset.lengths, run.seed), first * run.workers + rank, None, run.workers)
    started, tokens = time.perf_counter(), 0
    for step in range(first, run.steps):
        if rank == 0 and step % CHECKPOINT_EVERY == 0 and step <= first_decay_step(run.steps):
            with write_aside(checkpoint_path()) as aside:
                states = [optimizer.state_dict() for optimizer in optimizers]
                torch.save({"model": model.state_dict(), "optimizers": states, "step": step}, aside)
        ids_BT, real_BT, supervised_BT = read_batch(dataset, next(batches))
        losses = token_losses(model, ids_BT, real_BT, run.bf16)
        supervised, prompt = supervised_BT[:, 1:], real_BT[:, 1:] & ~supervised_BT[:, 1:]
        weight = supervised + PROMPT_WEIGHT * prompt
        (losses * weight).sum().backward()
        sums = torch.cat([weight.sum().view(1), *(parameter.grad.flatten() for parameter in parameters)])
        dist.all_reduce(sums)
        for parameter, gradient in zip(parameters, (sums[1:] / sums[0]).split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = run.lr * learning_rate(step, run.steps)
            optimizer.step()
        model.zero_grad()
        tokens += run.workers * int(real_BT.sum())
        if rank == 0 and (step + 1) % 25 == 0:
            seconds = time.perf_counter() - started
            loss = losses.detach()[supervised].mean()
            print(f"step {step + 1}/{run.steps} loss {loss:.3f} {tokens / seconds:,.0f} tokens/s {seconds:.0f} s", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        shrink_unused_tokens(model, dataset, tokenizer)
        save_target(model, out)


@torch.no_grad()
def shrink_unused_tokens(model: Qwen3_5ForCausalLM, dataset: TokenDataset, tokenizer: Tokenizer) -> None:
    """Make the embeddings of the special tokens that no text holds, the mask token among them, a short step along the mean token.

    Training pushes such rows far from every hidden state (norm 6.5 where others have 2.3), and a drafter's block starts from the mask
    token's row: its first loss was 73 nats and 65 after ten steps. With short rows it is 12.6, then 7.4. The target loses 0.0005 nats.
    """
    weight_VH = model.get_input_embeddings().weight
    ids = np.concatenate([dataset.row(row)[0] for row in range(len(dataset))])
    count_V = torch.from_numpy(np.bincount(ids, minlength=len(weight_VH))).float()
    mean_H = count_V / count_V.sum() @ weight_VH
    weight_VH[[tokenizer.token_to_id(token) for token in (PAD, MASK, START)]] = 0.05 * mean_H


def save_target(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` in bfloat16, the tied head once."""
    weights = {name: value.detach().bfloat16().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    with write_aside(folder / "model.safetensors") as aside:
        aside.write_bytes(save(weights, metadata={"format": "pt"}))
    config = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: dict[str, object]) -> None:
    with write_aside(path) as aside:
        aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.model.train_sample_target", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread; the batch grows with them")
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16: 1.7 times as fast on a CPU with AVX-512 BF16")
    parser.add_argument("--resume", action="store_true", help="go on from the flat part of the last run")
    parser.add_argument("--out", type=user_path, default=sample_target_path())
    options = vars(parser.parse_args())
    out = options.pop("out")
    run = Run(**options)
    started = time.perf_counter()
    functions = read_functions()
    save_tokenizer(train_tokenizer([function for function in functions if not is_heldout(function.module)]), out)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        rows = write_sample(data, functions, out)
        torch.multiprocessing.spawn(train, (run, data, out), nprocs=run.workers)
        seconds = time.perf_counter() - started
        model = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        measured = heldout_loss(model, TokenDataset.open(data, "heldout"), tokenizer)
    about = {
        "command": run.command(),
        "seed": run.seed,
        "steps": run.steps,
        "tokens_per_step": run.workers * TOKENS_PER_BATCH,
        "seconds": round(seconds),
        "train_functions": rows["train"],
        **measured,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    _write_json(out / "training.json", about)
    print(json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
