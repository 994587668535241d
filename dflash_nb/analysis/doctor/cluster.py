"""Is the Ray cluster fit for the run: room, object stores, and the same software and the target's files on every node?

A cluster that is named is joined for the question, and left again: 3 s where a node has an idle worker process, more where it must start
one. One that the run would start for itself is not started.
"""

import os
from pathlib import Path
from typing import Any

from dflash_nb.analysis.doctor.check import Finding, check, look, ok, stop
from dflash_nb.pipeline.environment import usable_cores, versions
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.local import intra_op_threads

ANSWER_SECONDS = 60.0


@check("ray cluster")
def cluster(job: Job, token_bytes: int) -> Finding:
    """Can the cluster run ``job``, whose features take ``token_bytes`` a token? A cluster without room is a STOP."""
    import ray

    from dflash_nb.pipeline import ray as on_ray
    from dflash_nb.pipeline.cluster import check_memory

    threads = intra_op_threads(job.config.threads, job.config.workers[0])
    actors = sum(job.config.workers) - 1
    largest_bytes = max(plan["most_tokens"] for plan in job.plans) * token_bytes
    if not job.config.ray_address and not ray.is_initialized():
        check_memory(on_ray.store_of(job, largest_bytes))
        cores = usable_cores()
        evidence = f"one of this machine will be started: {actors} actors with {threads} CPU threads each, {cores} cores"
        return ok(evidence) if job.placement.drafter.type != "cpu" or actors * threads <= cores else look(evidence, "use fewer workers")
    leave = on_ray.join(job, threads, largest_bytes)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        store = min(node["Resources"].get("object_store_memory", 0) for node in nodes)
        return judge(ask(nodes, str(job.info.path)), versions(), f"{actors} actors, object stores of {store / 2**20:,.0f} MiB or more")
    finally:
        leave()


def ask(nodes: list[dict[str, Any]], folder: str) -> dict[str, dict[str, str] | str]:
    """What each node says of itself, by its name: its versions, whether ``folder`` is there, or in words why it says nothing."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_about_this_node)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[task.options(scheduling_strategy=there).remote(folder)] = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    answers: dict[str, dict[str, str] | str] = dict.fromkeys(asked.values(), f"no answer in {ANSWER_SECONDS:.0f} s")
    for reference in answered:
        try:
            answers[asked[reference]] = ray.get(reference)
        except Exception as error:
            answers[asked[reference]] = str(error).strip().splitlines()[-1]
    return answers


def judge(answers: dict[str, dict[str, str] | str], here: dict[str, str], room: str) -> Finding:
    """What follows from the nodes' answers; ``here`` are the versions of this process."""
    silent = [f"node {node}: {answer}" for node, answer in answers.items() if isinstance(answer, str)]
    if silent:
        return stop("; ".join(silent), "install this package on every node, in the same version, and see that Ray starts workers there")
    without = [node for node, answer in answers.items() if answer["target"] != "there"]
    if without:
        return stop(f"the target's folder is not on node {', '.join(without)}", "put it at the same path on every machine")
    others = {
        f"node {node} has {name} {answer.get(name, 'not installed')}, this process {theirs}"
        for node, answer in answers.items()
        for name, theirs in here.items()
        if answer.get(name) != theirs
    }
    if others:
        return look("; ".join(sorted(others)), "install the same versions everywhere: others may compute other losses")
    fit = f"{len(answers)} nodes with room for {room}, all with this process's {len(here)} versions and the target's files"
    guests = [node for node, answer in answers.items() if answer["niceness"] != "0"]
    if guests:
        fit += f"; other work on node {', '.join(guests)} goes before its workers, unless Ray is started there with RAY_worker_niceness=0"
    return ok(fit)


def _about_this_node(folder: str) -> dict[str, str]:
    return {**versions(), "target": "there" if Path(folder).is_dir() else "not there", "niceness": str(os.nice(0))}
