"""Every knob of every notebook, flat, each with one sentence of help; the defaults suit the embedded sample on two cores.

A configuration is a frozen dataclass whose fields are the notebook's parameters, one to one (a test holds names, defaults and help
text against the cells). There is no override language: papermill's ``-p``, ``-y`` and ``-f`` are it.
"""

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from dflash_nb import home
from dflash_nb.data.lengths import read_histogram
from dflash_nb.data.source import dataset_path
from dflash_nb.errors import NotFoundError
from dflash_nb.model.target_info import resolve_target
from dflash_nb.pipeline.environment import git_commit, versions
from dflash_nb.pipeline.parameters import ParameterError, Parameters, checked, option
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.buckets import read_spec
from dflash_nb.planner.edges import check_reach
from dflash_nb.planner.limits import BucketError
from dflash_nb.stored import parsed

STRATEGIES = ("bucketed", "pooled", "random", "sorted", "packed")
BUCKETS_HELP = "cuts between lengths as auto, auto:6, reference, inner edges such as 512,1024, or the path of a buckets.json"
HARMLESS = frozenset(
    (
        "resume", "watch", "device", "threads", "topology", "engine", "ray_address", "prefetch", "q_hs_mb", "retries", "probe",
        "time_limit", "tracker", "watts", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "log_every",
        "eval_every", "eval_rows", "eval_prompts", "eval_tokens",
    )
)  # fmt: skip
PLACES = frozenset(("dataset", "target", "buckets", "run_name", "runs_dir"))  # they may move: a resume compares what lies there


@dataclass(frozen=True)
class NotebookConfig(Parameters):
    """What the five configurations share: saying what will be used."""

    def places(self) -> dict[str, Path]:
        """Absolute paths that will be read or written, by what they are."""
        return {}

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that do not hold their default."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}

    def settings(self) -> list[tuple[str, str]]:
        """What was changed and what was not, each as a name and a text."""
        unchanged = {each.name: each.default for each in fields(self) if each.name not in self.changed}
        return [("changed", _spelled(self.changed) or "nothing"), ("defaults", _spelled(unchanged) or "none")]

    def describe(self) -> str:
        """What will be used, as plain lines: absolute paths, what was changed from the defaults, the defaults, versions, commit.

        Raises what looking for the dataset or the run raises when it is not there.
        """
        git = git_commit()
        unknown = "not a git checkout that git can read" if (home.project_root() / ".git").exists() else "not a git checkout"
        commit = f"{git['commit'][:12]}{' and uncommitted changes' if git['dirty'] else ''}" if git["commit"] else unknown
        lines = [(name, str(path)) for name, path in self.places().items()]
        lines += self.settings()
        lines += [("versions", ", ".join(f"{name} {text}" for name, text in versions().items())), ("commit", commit)]
        fill = textwrap.TextWrapper(100, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False).fill
        return "\n".join(fill(f"{name:<10} {text}") for name, text in lines)


def _cut_problems(spec: str) -> Iterable[str]:
    """What is wrong with ``buckets``, as far as it can be told without lengths."""
    try:
        read_spec(spec)
    except (BucketError, NotFoundError) as problem:
        yield str(problem)


def _cuts_note(spec: str, **wanted: Any) -> str:
    """For cuts from a file: what it was made for that is not as ``wanted``, and what to do; else empty."""
    path = read_spec(spec).path
    unlike = BucketPlan.load(path).unlike(**wanted) if path else []
    return f"{path} was made for {'; '.join(unlike)}. Make it again with notebook 01, or go on if that is meant" if unlike else ""


def _is_folder_name(text: str) -> bool:
    return len(text.encode(errors="replace")) <= 200 and text.isprintable() and Path(text).name == text and text not in (".", "..")


NUMBER = "[0-9]{1,9}"
TOPOLOGY = (
    re.compile("0?[1-9][0-9]{0,3}-0?[1-9][0-9]{0,3}").fullmatch,
    "target workers and drafters such as 1-1 or 7-1, at most 9999 each",
)
LAYERS = (re.compile(rf"auto|\s*{NUMBER}\s*(,\s*{NUMBER}\s*)*").fullmatch, "auto, or layer numbers counted from 0 such as 1,5,9")
MASK = (re.compile(f"auto|{NUMBER}").fullmatch, "auto, or the number of a token")
RUN_NAME = (_is_folder_name, "a folder name of at most 200 letters, without a path or line breaks (runs_dir says where it goes)")
PLACE = (bool, "sample, or a folder (. for the current one)")


