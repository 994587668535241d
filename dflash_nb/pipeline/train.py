"""``train(config)``: the main job from a configuration to a trained, evaluated and exported drafter; a plain blocking call.

The order of everything is fixed by the plan: the same seed gives the same loss curve with any number of workers, and a run that was
killed and resumed ends with the losses of one that was not. What a run costs beside its steps: an evaluation before and one after,
and a checkpoint every ``checkpoint_every`` steps.
"""

import re
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_nb.model.export import export_drafter
from dflash_nb.model.packing import PackingError
from dflash_nb.pipeline.checkpoint import STATE, CheckpointError, check_moments, newest_checkpoint, restore, write_checkpoint
from dflash_nb.pipeline.config import TrainConfig, checked_config
from dflash_nb.pipeline.console import Console
from dflash_nb.pipeline.environment import describe_environment
from dflash_nb.pipeline.evaluate import evaluate
from dflash_nb.pipeline.interrupt import Hold, interruptible
from dflash_nb.pipeline.job import Job, padded_instead, prepare_job
from dflash_nb.pipeline.local import bytes_per_token, device_names, intra_op_threads, target_pool
from dflash_nb.pipeline.models import load_models
from dflash_nb.pipeline.prefetch import Prefetcher
from dflash_nb.pipeline.probe import memory_bytes, probe
from dflash_nb.pipeline.runlog import RunError, RunLog, new_run_folder, read_run, readable
from dflash_nb.pipeline.step import accumulate, finish_step
from dflash_nb.pipeline.summary import RunSummary, summarize, tau_words
from dflash_nb.pipeline.trackers import Tracker
from dflash_nb.pipeline.window import WAITING_BATCHES, Pool, Window
from dflash_nb.planner.state import SHAPE as POSITION
from dflash_nb.planner.state import PlanChangedError, PlanState
from dflash_nb.stored import fault

# What is needed of a checkpoint's state; earlier versions wrote neither target nor settings.
STATE_SHAPE = {"step": int, "plan": POSITION, "schedule": dict, "data": dict, "target": dict | None, "settings": dict | None}
SPEED_STEPS = (6, 25)  # after start-up; 20 steps give the mean of a step to a few per cent


def train(config: TrainConfig) -> RunSummary:
    """Train a drafter as ``config`` says and return how it went; ``config.resume`` continues a run folder with its own configuration.

    Raises what ``prepare_job`` raises, before anything is written; an error or interrupt before the first step of a new run leaves nothing
    either. After that every end writes ``summary.json``: an interrupt (Ctrl-C, SIGTERM) leaves a checkpoint and raises KeyboardInterrupt,
    an error leaves one too where it can and is raised. No thread is left.
    """
    config = checked_config(config).resumed()
    try:
        return _train(prepare_job(config))
    except PackingError as refusal:  # found out when the target was asked, before the first step
        padded, notes = padded_instead(config, refusal)
        return _train(replace(prepare_job(padded), notes=notes))


def _train(job: Job) -> RunSummary:
    config = job.config
    threads = intra_op_threads(config.threads, len(job.placement.targets))
    with interruptible() as hold, _torch_state(threads, config.seed, job.placement.drafter), _open_run(job) as (log, start):
        run = _Run(job, log, hold)
        try:
            run.prepare(start)
            stopped = run.steps()
            return run.end("interrupted" if stopped else "finished")
        except BaseException as error:
            run.rescue(error)
            raise
        finally:
            run.close()


