"""Simulates clusters of 8 to 512 GPUs: which topology N-M, what limits it, what an epoch costs. Nothing here is measured on such a cluster.

    python benchmarks/scale.py                              the reference run's rates and lengths, a minute and a half
    python benchmarks/scale.py --cost runs/<name>/cost.json --between 3.1e9
    python benchmarks/scale.py --picture scale.png --out scale.json

Every epoch is the planner's own (auto buckets) and runs batch by batch through ``planner.timeline``; the topology is the fastest of those
that use all GPUs. Variants: the engine as it is built; with 16 more places for collated and for finished batches for each drafter; and
with at least four batches of each drafter in a step as well, so that gradients are summed a quarter as often. Assumptions are printed
first, then what of the reference run they explain.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from table import show

from dflash_nb.data.lengths import LengthHistogram, read_lengths
from dflash_nb.planner.batches import BatchPlan, plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES, optimize_buckets
from dflash_nb.planner.cost import TERMS, CostModel
from dflash_nb.planner.scale import Cluster, Scaled, Work, best_topology, run_epoch

TARGET_RATE, DRAFTER_RATE = 5_300, 31_000
ROW_SECONDS, HAND_SECONDS = 2.1e-5, 2.5e-3  # benchmarks/pipeline.py and ray_transport.py on two busy cores
SLOW_ROW_SECONDS = 3.4e-3
WATCH_SECONDS = 1.6e-3
PUBLISHED = {"sorted": 32_000, "bucketed, its six cuts": 25_100, "random": 12_000}
GPUS = (8, 16, 32, 64, 128, 256, 512)
VARIANTS: dict[str, dict[str, Any]] = {
    "as built": {},
    "more room": {"room_each": 16},
    "more room, 4 batches each": {"room_each": 16, "least_each": 4},
}
LINKS = (1.25e9, 3.1e9, 12.5e9, 50e9)
ENTRANCES = (0.6e9, 2.5e9, 25e9)


def reference_rates() -> CostModel:
    """The reference run's two rates as a cost model."""

    def only(stage: str, **seconds: float) -> tuple[float, ...]:
        return tuple(seconds.get(term.replace(" ", "_"), 0.0) for term in TERMS[stage])

    return CostModel(
        fetch=only("fetch", constant=HAND_SECONDS, row=ROW_SECONDS),
        target=only("target", padded_token=1 / TARGET_RATE),
        transfer=only("transfer"),
        drafter=only("drafter", token=1 / DRAFTER_RATE),
        source="the reference run's rates",
    )


def assumptions(cost: CostModel, cluster: Cluster) -> list[str]:
    """A line for each thing that is assumed and not measured here."""
    rates = f"seconds by the cost model ({cost.source})"
    if cost == reference_rates():
        rates = f"a target does {TARGET_RATE:,} padded tokens/s, a drafter {DRAFTER_RATE:,} real ones, of any length (the reference run's)"
    return [
        rates,
        f"one thread reads and collates, {1000 * cost.fetch[1]:.3f} ms a sample, and hands out, {1000 * cost.fetch[0]:.1f} ms a batch",
        f"{cluster.feature_bytes:,.0f} bytes of features a token; {cluster.gradient_bytes / 1e9:.1f} GB of gradients, summed in a ring",
        f"{cluster.host_gpus} GPUs a host; GB/s: {cluster.between / 1e9:g} from a host and to it, {cluster.into / 1e9:g} into a drafter",
        "drafters spread evenly over hosts; batch i is for drafter i mod M, whichever worker computes it",
        "features move as soon as they are computed, while the engine's other drafters fetch theirs when they are given the batch",
        "stores hold what the window allows",
        f"an optimiser step takes {cost.step:g} s beside its batches and the sum of gradients",
        f"a step has at least {cluster.least_step} batches and one for each drafter, whatever that does to the loss curve",
        "no failures, evaluations, checkpoints or jitter",
    ]