def _spelled(values: Mapping[str, Any]) -> str:
    texts = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return ", ".join(f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}" for name, value in texts.items())


@dataclass(frozen=True)
class TrainConfig(NotebookConfig):
    """Notebook 03 and ``train(config)``."""

    dataset: str = option("sample", "sample, or a folder made by dflash_nb.data.prepare", path="existing", names=("sample",), form=PLACE)
    target: str = option(
        "sample", "sample, smollm2, a model folder, or a cached hub name", path="existing", names=("sample", "smollm2"), form=PLACE
    )
    heldout_rows: int = option(200, "last rows to withhold when the dataset has no held-out split", at_least=1)

    buckets: str = option("auto", BUCKETS_HELP, listed=True, path="existing", names=("auto", "reference"))
    strategy: str = option("bucketed", "how samples are put together", choices=STRATEGIES)
    order: str = option("balanced", "order of the batches, balanced over each step or uniform", choices=("balanced", "uniform"))
    token_budget: int = option(8192, "most tokens of a batch, padding included", at_least=1)
    max_batch: int = option(32, "most samples of a batch", at_least=1)
    pad_multiple: int = option(1, "padded lengths are rounded up to a multiple of this", at_least=1)
    max_length: int = option(0, "longest sample in tokens, 0 for no limit but the token budget", at_least=0)
    too_long: str = option("error", "what to do with longer samples", choices=("error", "drop", "truncate"))
    slot_budget: int = option(0, "most drafted slots of a batch (samples x anchors x block size), 0 for no limit", at_least=0)

    draft_layers: int = option(2, "layers of the drafter", at_least=1)
    block_size: int = option(8, "tokens of a block, the known anchor included", at_least=2)
    target_layers: str = option(
        "auto", "target layers to read, auto or numbers from 0 such as 1,5,9", listed=True, names=("auto",), form=LAYERS
    )
    mask_token: str = option("auto", "token that stands for a slot to fill, auto or its number in the vocabulary", form=MASK)
    sliding_window: int = option(0, "context tokens that a drafter layer sees, 0 for all", at_least=0)

    objective: str = option("ce", "cross-entropy, D-PACE weights, or KL to the target's distribution", choices=("ce", "dpace", "kl"))
    gamma: float = option(0.0, "decay of the slot weights, 0 picks 4 at block size 8 and 7 at 16", at_least=0)
    anchors: int = option(32, "most blocks drawn from a sample in an epoch", at_least=1)

    epochs: int = option(1, "passes over the data", at_least=1)
    max_steps: int = option(0, "stop after this many optimiser steps, 0 for all epochs", at_least=0)
    accumulation: int = option(1, "batches of one optimiser step", at_least=1)
    optimizer: str = option("muon", "Muon for matrices and AdamW for the rest, or AdamW for all", choices=("muon", "adamw"))
    learning_rate: float = option(5e-3, "peak learning rate", above=0)
    warmup: float = option(0.04, "linear warm-up, below 1 a share of all steps, else a number of steps", at_least=0)
    decay: str = option("cosine", "shape of the learning rate after warm-up", choices=("cosine", "linear", "wsd", "constant"))
    min_lr_ratio: float = option(0.1, "learning rate at the end as a share of the peak", at_least=0, at_most=1)
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW decay of the first moment", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW decay of the second moment", at_least=0, below=1)
    grad_clip: float = option(1.0, "largest gradient norm, 0 for no clipping", at_least=0)
    seed: int = option(0, "seed of the plan, the anchors and the drafter's first weights", at_least=0, below=2**63)

    device: str = option("auto", "auto, cpu, cuda, or one device such as cuda:1")
    dtype: str = option("auto", "number format of the target and of matrix products", choices=("auto", "float32", "bfloat16"))
    topology: str = option("1-1", "target workers and drafters as N-M", form=TOPOLOGY)
    engine: str = option("local", "where target workers run, threads of this machine or actors of a Ray cluster", choices=("local", "ray"))
    ray_address: str = option("", "Ray cluster to join, auto or host:port, empty for one on this machine that ends with the run")
    threads: int = option(0, "CPU threads of all workers together, 0 for every core", at_least=0, at_most=4096)
    prefetch: int = option(8, "collated batches that may wait for the target", at_least=1)
    q_hs_mb: int = option(256, "MiB of hidden states that may wait for the drafter", at_least=1)
    retries: int = option(2, "times that a failed batch is run again on another worker", at_least=0)
    watts: float = option(0.0, "watts of one device at work, 0 leaves energy out of the advice", at_least=0)
    probe: bool = option(False, "run the largest batch of each bucket first to see whether it fits")

    eval_every: int = option(0, "optimiser steps between evaluations, 0 for the start and the end only", at_least=0)
    eval_rows: int = option(64, "held-out samples for the loss", at_least=1)
    eval_prompts: int = option(16, "held-out prompts for tau", at_least=1)
    eval_tokens: int = option(64, "tokens generated for a prompt", at_least=1)

    run_name: str = option("", "name of the run folder, empty for date, dataset and strategy", form=RUN_NAME)
    runs_dir: str = option("", "folder that holds the run folders, empty for the project's runs", path="always")
    resume: str = option("", "run folder to continue, its configuration is taken over", path="always")
    watch: str = option("", "run folder to look at without training, also while it is going", path="always")
    checkpoint_every: int = option(200, "optimiser steps between checkpoints, 0 for the end only", at_least=0)
    checkpoint_minutes: float = option(10.0, "minutes after which a checkpoint is written anyway, 0 for never", at_least=0)
    keep_checkpoints: int = option(2, "newest checkpoints that stay", at_least=1)
    time_limit: float = option(0.0, "minutes after which the run stops cleanly and can be resumed, 0 for none", at_least=0)
    log_every: float = option(5.0, "seconds between printed lines", above=0)
    tracker: str = option("none", "also report to this tracker", choices=("none", "wandb", "trackio", "tensorboard"))

    def contradictions(self) -> Iterable[str]:
        if self.max_length > self.token_budget:
            yield (
                f"max_length {self.max_length} is more than token_budget {self.token_budget}: a batch could not hold one sample. "
                "Raise token_budget"
            )
        if self.ray_address and self.engine != "ray":
            yield f"ray_address {self.ray_address!r} was given, but engine is {self.engine!r}: use engine ray"
        if self.watch and self.resume:
            yield f"watch {self.watch} and resume {self.resume} were both given: looking and continuing are two calls, leave out one"
        yield from _cut_problems(self.buckets)

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """The chosen target layers, None for auto."""
        return None if self.target_layers == "auto" else tuple(int(part) for part in self.target_layers.split(","))

    @property
    def mask_token_id(self) -> int | None:
        """The chosen mask token, None for auto."""
        return None if self.mask_token == "auto" else int(self.mask_token)

    @property
    def workers(self) -> tuple[int, int]:
        """Target workers and drafters."""
        targets, _, drafters = self.topology.partition("-")
        return int(targets), int(drafters)

    @property
    def slot_gamma(self) -> float:
        """``gamma``, or for 0 the published pairs (block 8, 4) and (block 16, 7) joined by a line, 1 at least."""
        return self.gamma or max(1.0, 4 + (self.block_size - 8) * 3 / 8)

    @property
    def kept(self) -> dict[str, Any]:
        """The settings with another value of which a resumed run would be another run."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in HARMLESS | PLACES}

    @property
    def runs_folder(self) -> Path:
        """Where a new run folder goes."""
        return Path(self.runs_dir) if self.runs_dir else home.runs_dir()

    def places(self) -> dict[str, Path]:
        if self.watch:
            return {"run folder": Path(self.watch)}
        run = Path(self.resume) if self.resume else self.runs_folder / (self.run_name or "<date>-<dataset>-<strategy>")
        return {"dataset": dataset_path(self.dataset), "target": resolve_target(self.target), "run folder": run}

    def settings(self) -> list[tuple[str, str]]:
        """With ``watch``, those of the run that is looked at. Else the own ones, and where ``buckets`` were made for something else.

        Raises BucketError for edges beyond the longest sample.
        """
        if self.watch:
            ignored = {name: value for name, value in self.changed.items() if name not in ("watch", "watts")}
            lines = [("ignored", f"{_spelled(ignored)}: a run that is only looked at has its own settings")] if ignored else []
            try:
                return [*lines, ("its own", _spelled(saved_config(Path(self.watch)).changed) or "the defaults")]
            except ParameterError:
                return lines
        asked = read_spec(self.buckets)
        if asked.typed and not self.resume:
            longest = read_histogram(self.dataset).max
            check_reach(asked.edges, min(longest, self.max_length or longest))
        return super().settings() + ([("beware", self.cuts_note)] if self.cuts_note else [])

    @property
    def cuts_note(self) -> str:
        """What a file of cuts was made for that this run is not, and what to do; empty where all is as it should be."""
        return "" if self.resume else _cuts_note(self.buckets, dataset=self.dataset, **self.limits)

    @property
    def limits(self) -> dict[str, int]:
        """What bounds a batch."""
        return {name: getattr(self, name) for name in ("token_budget", "max_batch", "pad_multiple")}

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """The notebook's configuration; with ``resume``, that run's own."""
        return super().from_notebook(namespace).resumed()

    def resumed(self) -> Self:
        """With ``resume``, the configuration of that run, with this one's harmless changes; without, this one.

        A field that holds its default counts as not given, unless papermill's ``-p`` set it. Raises ParameterError for a folder that is no
        run of ours, and naming every field whose change would make the run another one.
        """
        if not self.resume:
            return self
        saved = saved_config(Path(self.resume))
        changed = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if (each.name in self.given or getattr(self, each.name) != each.default)
            and getattr(self, each.name) != getattr(saved, each.name)
        }
        refused = [f"{name} {value!r}, not {getattr(saved, name)!r}" for name, value in changed.items() if name not in HARMLESS]
        if refused:
            raise ParameterError(
                f"resume: {self.resume} was started with other settings. A resumed run keeps its own; leave out {'; '.join(refused)}, "
                "or start a new run"
            )
        found = replace(self, **{each.name: getattr(saved, each.name) for each in fields(saved)} | changed)
        object.__setattr__(found, "given", frozenset(changed))  # also when it is asked again
        return found

    def changes(self, folder: Path) -> dict[str, Any]:
        """The settings of a resumed run that are others than it was started with, those left out that only say what is resumed."""
        saved = saved_config(folder)
        return {name: getattr(self, name) for name in sorted(HARMLESS - {"resume", "watch"}) if getattr(self, name) != getattr(saved, name)}


def checked_config(config: Any) -> TrainConfig:
    """``config``, or ParameterError for what is none."""
    if not isinstance(config, TrainConfig):
        raise ParameterError(f"config must be a TrainConfig, not of type {type(config).__name__}; make one with TrainConfig(dataset=...)")
    return config


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run's ``config.json``, each number in its setting's kind; what this version does not know stays as it is.

    Raises ParameterError for the first that its setting cannot have; a choice of another version is none of these, nor are cuts from a
    file, which may be gone.
    """
    settings = dict(values)
    for each in fields(TrainConfig):
        value = settings.get(each.name)
        if each.name in settings and not (each.metadata["choices"] and isinstance(value, str)):
            right = checked(each, value)
            settings[each.name] = value if isinstance(value, str) else right  # a path is not looked for again
    cuts = settings.get("buckets", "auto")
    if not cuts.endswith(".json") and os.sep not in cuts and (problem := next(iter(_cut_problems(cuts)), "")):
        raise ParameterError(problem)
    return settings