@contextmanager
def _torch_state(threads: int, seed: int, device: torch.device) -> Iterator[None]:
    """Set the process-wide thread count and random state while inside, and leave both as they were."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _open_run(job: Job) -> Iterator[tuple[RunLog, tuple[Path, dict[str, Any]] | None]]:
    """The log of a new or a resumed run, and the checkpoint to start from: its path and state."""
    config = job.config
    broken: list[CheckpointError | str] = []
    environment = {
        "devices": {
            "targets": [str(device) for device in job.placement.targets],
            "drafter": str(job.placement.drafter),
            "names": device_names(job.placement),
        },
        "target": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(job.info).items()},
        "data": job.data,
    }
    start = None
    if config.resume:
        folder = Path(config.resume)
        logged, status = _logged_steps(folder)
        start = newest_checkpoint(folder / "checkpoints", broken.append, logged)
        if start is None and logged:
            if status == "finished":
                raise RunError(f"{folder} has finished, but its checkpoints are gone; put them back, or start a new run")
            broken.append(f"{folder / 'checkpoints'} holds none, so the run starts again from step 0 and its {logged:,} steps are dropped")
        if start is not None:
            if problem := fault(start[1], STATE_SHAPE):
                raise CheckpointError(f"{start[0] / STATE} {problem}. Remove {start[0]} to continue from the checkpoint before it")
            _check_same_run(job, start[1])
            check_moments(start[0], config.optimizer)
            if unknown := [name for name in ("target", "settings") if start[1].get(name) is None]:
                broken.append(
                    f"{start[0].name} is of an earlier version and does not tell whether its {' and '.join(unknown)} are still the same"
                )
        log = RunLog.open_for_resume(folder, start[1]["step"] if start else 0, config.changes(folder))
    else:
        folder = new_run_folder(config.runs_folder, config.run_name, config.dataset, config.strategy)
        log = RunLog.create(folder, config, environment)
    with log:
        contents = {"buckets": job.buckets.to_json(), "plan": _planned(job)}
        if config.resume:  # a new log has it already
            contents["environment"] = {**describe_environment(), **environment}
        for name, content in contents.items():
            if not config.resume or not readable(folder / f"{name}.json"):
                log.write(name, content)
        print(f"run folder: {folder}", flush=True)
        for note in job.notes:
            _warn(log, note)
        for error in broken:
            _warn(log, f"passed over a broken checkpoint: {error}" if isinstance(error, CheckpointError) else error)
        yield log, start


def _logged_steps(folder: Path) -> tuple[int, str]:
    """The last step before the first gap of a run's log, and how the run ended."""
    path = folder / "steps.jsonl"
    numbers = re.findall(rb'^\{"step":(\d+)', path.read_bytes(), re.MULTILINE) if path.is_file() else []
    logged = next((step for step, number in enumerate(numbers) if int(number) != step + 1), len(numbers))
    return logged, (readable(folder / "summary.json") or {}).get("status") or "unfinished"


def _planned(job: Job, **speed: Any) -> dict[str, Any]:
    """The content of ``plan.json``: what the run will do, and at what speed once that is known."""
    return {"epochs": job.plans, "total_steps": job.total_steps, "warmup_steps": job.warmup_steps, **speed}


def _warn(log: RunLog, text: str) -> None:
    log.event("warning", text=text)
    print(f"warning: {text}", flush=True)


def _check_same_run(job: Job, state: dict[str, Any]) -> None:
    """Refuse to continue on other data, with another target or other settings, on another plan or to another length of the run."""
    changed = [name for name, value in job.data.items() if state["data"].get(name) != value]
    if changed:
        raise PlanChangedError(
            f"dataset {job.dataset.path} has changed since the checkpoint was written: {', '.join(changed)}. "
            "Put the old data back, or start a new run"
        )
    if state.get("target") is not None and (changed := _unlike(state["target"], job.target)):
        raise PlanChangedError(
            f"target {job.info.name} in {job.info.path} has changed since the checkpoint was written: {', '.join(changed)}. "
            "Put the old target back, or start a new run"
        )
    settings, kept = state.get("settings") or {}, job.config.kept
    if changed := [f"{name} {kept[name]!r}, not {settings[name]!r}" for name in kept if name in settings and kept[name] != settings[name]]:
        raise PlanChangedError(
            f"config.json has changed since the checkpoint was written, it holds {'; '.join(changed)}. Restore it, or start a new run"
        )
    position = PlanState.from_json(state["plan"])
    if (position.epoch, position.resume(job.plan(position.epoch), job.fingerprint)) != job.position(state["step"]):
        raise PlanChangedError(
            f"the checkpoint's step {state['step']} is at another place of the plan. Give back the old accumulation, or start a new run"
        )
    if state["schedule"] != job.schedule:
        raise PlanChangedError(
            f"the learning-rate schedule has changed: saved {state['schedule']}, now {job.schedule}. Restore it, or start a new run"
        )


