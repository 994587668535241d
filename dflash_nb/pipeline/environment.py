"""What a run ran on: versions, commit and machine, read without importing any heavy package (about 10 ms, most of it git)."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflash_nb import home

PACKAGES = ("dflash-nb", "torch", "transformers", "numpy", "pyarrow", "safetensors", "flash-linear-attention", "ray", "papermill")


def versions() -> dict[str, str]:
    """Python and the installed ones of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, Any]:
    """``{"commit": hash, "dirty": bool}`` of the checkout that runs; both None outside a checkout or without git."""
    root = home.project_root()
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _git(root: os.PathLike[str], *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def describe_environment() -> dict[str, Any]:
    """The content of a run folder's ``environment.json`` that needs no device: versions, commit, machine, process."""
    return {
        "versions": versions(),
        **git_commit(),
        "platform": platform.platform(),
        "cpu_cores": usable_cores(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("OMP_", "MKL_", "PYTORCH_", "CUDA_"))},
        "pid": os.getpid(),
    }


def usable_cores() -> int:
    """Cores that this process may run on, fewer than the machine has inside a container or under ``taskset``."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
