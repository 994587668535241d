"""Try other cuts by hand: sliders for the number of buckets, the token budget and the length multiple, in JupyterLab.

Decided: the picture and the table are ordinary outputs that are replaced in place, only the sliders are widgets. So a saved notebook keeps
what was last looked at, and a headless run, where nobody can move a slider, gets the plan's numbers and no widget. A move costs
0.4 s of CPU on the 902,087 reference lengths: 0.25 s for the best cuts, 0.15 s for the picture.
"""

from typing import Any

import pandas as pd

from dflash_nb.analysis.plots import buckets as plots
from dflash_nb.analysis.plots import style
from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.buckets import optimize_buckets

MULTIPLES = (1, 8, 16, 32, 64, 128, 256)
BUDGET_FACTORS = (0.25, 0.5, 0.75, 1, 1.5, 2, 4)
MOST_BUCKETS = 128


def explore(histogram: LengthHistogram, plan: BucketPlan, dataset: str) -> None:
    """Three sliders that make ``plan`` anew, over its picture and its numbers; where nobody watches its numbers alone.

    The sliders start at the plan's own number of buckets, budget and multiple; ``max_batch`` stays. A budget below the longest sample is
    not offered.
    """
    from IPython.display import Image, display

    if not somebody_watches():
        print("In JupyterLab this cell has sliders for the number of buckets, the token budget and the multiple. The plan as it is:")
        display(summary(plan))
        return
    controls = sliders(histogram, plan)
    display(*controls.values())
    handles: list[Any] = []

    def move(_: Any = None) -> None:
        chosen = replanned(histogram, plan, **{name: control.value for name, control in controls.items()})
        picture = plots.bands(histogram, chosen, dataset)
        image = Image(data=picture.png, format="png", alt=picture.finding)
        metadata = {"image/png": {"alt": picture.finding}}
        if handles:
            handles[0].update(image, metadata=metadata)
            handles[1].update(summary(chosen))
        else:
            handles.extend([display(image, metadata=metadata, display_id=True), display(summary(chosen), display_id=True)])

    for control in controls.values():
        control.observe(move, names="value")
    move()


def somebody_watches() -> bool:
    """Whether a person is in front of the kernel: JupyterLab and VS Code allow it to ask for input, papermill and nbconvert do not."""
    from IPython.core.getipython import get_ipython

    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


def sliders(histogram: LengthHistogram, plan: BucketPlan) -> dict[str, Any]:
    """The controls by the parameter of ``replanned`` that they set. They act when let go, not on the way."""
    import ipywidgets

    longest = int(histogram.lengths[-1])
    multiples = sorted({*MULTIPLES, plan.pad_multiple})
    multiples = [multiple for multiple in multiples if -(-longest // multiple) * multiple <= plan.token_budget]
    padded = max(-(-longest // multiple) * multiple for multiple in multiples)
    budgets = [budget for factor in BUDGET_FACTORS if (budget := int(plan.token_budget * factor)) >= padded]
    look = {"continuous_update": False, "style": {"description_width": "8rem"}, "layout": {"width": "32rem"}}
    return {
        "count": ipywidgets.IntSlider(len(plan.rows), 1, max(MOST_BUCKETS, len(plan.rows)), description="buckets", **look),
        "token_budget": ipywidgets.SelectionSlider(options=budgets, value=plan.token_budget, description="token budget", **look),
        "pad_multiple": ipywidgets.SelectionSlider(options=multiples, value=plan.pad_multiple, description="pad multiple", **look),
    }


def replanned(histogram: LengthHistogram, plan: BucketPlan, count: int, token_budget: int, pad_multiple: int) -> BucketPlan:
    """The best ``count`` cuts under these limits; ``plan`` itself when they are its own, whatever rule its cuts came from."""
    if (count, token_budget, pad_multiple) == (len(plan.rows), plan.token_budget, plan.pad_multiple):
        return plan
    return optimize_buckets(histogram, count, token_budget, plan.max_batch, pad_multiple, model=plan.model)


def summary(plan: BucketPlan) -> pd.DataFrame:
    """One row: what the plan was made under and what it is expected to give."""
    smallest = min(row.batches for row in plan.rows)
    values = {
        "buckets": len(plan.rows),
        "token_budget": plan.token_budget,
        "pad_multiple": plan.pad_multiple,
        "padding": style.percent(1 - plan.efficiency, 2),
        "fill": style.percent(plan.fill),
        "batches": plan.batches,
        "batches of the smallest bucket": round(smallest, 1),
        "mates again": style.percent(plan.mates_again, 2),
    }
    return style.table([values], digits=1)