def _unlike(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


class _Run:
    """A job under way: its models, its log and where it stands. ``step`` counts finished optimiser steps."""

    def __init__(self, job: Job, log: RunLog, hold: Hold) -> None:
        self.job, self.config, self.log, self.hold = job, job.config, log, hold
        self.step = self.saved_step = 0
        self.checkpoint: Path | None = None
        self.pool: Pool = None  # type: ignore[assignment]  # as the window, from prepare to close
        self.window: Window = None  # type: ignore[assignment]
        self.drafters: Any = None  # with more than one drafter, drafters.Drafters
        self.tracker = Tracker(self.config.tracker, log.folder, asdict(self.config), lambda text: _warn(log, text))
        self.started = self.saved_at = time.monotonic()

    def prepare(self, start: tuple[Path, dict[str, Any]] | None) -> None:
        """Load the models, go to the checkpoint's step, start the workers, and evaluate the untrained drafter."""
        job, config = self.job, self.config
        self.target_files = job.target  # before they are read, so that what replaces them meanwhile is found when the run is resumed
        models = load_models(job, packed=config.strategy == "packed")
        targets, self.target, self.head, self.settings = models.targets, models.targets[0], models.head, models.settings
        self.drafter, self.optimizer = models.drafter, models.optimizer
        if start is not None:
            self.checkpoint, state = start
            restore(self.checkpoint, self.drafter, self.optimizer)
            self.step = self.saved_step = state["step"]
        self.pool = self._open_pool(targets)
        if config.probe and self.step == 0:
            probe(job, self.pool, self.drafter, self.head, self.settings)
        if config.workers[1] > 1:
            from dflash_nb.pipeline.drafters import Drafters

            self.drafters = Drafters(job, self.drafter, self.optimizer, self.head, self.settings, torch.get_num_threads())
            self._tell(deque(self.drafters.report()))
        self._start_window(targets)
        if self.step == 0 and not any(event["step"] == 0 for event in read_run(self.log.folder).events_of("eval")):
            self._evaluate()

    def steps(self) -> bool:
        """Train to the end of the plan. Returns whether the time limit came first."""
        job, config = self.job, self.config
        console = Console(job.tokens_by_step, config.log_every, self.step)
        while self.step < job.total_steps:
            epoch, next_batch = job.position(self.step)
            count = min(config.accumulation, job.plans[epoch]["batches"] - next_batch)
            rate, clip = job.learning_rate(self.step + 1), config.grad_clip
            if self.drafters is None:
                finish = partial(finish_step, accumulate(self.window, count, self.drafter, self.head, self.settings))
            else:
                finish = partial(self.drafters.finish_step, self.drafters.accumulate(self.window, count))
            with self.hold:
                record = finish(self.optimizer, rate, clip)
                record = self.log.step({"step": self.step + 1, **record, **self._queues()})
                self.step += 1
            console.step(record)
            self._tell(self.pool.news)
            self.tracker.step(record)
            if self.step == SPEED_STEPS[1]:
                self._foretell_speed()
            if job.position(self.step)[0] != epoch or self.step == job.total_steps:
                self.log.event("epoch", epoch=epoch)
            if self.step < job.total_steps:
                if config.time_limit and time.monotonic() - self.started >= 60 * config.time_limit:
                    return True
                if config.eval_every and self.step % config.eval_every == 0:
                    self._evaluate()
                if self._checkpoint_is_due():
                    self._save()
        return False

    def end(self, status: str) -> RunSummary:
        """Checkpoint, last evaluation and export (the first only, if the run is to be continued), and the summary."""
        self._save()
        self._tell(deque(self.pool.report()))
        export = None
        if status == "finished":
            self._evaluate()
            export = export_drafter(self.drafter, self.job.info, self.log.folder / "export")
        return self._finish(status, export)

    def rescue(self, error: BaseException) -> None:
        """After an interrupt or an error: stop the workers, save the last finished step, say how it ended.

        The frames of what failed are cleared: a notebook keeps the last traceback, and with it everything on the device.
        """
        if self.pool is not None:
            self.pool.stop.set()
        traceback.clear_frames(error.__traceback__)
        try:
            if self.step > self.saved_step:
                self._save()
        except Exception as problem:
            _warn(self.log, f"no checkpoint could be written at the end: {type(problem).__name__}: {problem}")
        if isinstance(error, KeyboardInterrupt):
            self._finish("interrupted", None)
        else:
            self._finish("failed", None, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End every thread and let go of the models, which the traceback of an error would keep alive."""
        if self.window is not None:
            self.window.close()
        if self.drafters is not None:
            self.drafters.close()
        if self.pool is not None:
            try:
                self.pool.close()
            except RuntimeError as problem:
                _warn(self.log, str(problem))
        self.tracker.close()
        for name in ("pool", "target", "head", "drafter", "optimizer", "window", "drafters"):
            self.__dict__.pop(name, None)

    def _open_pool(self, targets: list) -> Pool:
        """The pool of target workers. With engine ray the targets loaded here only evaluate and lend their head."""
        job = self.job
        if self.config.engine == "local":
            return target_pool(targets, job.placement.drafter)
        from dflash_nb.pipeline import ray as on_ray

        largest = max(plan["most_tokens"] for plan in job.plans) * bytes_per_token(targets[0])
        return on_ray.target_pool(job, torch.get_num_threads(), largest)

    def _tell(self, news: deque[str]) -> None:
        """Print and log what happened to workers."""
        while news:
            text = news.popleft()
            self.log.event("worker", text=text)
            print(text, flush=True)

    def _start_window(self, targets: list) -> None:
        job, config = self.job, self.config
        token_bytes = bytes_per_token(targets[0])
        limit = config.q_hs_mb << 20
        workers = len(targets)
        largest = max(plan["most_tokens"] for plan in job.plans) * token_bytes
        if workers * largest > limit:
            text = (
                f"q_hs_mb {config.q_hs_mb} holds {limit / largest:.1f} of the largest batches ({largest / 2**20:,.0f} MiB each), "
                f"so {workers} target workers cannot always work at once"
            )
            _warn(self.log, text)
        self.source = Prefetcher(job.planned_from(self.step), job.collate, config.prefetch)
        self.window = Window(
            self.source,
            self.pool,
            size_of=lambda batch: batch.real_tokens * token_bytes,
            max_items=workers + WAITING_BATCHES,
            max_bytes=limit,
            retries=config.retries,
            on_retry=self._note_retry,
        )

    def _note_retry(self, batch: Any, failure: Exception, attempt: int) -> None:
        self._tell(self.pool.news)
        self.log.event("retry", epoch=batch.epoch, batch=batch.index, attempt=attempt, error=str(failure))
        print(f"warning: batch {batch.index} of epoch {batch.epoch} is run again (attempt {attempt}): {failure}", flush=True)

    def _queues(self) -> dict[str, int]:
        return {
            "q_prefetch": self.source.depth,
            "q_hs": self.window.depth,
            "q_hs_bytes": self.window.nbytes,
            "memory_bytes": memory_bytes(self.settings.device),
        }

    def _foretell_speed(self) -> None:
        """Write the speed to be expected into the plan: that of the first steps, whose batches are a random part of the plan."""
        first, last = SPEED_STEPS
        steps = read_run(self.log.folder).steps
        tokens, seconds = (float(steps[name][first - 1 : last].sum()) for name in ("tokens", "seconds_step"))
        self.log.write("plan", _planned(self.job, tokens_per_second=tokens / seconds, speed_source=f"measured on steps {first} to {last}"))

    def _evaluate(self) -> None:
        config, job = self.config, self.job
        result = evaluate(
            self.target,
            self.drafter,
            self.head,
            job.heldout,
            self.settings,
            rows=config.eval_rows,
            prompts=config.eval_prompts,
            new_tokens=config.eval_tokens,
            boundaries=job.buckets.boundaries,
            token_budget=config.token_budget,
        )
        self.log.event("eval", step=self.step, **result)
        self.tracker.evaluation(self.step, result)
        numbers = [f"{name} {result[name]:.2f}" for name in ("loss", "acceptance") if result[name] is not None]
        numbers += [f"tau {tau_words(result)}"] if result["tau"] is not None else []
        print(f"held out at step {self.step:,}: {', '.join(numbers)}  ({result['seconds']:.0f} s)", flush=True)

    def _checkpoint_is_due(self) -> bool:
        every, minutes = self.config.checkpoint_every, self.config.checkpoint_minutes
        return (every > 0 and self.step % every == 0) or (minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes)

    def _save(self) -> None:
        if self.step == self.saved_step and self.checkpoint is not None:
            return
        started = time.monotonic()
        epoch, next_batch = self.job.position(self.step)
        state = {
            "plan": PlanState.at(self.job.plan(epoch), next_batch, self.job.fingerprint).to_json(),
            "schedule": self.job.schedule,
            "data": self.job.data,
            "target": self.target_files,
            "settings": self.config.kept,
            "in_flight": self.window.in_flight() if self.window is not None else [],
        }
        folder = self.log.folder / "checkpoints"
        self.checkpoint = write_checkpoint(folder, self.step, self.drafter, self.optimizer, state, self.config.keep_checkpoints)
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.log.event("checkpoint", path=str(self.checkpoint.relative_to(self.log.folder)), seconds=self.saved_at - started)

    def _finish(self, status: str, export: Path | None, **details: Any) -> RunSummary:
        folder, total, finished = self.log.folder, self.job.total_steps, status == "finished"
        try:
            summary = summarize(read_run(folder), total, finished, self.checkpoint, export)
        except Exception as problem:  # a file changed by another hand, for one; the run has ended as it has
            _warn(self.log, f"the log cannot be summed up: {type(problem).__name__}: {problem}")
            summary = RunSummary(folder, finished, self.step, total, checkpoint=self.checkpoint, export=export)
        self.log.finish(status, **{**summary.to_json(), **details})
        return summary