def damaged_setting(values: Mapping[str, Any]) -> str:
    """What ``read_settings`` refuses, as a predicate."""
    try:
        read_settings(values)
    except ParameterError as problem:
        return f"cannot be used: {problem}"
    return ""


def saved_config(folder: Path) -> TrainConfig:
    """The configuration that a run folder was made with. Raises ParameterError when it holds none that this version can read."""
    path = folder / "config.json"
    try:
        if not home.exists(path):
            raise FileNotFoundError
        values = parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        near = "" if home.exists(folder) else home.did_you_mean(folder, beside=home.runs_dir())
        raise ParameterError(f"resume: {folder} is not a run folder, it has no config.json.{near}") from None
    except (OSError, ValueError) as problem:
        raise ParameterError(f"resume: {path} is not readable: {problem}. Copy the run folder again") from None
    if not isinstance(values, dict):
        raise ParameterError(f"resume: {path} holds {str(values)[:40]}, needed: the settings of a run. Copy the run folder again")
    if str(values.get("buckets", "")).endswith(".json") and (folder / "buckets.json").is_file():
        values["buckets"] = str(folder / "buckets.json")  # the run's own copy; the file it came from may be another by now
    if strange := sorted(set(values) - {each.name for each in fields(TrainConfig)}):
        raise ParameterError(f"resume: {path} holds settings that this version does not know: {', '.join(strange)}")
    if lacking := sorted({each.name for each in fields(TrainConfig)} - set(values) - HARMLESS):
        raise ParameterError(
            f"resume: {path} lacks {', '.join(lacking)}, and with another value it would be another run. Copy the run folder again, "
            "or write the value into the file"
        )
    try:
        return TrainConfig(**values)
    except ParameterError as problem:
        raise ParameterError(f"resume: {path} cannot be used: {problem}") from None


