"""Tau of a run's last checkpoint over as many held-out prompts as wanted, with its uncertainty.

    python -m dflash_nb.pipeline.tau runs/NAME --prompts 500

Evaluations during training decode a few prompts; their tau wanders by a few hundredths from one draw of prompts to the next. Here the
interval comes from the prompts themselves, as in ``evaluate``. Prompts are those of the run's own evaluations first, in the same order.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from dflash_nb.home import user_path
from dflash_nb.model.decode import measure_tau
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.pipeline.checkpoint import WEIGHTS, CheckpointError, newest_checkpoint
from dflash_nb.pipeline.config import saved_config
from dflash_nb.pipeline.evaluate import LONGEST_PROMPT, heldout_order, repeated, tau_interval
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.local import load_targets
from dflash_nb.pipeline.summary import repetition

LOWEST_TEMPERATURE = 1e-3  # far below, logits divided by it are no longer finite


@dataclass(frozen=True)
class MeasuredTau:
    """Tokens a verification pass, the bonus included, and the 95 % interval of it over draws of prompts: None for one prompt."""

    tau: float
    low: float | None
    high: float | None
    prompts: int
    passes: int
    repeated: float
    seconds: float

    def text(self) -> str:
        passes = f"{self.passes:,} passes, {self.seconds:,.0f} s{repetition(self.repeated)}"
        if self.low is None:
            return f"tau {self.tau:.3f} over one held-out prompt, which gives no interval, and {passes}"
        return f"tau {self.tau:.3f} ({self.low:.3f} to {self.high:.3f}, 95 %) over {self.prompts:,} held-out prompts and {passes}"


def tau_of_run(run: Path, prompts: int, new_tokens: int, temperature: float = 0.0) -> MeasuredTau:
    """Decode held-out prompts with the newest good checkpoint of ``run``; prints a line now and then.

    Raises ValueError for a run without checkpoint or held-out prompts, ParameterError for a folder that is no run.
    """
    if prompts < 1 or new_tokens < 2:
        raise ValueError(f"prompts is {prompts} and new_tokens {new_tokens}; at least 1 and 2 are needed")
    if temperature and not LOWEST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy), or a number of at least {LOWEST_TEMPERATURE}")
    config = saved_config(run)
    found = newest_checkpoint(run / "checkpoints", lambda error: print(f"passed over: {error}", flush=True))
    if found is None:
        raise ValueError(f"{run} has no checkpoint yet; wait for its first one, or give checkpoint_every a smaller number")
    job = prepare_job(config)
    if (most := job.info.max_positions - 1) < new_tokens:
        raise ValueError(
            f"new_tokens is {new_tokens}, target {job.info.name} has {job.info.max_positions} positions for a prompt and them; "
            f"give at most {most}"
        )
    target = load_targets(job.info, job.drafter.target_layer_ids, job.placement, config.dtype)[0]
    drafter = DFlashDrafter(job.drafter)
    drafter.load_state_dict(load_file(found[0] / WEIGHTS))
    drafter.to(job.placement.drafter)
    longest = min(LONGEST_PROMPT, job.info.max_positions - new_tokens)
    texts = job.heldout.prompts(heldout_order(job.heldout, config.seed), prompts, longest)
    if not texts:
        raise ValueError(f"{config.dataset} has no held-out prompt of 1 to {longest} tokens; give fewer new tokens, or shorter prompts")
    print(f"{found[0]}: {len(texts):,} prompts, at most {new_tokens} tokens each", flush=True)
    head, started = target.head(job.placement.drafter), time.monotonic()
    done = measure_tau(target, drafter, texts, new_tokens, temperature, seed=1, head=head)
    if not done.passes:
        raise ValueError(f"each of {len(texts)} texts ended with its first token, so nothing was drafted: give more prompts")
    low, high = tau_interval(done.texts) if len(texts) > 1 else (None, None)
    return MeasuredTau(done.tau, low, high, len(texts), done.passes, repeated(done.texts), time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.pipeline.tau", description="Tau of a run's last checkpoint.")
    parser.add_argument("run", type=user_path, help="run folder")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts (default: 200)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for a prompt (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding (default), else sampling")
    try:
        print(tau_of_run(**vars(parser.parse_args(arguments))).text(), flush=True)
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