def agreement(lengths: np.ndarray, cost: CostModel) -> list[dict[str, Any]]:
    """The reference run's own numbers against both sets of assumptions."""
    cuts = (*REFERENCE_BOUNDARIES[:-1], 8193)
    plans = {
        "sorted": plan_epoch(lengths, "sorted"),
        "bucketed, its six cuts": plan_epoch(lengths, "bucketed", cuts),
        "random": plan_epoch(lengths, "random"),
    }
    host, rows = Cluster(8), []
    for name, plan in plans.items():
        row: dict[str, Any] = {"strategy": name, "efficiency": round(plan.efficiency, 3), "published, 7-1": PUBLISHED[name]}
        for title, model in (("rates", cost), ("model", CostModel())):
            for workers in (6, 7):
                row[f"{title}, {workers}-1"] = round(run_epoch(model, plan, lengths, host, workers, 1).tokens_per_second)
        rows.append(row)
    return rows


def what_agrees(rows: list[dict[str, Any]]) -> list[str]:
    """Sentences on the published rates against the assumed ones."""
    said = []
    for row in rows:
        published = row["published, 7-1"]
        by_rates, by_model = (row[f"{title}, 7-1"] / published - 1 for title in ("rates", "model"))
        said.append(f"{row['strategy']}: the rates promise {by_rates:+.0%} against what was published, the model {by_model:+.0%}")
    first = rows[0]
    more = {title: first[f"{title}, 7-1"] / first[f"{title}, 6-1"] - 1 for title in ("rates", "model")}
    return [
        *said,
        f"7-1 against 6-1, sorted: {more['rates']:+.0%} by the rates, {more['model']:+.0%} by the model; published: 27 to 30 Ktok/s, -10%",
    ]


def row_of(variant: str, found: Scaled, base: float) -> dict[str, Any]:
    """base: tokens a second of one GPU in the smallest cluster."""
    return {
        "variant": variant,
        "gpus": found.cluster.gpus,
        "topology": f"{found.workers}-{found.drafters}",
        "limit": found.limit,
        "ktok/s": round(found.tokens_per_second / 1000, 1),
        "hours": round(found.seconds / 3600, 3),
        "gpu_hours": round(found.gpu_hours, 1),
        "efficiency": round(found.tokens_per_second / found.cluster.gpus / base, 3),
        "batches a step": found.accumulation,
        "steps": found.steps,
        **{side: round(share, 2) for side, share in found.shares.items()},
    }


def scaling(cost: CostModel, plan_of: Callable[[int], BatchPlan], lengths: np.ndarray, start: Cluster, gpus: list[int]) -> list[dict]:
    """A row for each size and variant. ``efficiency`` is relative to the smallest cluster as built."""
    rows, base = [], 0.0
    for variant, changed in VARIANTS.items():
        for count in gpus:
            found = best_topology(cost, plan_of, lengths, replace(start, gpus=count, **changed))
            base = base or found.tokens_per_second / count
            rows.append(row_of(variant, found, base))
    return rows


def networks(cost: CostModel, plan_of: Callable[[int], BatchPlan], lengths: np.ndarray, start: Cluster, gpus: list[int]) -> list[dict]:
    """Other bandwidths, drafters spread over all hosts and together on the first ones; the variant with more room."""
    rows = []
    start = replace(start, **VARIANTS["more room"])
    for count in gpus:
        links = [("between", value, together) for value in LINKS for together in (False, True)]
        for name, value, together in [*links, *(("into", value, False) for value in ENTRANCES)]:
            found = best_topology(cost, plan_of, lengths, replace(start, gpus=count, together=together, **{name: value}))
            rows.append(
                {
                    "gpus": count,
                    "what": "between hosts" if name == "between" else "into a drafter",
                    "GB/s": value / 1e9,
                    "drafters": "together" if together else "spread",
                    "topology": f"{found.workers}-{found.drafters}",
                    "limit": found.limit,
                    "ktok/s": round(found.tokens_per_second / 1000, 1),
                    "network": round(found.shares["network"], 2),
                }
            )
    return rows