BUDGET_HELP = "most tokens of a batch with padding, 0 for the trainer's own (49152 with the reference lengths)"
COST_HELP = "measured cost model as a cost.json or a run folder, empty for the assumed one"
ROWS_HELP = "most samples of a batch, 0 for the trainer's own (64 with the reference lengths)"


@dataclass(frozen=True)
class PlanningConfig(NotebookConfig):
    """What notebooks 00 to 02 share: whose lengths, and the limits of a batch."""

    dataset: str = option("sample", "sample, reference, or a dataset's file or folder", path="existing", names=("sample", "reference"))
    column: str = option("seq_len", "column that holds the lengths")

    def contradictions(self) -> Iterable[str]:
        if not self.dataset:
            yield "dataset: '' was given, needed: sample, reference, or a file or folder (. for the current one)"
        if not self.column:
            yield "column: '' was given, needed: the name of the column that holds the lengths"
        yield from _cut_problems(getattr(self, "buckets", "auto"))

    @property
    def made_for(self) -> dict[str, str]:
        """Whose lengths these are, for ``BucketPlan.made_for``."""
        return {"dataset": self.dataset, "column": self.column}

    def settings(self) -> list[tuple[str, str]]:
        note = _cuts_note(getattr(self, "buckets", "auto"), **self.made_for, **self.limits)
        return super().settings() + ([("beware", note)] if note else [])

    @property
    def limits(self) -> dict[str, int]:
        """token_budget, max_batch and pad_multiple of a batch; a 0 stands for the reference run's where its lengths are used, else
        for the trainer's default."""
        usual = {"token_budget": 49152, "max_batch": 64} if self.dataset == "reference" else {}
        limits = {}
        for name in ("token_budget", "max_batch", "pad_multiple"):
            default = usual.get(name, getattr(TrainConfig, name))
            limits[name] = getattr(self, name, default) or default
        return limits

    def places(self) -> dict[str, Path]:
        return {"lengths": home.asset("reference_lengths.parquet") if self.dataset == "reference" else dataset_path(self.dataset)}

    def describe(self) -> str:
        limits = ", ".join(f"{name} {value:,}" for name, value in self.limits.items())
        return f"{super().describe()}\n{'limits':<10} {limits}"


