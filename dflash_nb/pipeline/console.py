"""One plain line every few seconds while a run goes: the same text in a terminal, in JupyterLab, under papermill and in CI.

No bar: a redrawn line becomes hundreds of lines in a saved notebook.
"""

import time

import numpy as np

from dflash_nb.progress import clock


class Console:
    """Prints a line when ``every`` seconds have passed since the last. ``tokens_by_step`` is the plan: real tokens of each step."""

    def __init__(self, tokens_by_step: np.ndarray, every: float, first_step: int = 0):
        self._tokens_after = np.cumsum(tokens_by_step[::-1])[::-1]
        self._every = every
        self._tokens = 0
        self._seconds = 0.0
        self._recent = [0, 0.0]
        self._printed = time.perf_counter()
        self._first_step = first_step

    def step(self, record: dict) -> None:
        """Count one step's log record; print if it is time, and always for the first and the last step."""
        tokens, seconds = record["tokens"], record["seconds"]["step"]
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self._recent = [self._recent[0] + tokens, self._recent[1] + seconds]
        now = time.perf_counter()
        total = len(self._tokens_after)
        if now - self._printed < self._every and record["step"] not in (self._first_step + 1, total):
            return
        self._printed = now
        rate = self._recent[0] / self._recent[1]
        self._recent = [0, 0.0]
        print(self.line(record, rate), flush=True)

    def line(self, record: dict, rate: float) -> str:
        """The line of one step; ``rate`` is real tokens a second since the last line."""
        step, total = record["step"], len(self._tokens_after)
        left = self._tokens_after[step] if step < total else 0
        loss = "none" if record["loss"] is None else f"{record['loss']:.3f}"
        return (
            f"step {step:,}/{total:,}  epoch {record['epoch']}  loss {loss}  lr {record['lr']:.1e}  {rate:,.0f} tokens/s  "
            f"ETA {clock(left * self._seconds / max(self._tokens, 1))}  "
            f"q_prefetch {record['q_prefetch']}  q_hs {record['q_hs']} ({record['q_hs_bytes'] / 2**20:,.0f} MiB)"
        )
