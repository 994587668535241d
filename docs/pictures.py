"""Draw the two pictures of the README again: ``make pictures``, or ``python docs/pictures.py --run runs/<name>``.

The front comes from the 902,087 reference lengths with seed 0 (half a minute of CPU), the verdict from a run folder; without ``--run``
from the newest one. Commit them when a plot has changed.
"""

import argparse
from pathlib import Path

from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.plots import diagnosis, padding
from dflash_nb.data.lengths import read_histogram, read_lengths
from dflash_nb.home import user_path
from dflash_nb.pipeline.config import DiagnoseConfig
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.simulate import simulate

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docs/front.png and docs/verdict.png.")
    parser.add_argument("--run", default="", help="run folder that the verdict is about (default: the newest)")
    parser.add_argument("--out", default=str(HERE), help="folder for the pictures")
    options = parser.parse_args()
    out = user_path(options.out)
    cuts = optimize_buckets(read_histogram("reference")).boundaries
    rows = simulate(read_lengths("reference"), seeds=(0,), boundaries=cuts)
    result = diagnose(DiagnoseConfig(run_dir=options.run).run)
    for name, plot in (("front", padding.front(rows, "reference")), ("verdict", diagnosis.curve(result))):
        (out / f"{name}.png").write_bytes(plot.png)
        print(f"{out / name}.png: {plot.finding}")


if __name__ == "__main__":
    main()