@dataclass(frozen=True)
class LengthsConfig(PlanningConfig):
    """Notebook 00."""

    max_length: int = option(0, "truncation limit to mark in tokens, 0 for none", at_least=0)
    max_batch: int = option(0, ROWS_HELP, at_least=0)

    @property
    def limit(self) -> int | None:
        """The truncation limit, None for none."""
        return self.max_length or None


@dataclass(frozen=True)
class BucketsConfig(PlanningConfig):
    """Notebook 01."""

    buckets: str = option("auto", BUCKETS_HELP, listed=True, path="existing", names=("auto", "reference"))
    token_budget: int = option(0, BUDGET_HELP, at_least=0)
    max_batch: int = option(0, ROWS_HELP, at_least=0)
    pad_multiple: int = option(1, "padded lengths are rounded up to a multiple of this", at_least=1)
    objective: str = option("padding", "what auto cuts make least, padded tokens or modelled time", choices=("padding", "time"))
    cost: str = option("", COST_HELP, path="always")
    most_buckets: int = option(128, "largest count on the elbow plot", at_least=2)
    seed: int = option(0, "seed of the resampled lengths", at_least=0, below=2**63)
    save_to: str = option("", "where to write buckets.json, empty for the project's runs folder", path="always")

    @property
    def counts(self) -> tuple[int, ...]:
        """Counts of the elbow plot: every one up to 16, then eight an octave, up to ``most_buckets``."""
        finer = {round(16 * 2 ** (step / 8)) for step in range(8 * 20)}
        return tuple(sorted(n for n in {*range(1, 17), *finer, self.most_buckets} if n <= self.most_buckets))

    def contradictions(self) -> Iterable[str]:
        yield from super().contradictions()
        if self.save_to and Path(self.save_to).is_dir():
            yield f"save_to: {self.save_to} is a folder; give the path of a file, such as {Path(self.save_to) / 'buckets.json'}"

    @property
    def writes(self) -> Path:
        """Where the chosen cuts go."""
        return Path(self.save_to) if self.save_to else home.runs_dir() / "buckets.json"

    def places(self) -> dict[str, Path]:
        return {**super().places(), "writes": self.writes}