def serial(cost: CostModel, plan: BatchPlan, lengths: np.ndarray, planning: float) -> list[dict[str, Any]]:
    """What one process does for all devices, and the real tokens a second at which that keeps one core busy."""
    tokens = int(plan.real_tokens.sum())
    work = Work.of(cost, plan, lengths)
    seconds = {
        "planning, measured": planning,
        "reading and handing out": work.fetch,
        "reading at the reference run's 3.4 ms a sample": SLOW_ROW_SECONDS * len(plan.sample_ids),
        "asking every worker five times a second whether it is done": WATCH_SECONDS * work.target,
    }
    return [
        {"what": what, "seconds an epoch": round(s, 2), "limit, ktok/s": round(tokens / s / 1000) if s else "none"}
        for what, s in seconds.items()
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    sizes = sorted({row["gpus"] for row in rows})
    for variant, marker, colour in zip(VARIANTS, "os^", ("#440154", "#21918c", "#c9a800"), strict=True):
        own = [row for row in rows if row["variant"] == variant]
        axes.plot([row["gpus"] for row in own], [100 * row["efficiency"] for row in own], marker=marker, color=colour, label=variant)
        for row in own:
            if row["gpus"] == sizes[-1]:
                axes.annotate(row["topology"], (row["gpus"], 100 * row["efficiency"]), (8, -3), textcoords="offset points", fontsize=8)
    axes.axhline(100, color="0.6", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="GPUs",
        ylabel=f"tokens/s of a GPU, % of that in {sizes[0]}",
        ylim=(0, 125),
        xlim=(sizes[0] * 0.9, sizes[-1] * 1.8),
    )
    axes.set_title("Simulated: what a GPU brings in larger clusters, best topology of each")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", help="a run's cost.json, or assumed (the package's own model), instead of the reference run's rates")
    parser.add_argument("--dataset", default="reference", help="lengths, as notebooks 00 to 02 take them")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--network-gpus", type=int, nargs="*", default=[64, 512], help="sizes for which other bandwidths are tried")
    for name in ("host_gpus", "between", "into", "within", "feature_bytes", "gradient_bytes"):
        kind = int if name == "host_gpus" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Cluster, name))
    parser.add_argument("--picture", type=Path, help="draw the scaling as PNG")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    cost = reference_rates()
    if options.cost:
        cost = CostModel() if options.cost == "assumed" else CostModel.load(Path(options.cost))
    names = ("host_gpus", "between", "into", "within", "feature_bytes", "gradient_bytes")
    try:
        start = Cluster(min(options.gpus), **{name: getattr(options, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    lengths = read_lengths(options.dataset)
    cuts = optimize_buckets(LengthHistogram.from_lengths(lengths)).boundaries
    plan_of = cache(lambda window: plan_epoch(lengths, "bucketed", cuts, window=window))
    began = time.process_time()
    plan = plan_of(8)
    planning = time.process_time() - began
    stated = assumptions(cost, start)
    print("Assumed:", *stated, sep="\n  ", end="\n\n")
    results: dict[str, Any] = {"assumed": stated, "cost": cost.to_json(), "cluster": asdict(start)}
    if options.dataset == "reference":
        results["agreement"] = agreement(lengths, reference_rates())
        title = "Real tokens a second: published, by its rates, and by the package's cost model, which was fitted to them"
        show(results["agreement"], title)
        print(*what_agrees(results["agreement"]), sep="\n", end="\n\n")
    results["serial"] = serial(cost, plan, lengths, planning)
    show(results["serial"], "One process for all")
    results["scaling"] = scaling(cost, plan_of, lengths, start, sorted(options.gpus))
    show(results["scaling"], f"An epoch of {len(plan.sample_ids):,} samples, {int(plan.real_tokens.sum()):,} tokens")
    if options.network_gpus:
        results["networks"] = networks(cost, plan_of, lengths, start, sorted(options.network_gpus))
        show(results["networks"], "Other bandwidths, with more room")
    if options.picture:
        draw(results["scaling"], options.picture)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
