"""The cost model that a run's own log gives: its batches in the planner's terms, what they belong to, and the fit.

    python -m dflash_nb.pipeline.measured runs/<name>     fit, print what it found, write runs/<name>/cost.json

Stage times are those of a run under way, so whatever the stages cost each other on shared cores or memory is in them. The first
steps are left out: they warm up caches, allocators and kernels.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from dflash_nb.home import exists
from dflash_nb.pipeline.run import Run, RunError, read_run
from dflash_nb.planner.cost import CostError, CostModel
from dflash_nb.planner.fit import STAGES, Measured, fit_cost, largest_terms
from dflash_nb.stored import fault

WARM_UP_STEPS = 5
SPEED_PARTS = 10
COST_FILE = "cost.json"
# What a cost model takes from a run's config.json and environment.json.
SETTINGS = {
    **dict.fromkeys(("threads", "draft_layers", "block_size", "anchors", "accumulation"), int),
    **dict.fromkeys(("dtype", "target_layers", "topology", "strategy"), str),
}
ENVIRONMENT = {
    "devices": ({"names": ([str], NoneType)}, NoneType),
    "target": {"name": str, "num_layers": int, "hidden_size": int},
}


def measured_batches(run: Run, warm_up: int = WARM_UP_STEPS) -> Measured:
    """A run's batches after its first steps. Raises CostError for a log without seconds of batches or of packed rows.

    The log has a batch's real tokens, not each sample's: its samples count as alike. Drafted slots are blocks x block size.
    """
    if not len(run) or not np.isfinite(run.batches["seconds_target"]).any():
        raise CostError(f"{run.folder} has no batch with measured seconds; train a few steps first")
    if not run.config.get("block_size"):
        raise CostError(f"{run.folder / 'config.json'} lacks block_size, without which slots are not known; copy the whole run folder")
    if run.config.get("strategy") == "packed":
        raise CostError(f"{run.folder} trained on packed rows; fit the cost model to a run with padded batches, it holds for both")
    steps, batches = run.steps, run.batches
    keep = (batches["at"] >= warm_up) & np.isfinite(batches["seconds_target"])
    if not keep.any():
        raise CostError(f"{run.folder} has {len(run)} steps and the first {warm_up} warm up: train more")
    share = batches["slots"] / np.maximum(np.bincount(batches["at"], batches["slots"]), 1)[batches["at"]]
    blocks = steps["blocks"][batches["at"]] * share
    rest = steps["seconds_step"] - steps["seconds_wait"] - steps["seconds_drafter"]
    columns = {name: np.asarray(values)[keep] for name, values in (batches | {"blocks": blocks}).items()}
    return to_measured(columns, run.config["block_size"], float(np.nanmedian(rest[min(warm_up, len(run) - 1) :])))


def to_measured(columns: Mapping[str, np.ndarray], block_size: int, step: float) -> Measured:
    """The planner's terms of batch columns named as in the log; ``blocks`` beside them, and ``shape`` where batches were measured again."""
    slots = np.asarray(columns["blocks"], dtype=np.float64) * block_size
    return Measured(
        rows=columns["rows"],
        tokens=columns["tokens"],
        padded_length=columns["padded_length"],
        padded_tokens=columns["padded_tokens"],
        slots=slots,
        pairs=slots * columns["tokens"] / columns["rows"],
        seconds={stage: np.nan_to_num(columns[f"seconds_{stage}"]) for stage in STAGES},
        step=max(step, 0.0),
        shape=columns.get("shape"),
    )


