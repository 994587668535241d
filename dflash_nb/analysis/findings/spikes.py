"""Single batches far above the baseline of their own lengths, and what they have in common.

What counts as far is learned from the log itself, so that heavy tails and many batches raise no alarm: a spike lies at least six robust
standard deviations above its baseline, and beyond what the tails of the ordinary batches reach in one of fifty logs of this length.
A rule on the raw curve would name the bucket with the highest level instead.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from dflash_nb.analysis.findings.finding import Finding, Log, Severity, listed, plural
from dflash_nb.analysis.running import median_of

LEAST_Z = 6.0
TAIL = (0.80, 0.92)  # quantiles of the ordinary batches from which their tail is continued as an exponential
MOST_DEPTHS = 2.5
LONE = 2.0  # times the limit below which a single spike that is over at once is a note
CHANCE = 0.02  # of an ordinary log having anything beyond


@dataclass(frozen=True, eq=False)
class Spikes:
    """The spikes of a log: their batches (rows of ``run.batches``), one a row below, in order; ``limit`` in robust standard deviations."""

    batch_S: np.ndarray
    step_S: np.ndarray
    limit: float

    def __len__(self) -> int:
        return len(self.batch_S)


def find_spikes(log: Log) -> Spikes:
    """The batches whose residual is beyond ``limit``; of neighbours in one excursion all."""
    parts = log.parts
    z = parts.z_M
    known = np.isfinite(z)
    limit = _limit(z[known])
    batches = np.flatnonzero(known & (np.nan_to_num(z) > limit))
    return Spikes(batches, log.step_N[log.run.batches["at"][batches]], limit)


def _limit(z: np.ndarray) -> float:
    """How far above zero is out of the ordinary for this many residuals.

    The tail above is continued from quantiles that spikes hardly reach; the tail below, where no spike is, by a power law with Hill's
    exponent (Hill 1975), at most to two and a half times the deepest value there is.
    """
    below, above = np.sort(-z[z < 0])[::-1], z[z > 0]
    if len(below) < 10 or len(above) < 10:
        return np.inf
    low, high = np.quantile(above, TAIL)
    pace = (high - low) / np.log((1 - TAIL[0]) / (1 - TAIL[1]))
    reach_above = low + pace * np.log((1 - TAIL[0]) * len(above) / CHANCE)
    count = int(np.clip(len(below) // 20, 5, 200))
    spread = float(np.mean(np.log(below[:count] / below[count])))
    reach_below = below[count] * (count / CHANCE) ** spread
    return float(max(LEAST_Z, reach_above, min(reach_below, MOST_DEPTHS * below[0])))


def spikes(log: Log) -> Finding | None:
    """Spikes above the baseline, with their steps, bucket, samples, and what they share."""
    found = find_spikes(log)
    if not len(found):
        return None
    parts, batches = log.parts, log.run.batches
    shared = common_samples(log, found)
    rates = spike_rates(log, found)
    standing_out = [row for row in rates if row["stands out"]]
    near = near_what(log, found)
    worst = int(np.argmax(parts.z_M[found.batch_S]))
    evidence = [
        f"highest at step {found.step_S[worst]:,}: {parts.residual_M[found.batch_S[worst]]:+.2f} above the baseline of lengths "
        f"{parts.groups[parts.group_M[found.batch_S[worst]]]}, {parts.z_M[found.batch_S[worst]]:.0f} standard deviations "
        f"(ordinary batches of this log reach {found.limit:.0f} at most)"
    ]
    if shared:
        evidence.append(f"sample {listed([str(row['sample']) for row in shared])} is in {shared[0]['spikes']} of {len(found)} spikes")
    if standing_out:
        row = standing_out[0]
        evidence.append(
            f"{row['spikes']} of {len(found)} are in lengths {row['lengths']}, which has {row['share of batches']:.0%} of the batches"
        )
    elif len(parts.groups) > 1:
        evidence.append(f"no range of lengths stands out (n = {len(found)})")
    evidence += near
    text = f"{plural(len(found), 'spike')} above the baseline, {Finding.where(_at(found.step_S))}"
    if shared:
        share = "all" if shared[0]["spikes"] == len(found) else str(shared[0]["spikes"])
        text += f"; sample {listed([str(row['sample']) for row in shared])} is in {share}"
    elif standing_out:
        text += f", mostly in lengths {standing_out[0]['lengths']}"
    ids = shared[0]["sample"] if shared else (int(log.run.sample_ids(found.batch_S[worst])[0]) if len(log.run.ids) else None)
    advice = f"Look at sample {ids} in the dataset" if shared else "Look at the samples in the spike table"
    lone = len(found) == 1 and parts.z_M[found.batch_S[0]] < LONE * found.limit and _recovers(log, found)
    return Finding(
        "spikes",
        Severity.NOTE if lone else Severity.LOOK,
        text,
        tuple(evidence),
        float(1 - CHANCE),
        np.unique(found.step_S),
        f"{advice}; the run itself recovers" if _recovers(log, found) else f"{advice}; lower learning_rate if they come again",
        {"spikes": found, "shared": shared, "rates": rates, "batches": batches["index"][found.batch_S]},
    )


def common_samples(log: Log, found: Spikes) -> list[dict]:
    """Samples in more spikes than chance allows: a row each with the sample, its spikes, and all its batches.

    A sample that ran in k of M batches, S of them spikes, is in j spikes by chance with hypergeometric probability; samples are many, so
    it is multiplied by their number.
    """
    if not len(log.run.ids) or len(found) < 2:
        return []
    in_spikes = [np.unique(log.run.sample_ids(batch)) for batch in found.batch_S]
    samples, spikes_of = np.unique(np.concatenate(in_spikes), return_counts=True)
    several = spikes_of > 1
    if not several.any():
        return []
    order = np.argsort(-spikes_of[several], kind="stable")[:50]
    rows, batches = [], len(log.run.batches["at"])
    candidates = len(np.unique(log.run.ids)) if len(log.run.ids) < 5_000_000 else len(log.run.ids)
    for sample, count in zip(samples[several][order], spikes_of[several][order], strict=True):
        ran = int((log.run.ids == sample).sum())
        chance = float(stats.hypergeom.sf(count - 1, batches, min(ran, batches), len(found))) * candidates
        if chance < CHANCE and count > 0.5 * ran:
            rows.append({"sample": int(sample), "spikes": int(count), "batches": ran, "chance": chance})
    return sorted(rows, key=lambda row: (-row["spikes"], row["batches"], row["sample"]))


def spike_rates(log: Log, found: Spikes) -> list[dict]:
    """A row a group of lengths: its spikes and batches, the exact 95 % interval (Clopper-Pearson) of its rate, and whether it stands out.

    The interval is that of the group's share of all spikes, given their number, times that number over the group's batches: it is narrower
    than the interval of a rate alone when spikes are few. It is widened for the number of groups (Bonferroni). A group stands out when its
    interval excludes the overall rate.
    """
    parts = log.parts
    groups = len(parts.groups)
    batches = np.bincount(parts.group_M[np.isfinite(parts.residual_M)], minlength=groups)
    spikes_G = np.bincount(parts.group_M[found.batch_S], minlength=groups)
    total = len(found)
    overall = total / max(1, batches.sum())
    alpha, rows = 0.05 / groups, []
    for g, name in enumerate(parts.groups):
        k, n = int(spikes_G[g]), int(batches[g])
        share = (
            float(stats.beta.ppf(alpha / 2, k, total - k + 1)) if k else 0.0,
            float(stats.beta.ppf(1 - alpha / 2, k + 1, total - k)) if k < total else 1.0,
        )
        low, high = (min(1.0, part * max(1, total) / max(1, n)) for part in share)
        rows.append(
            {
                "lengths": name,
                "batches": n,
                "spikes": k,
                "share of batches": n / max(1, int(batches.sum())),
                "share of spikes": k / max(1, len(found)),
                "rate": k / max(1, n),
                "low": low,
                "high": high,
                "stands out": groups > 1 and k > 0 and low > overall,
            }
        )
    return sorted(rows, key=lambda row: -row["rate"]) if len(found) else rows


def near_what(log: Log, found: Spikes) -> list[str]:
    """Sentences on what the spikes lie next to, where more than half of at least two do."""
    steps = found.step_S
    texts = []
    for kinds, words in ((("resume",), "a resume"), (("checkpoint",), "a checkpoint"), (("epoch",), "the border of an epoch")):
        marks = np.array([event["step"] for event in log.run.events_of(*kinds)])
        if len(marks) and len(steps) > 1:
            after = (steps[:, None] - marks[None, :] >= 0) & (steps[:, None] - marks[None, :] <= 3)
            share = float(after.any(axis=1).mean())
            expected = min(1.0, 3 * len(marks) / max(1, len(log)))
            if share > 0.5 and share > 3 * expected:
                texts.append(f"{share:.0%} of them come within three steps after {words}")
    return texts


def spike_table(log: Log, most: int = 12) -> list[dict]:
    """A row a spike, the highest first, with everything that helps to find its cause. Empty without a spike."""
    if not len(log):
        return []
    parts, run, found = log.parts, log.run, find_spikes(log)
    rows = []
    events = {kind: {event["step"] for event in run.events_of(kind)} for kind in ("resume", "epoch")}
    for batch in found.batch_S[np.argsort(-parts.z_M[found.batch_S], kind="stable")][:most]:
        at = int(run.batches["at"][batch])
        step = int(log.step_N[at])
        notes = ["after a resume"] if any(step - 3 <= mark < step for mark in events["resume"]) else []
        notes += ["first of an epoch"] if any(step - 1 == mark for mark in events["epoch"]) else []
        notes += ["short batch"] if is_short(log)[batch] else []
        rows.append(
            {
                "step": step,
                "lengths": parts.groups[parts.group_M[batch]],
                "loss": float(parts.loss_M[batch]),
                "above": float(parts.residual_M[batch]),
                "z": float(parts.z_M[batch]),
                "grad norm": float(run.steps["grad_norm"][at]),
                "supervised": float(run.batches["supervised"][batch]),
                "tokens": float(run.batches["tokens"][batch]),
                "samples": listed([str(i) for i in run.sample_ids(batch)], 5) if len(run.ids) else "",
                "before": parts.groups[parts.group_M[batch - 1]] if batch else "",
                "notes": ", ".join(notes),
            }
        )
    return rows


def is_short(log: Log) -> np.ndarray:
    """Batches with less than half of the median tokens of their group, bool[M]: the last of a bucket, or what was left."""
    tokens, short = np.asarray(log.run.batches["tokens"], float), np.zeros(len(log.parts.group_M), bool)
    for g in range(len(log.parts.groups)):
        mine = log.parts.group_M == g
        short[mine] = tokens[mine] < 0.5 * median_of(tokens[mine])
    return short


def _recovers(log: Log, found: Spikes) -> bool:
    """Whether ten batches after its last spike the loss is back at its baseline."""
    after = log.parts.z_M[found.batch_S[-1] + 1 :][:10]
    return len(after) == 0 or not median_of(after) > 2


def _at(steps: np.ndarray) -> Finding:
    return Finding("", Severity.NOTE, "", (), 1.0, np.unique(steps), "")
