"""What is learned: the frozen target, the drafter, its objective, decoding and export."""

import warnings

with warnings.catch_warnings():
    # In a kernel without ipywidgets tqdm warns on import, with a local path, and the saved notebook keeps it. Nothing of ours draws a bar.
    warnings.simplefilter("ignore")
    import tqdm.auto  # noqa: F401