@dataclass(frozen=True)
class PaddingConfig(PlanningConfig):
    """Notebook 02."""

    buckets: str = option("auto", BUCKETS_HELP, listed=True, path="existing", names=("auto", "reference"))
    strategies: tuple[str, ...] = option(STRATEGIES, "strategies to compare", choices=STRATEGIES)
    token_budget: int = option(0, BUDGET_HELP, at_least=0)
    max_batch: int = option(0, ROWS_HELP, at_least=0)
    pad_multiple: int = option(1, "padded lengths are rounded up to a multiple of this", at_least=1)
    order: str = option("balanced", "order of the batches, balanced over each step or uniform", choices=("balanced", "uniform"))
    window: int = option(8, "batches of one optimiser step", at_least=1)
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds to plan with", at_least=0, below=2**63)
    cost: str = option("", COST_HELP, path="always")
    runs: tuple[str, ...] = option((), "run folders whose measured speed is shown beside the predicted one", path="always")
    experiment: str = option(
        "sample",
        "strategies measured in training, as sample, smollm2 or a strategies.json, empty for none",
        path="existing",
        names=("sample", "smollm2"),
    )

    def contradictions(self) -> Iterable[str]:
        yield from super().contradictions()
        for name in ("strategies", "seeds"):
            if not getattr(self, name):
                yield f"{name}: an empty list was given, needed: at least one; leave the parameter out to get its default"

    @property
    def plan_options(self) -> dict[str, Any]:
        """What every plan of the comparison shares."""
        return {**self.limits, "order": self.order, "window": self.window}


@dataclass(frozen=True)
class DiagnoseConfig(NotebookConfig):
    """Notebook 04."""

    run_dir: str = option("", "run folder or a tracker's CSV export, empty for the newest run", path="always")
    compare: tuple[str, ...] = option((), "more runs to compare with, as paths", path="always")
    columns: str = option("", "names in a CSV export such as loss:train/loss,step:_step, empty to guess")

    @property
    def run(self) -> Path:
        """The run to read. Raises ParameterError when none was named and the project has none."""
        if self.run_dir:
            return Path(self.run_dir)
        runs = sorted(home.runs_dir().glob("*/steps.jsonl"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise ParameterError(f"run_dir: no run folder was named and {home.runs_dir()} holds none; make one with `make run`")
        return runs[-1].parent

    def places(self) -> dict[str, Path]:
        return {"run folder": self.run}