def identity(config: Mapping[str, Any], environment: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """What a measurement belongs to: hardware, target and drafter as names to compare and to show."""
    devices = (environment.get("devices") or {}).get("names") or [f"{environment.get('cpu_cores')} CPU cores"]
    hardware = ", ".join(dict.fromkeys(devices))
    kept = "the target's own number format"  # what FrozenTarget.load makes of auto on an accelerator
    if "CPU" in hardware:
        hardware += f" with {config['threads'] or 'all'} threads"
        kept = "float32"
    return {
        "hardware": f"{hardware}, in {kept if config['dtype'] == 'auto' else config['dtype']}",
        "target": f"{target['name']} ({target['num_layers']} layers of {target['hidden_size']})",
        "drafter": f"{config['draft_layers']} layers, block size {config['block_size']}, target layers {config['target_layers']}",
    }


def about(config: Mapping[str, Any], belongs_to: Mapping[str, str], measured: Measured, how: str) -> dict[str, Any]:
    """The fields of a cost model beside its coefficients."""
    most = config["anchors"] * config["block_size"]
    return {
        "source": f"measured on {belongs_to['hardware']}, {how}",
        "belongs_to": dict(belongs_to),
        "target_workers": int(str(config["topology"]).partition("-")[0]),
        "accumulation": config["accumulation"],
        "slots_per_row": most,
        "slots_per_token": slots_per_token(measured, most),
    }


def slots_per_token(measured: Measured, most: int) -> float:
    """Slots a token with which samples draft as many slots as measured: min(most, slots_per_token x length); 0 where all draft ``most``."""
    rows, slots = measured.rows.astype(np.float64), float(measured.slots.sum())
    if slots >= 0.999 * most * rows.sum():
        return 0.0
    length = measured.tokens / rows
    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (rows * np.minimum(most, middle * length)).sum() < slots else (low, middle)
    return high


def fit_run(run: Run) -> CostModel:
    """The cost model of a run folder's log, whatever state it is in. Raises CostError without what it belongs to."""
    belongs_to = _identity_of(run)
    measured = measured_batches(run)
    return fit_cost(measured, **about(run.config, belongs_to, measured, f"{len(measured)} batches of run {run.folder.name}"))


def _identity_of(run: Run) -> dict[str, str]:
    """Raises CostError that names the file of the run folder in which something is missing."""
    missing = "config.json" if not run.config else "environment.json" if not run.environment else ""
    if missing:
        raise CostError(f"{run.folder} has no {missing} that says what was trained; copy the whole run folder, or name another run")
    for name, content, shape in (("config.json", run.config, SETTINGS), ("environment.json", run.environment, ENVIRONMENT)):
        if problem := fault(content, shape):
            raise CostError(
                f"{run.folder / name} {problem}, so what was measured is not known; copy the whole run folder, or name another run"
            )
    return identity(run.config, run.environment, run.environment["target"])


def find_cost(place: str | Path) -> CostModel:
    """The model of a ``cost.json`` or of a run folder (its ``cost.json``, or a fit of its log); the assumed one for an empty ``place``."""
    if not str(place):
        return CostModel()
    path = Path(place)
    if exists(path) and path.is_file():
        return CostModel.load(path)
    if exists(path / COST_FILE):
        return CostModel.load(path / COST_FILE)
    try:
        return fit_run(read_run(path))
    except RunError as error:
        raise CostError(f"cost: {path} is neither a cost.json nor a run folder ({error})") from error


def run_speed(run: Run, cost: CostModel | None = None, warm_up: int = WARM_UP_STEPS) -> dict[str, Any]:
    """What a run reached after its first steps: name, strategy, real tokens_per_second over the steps' own seconds, and its noise.

    noise: standard error of the speed from ten parts of the run. Raises CostError if ``cost`` was measured on another target or drafter.
    """
    if len(run) < warm_up + 2 * SPEED_PARTS:
        raise CostError(f"{run.folder} has {len(run)} steps; a speed needs at least {warm_up + 2 * SPEED_PARTS}")
    belongs_to = _identity_of(run)
    if cost is not None:
        cost.require(target=belongs_to["target"], drafter=belongs_to["drafter"])
    tokens, seconds = run.steps["tokens"][warm_up:].astype(float), run.steps["seconds_step"][warm_up:]
    parts = [part.sum() for part in np.array_split(tokens, SPEED_PARTS)], [part.sum() for part in np.array_split(seconds, SPEED_PARTS)]
    speeds = np.divide(*parts)
    return {
        "run": run.folder.name,
        "strategy": run.config["strategy"],
        "tokens_per_second": float(tokens.sum() / seconds.sum()),
        "noise": float(speeds.std(ddof=1) / np.sqrt(SPEED_PARTS)),
    }


def run_speeds(folders: Iterable[str | Path], cost: CostModel) -> list[dict[str, Any]]:
    """``run_speed`` of each run folder; all must be of the target and drafter that ``cost`` was measured on."""
    return [run_speed(read_run(folder), cost) for folder in folders]


def report(cost: CostModel, measured: Measured) -> str:
    """What was found, as plain lines: errors on held-out shapes, and where the time goes."""
    lines = [cost.source, *(f"  {name}: {value}" for name, value in cost.belongs_to.items())]
    for stage, error in cost.errors.items():
        lines.append(
            f"{stage:>9}: {error['share']:6.1%} of the measured seconds; on held-out shapes the median error is {error['median']:.1%}, "
            f"the 90th percentile {error['p90']:.1%}, the sum {error['total']:+.1%}"
        )
    lines += [
        f"{row['stage']:>9}  {row['term']:<22} {row['coefficient']:.3e} s  {row['share']:6.1%}" for row in largest_terms(cost, measured)
    ]
    return "\n".join([*lines, f"optimiser step: {cost.step:.4f} s; drafted slots: {cost.slots_per_row} a sample at most"])


def writable(out: Path) -> Path:
    """``out``, if a file can be written there. Raises CostError before anything is measured for it."""
    folder, parent = exists(out) and out.is_dir(), out.absolute().parent
    if folder or not (exists(parent) and parent.is_dir()):
        raise CostError(f"--out: {out} is {'a folder' if folder else 'in no folder'}; give the path of a file in a folder that exists")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, help="where to write the model, by default cost.json in the run folder")
    options = parser.parse_args(arguments)
    try:
        run = read_run(options.run_dir)
        out = writable(options.out or run.folder / COST_FILE)
        cost = fit_run(run)
        print(report(cost, measured_batches(run)), flush=True)
        cost.save(out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("written:", out)


if __name__ == "__main__":
    main()
