"""Can this machine run it: compiler, kernels, allocator, tracker, disk, memory.

Triton compiles C at run time, so a missing compiler or Python header ends a GPU run at its first step ("Failed to find C compiler");
a CPU needs neither. Compiling six lines takes 0.1 s and proves more than finding a file. A tracker is never a STOP: a run goes on
without it.
"""

import importlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_nb.analysis.doctor.check import Finding, check, look, ok, stop
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.pipeline.memory import MemoryPlan, resident_bytes
from dflash_nb.pipeline.trackers import WANDB_SETTINGS

NOT_NEEDED = "not needed on the CPU"
CHECKPOINT_BYTES = 12  # float32 weight and two moments of each parameter
NEEDED_NAMES = {"wandb": ("init", "teardown"), "trackio": ("init", "log", "finish"), "tensorboard.summary": ("Writer",)}


def find_compiler() -> str | None:
    """The C compiler that Triton would take: ``CC``, else gcc, else clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@check("compiler")
def compiler(on_gpu: bool, command: str | None) -> Finding:
    """Does ``command`` compile C? Triton and torch.compile need it on a GPU."""
    if not on_gpu:
        return ok(NOT_NEEDED)
    advice = "install gcc (apt-get install gcc), or set CC to a C compiler"
    if not command:
        return stop("0 C compilers found (CC, gcc, clang)", advice)
    problem = _compile(command, "int main(void) { return 0; }\n")
    return stop(f"{command} cannot compile 1 line of C: {problem}", advice) if problem else ok(f"{command} compiles")


@check("python headers")
def headers(on_gpu: bool, command: str | None, include: str | Path | None = None) -> Finding:
    """Does a C file that includes Python.h from ``include`` (this Python's own) compile?"""
    if not on_gpu:
        return ok(NOT_NEEDED)
    include = Path(include or sysconfig.get_path("include"))
    advice = "install Python's headers (apt-get install python3-dev, or a conda Python)"
    if not (include / "Python.h").is_file():
        return stop(f"0 files named Python.h in {include}", advice)
    problem = _compile(command, "#include <Python.h>\nint main(void) { return 0; }\n", f"-I{include}") if command else "no compiler"
    return stop(f"Python.h in {include} does not compile: {problem}", advice) if problem else ok(f"{include / 'Python.h'} compiles")


def _compile(command: str, source: str, *options: str) -> str | None:
    """None if it compiles, else the first line of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.c"
        file.write_text(source)
        arguments = [*command.split(), *options, "-c", str(file), "-o", str(file.with_suffix(".o"))]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error).splitlines()[0]
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]


@check("triton")
def triton(on_gpu: bool, installed: str | None) -> Finding:
    """Is Triton there for FlexAttention? Whether it works is shown by the parity check, which runs it on a GPU."""
    if not on_gpu:
        return ok(NOT_NEEDED)
    if installed is None:
        return look("0 versions installed, so attention runs group by group", "pip install triton, the version that your PyTorch names")
    return ok(f"version {installed}")


@check("fla")
def fla(on_gpu: bool, recurrent_layers: int, installed: str | None) -> Finding:
    """Does a hybrid target on a GPU have its kernels?"""
    if not on_gpu:
        return ok(NOT_NEEDED)
    if recurrent_layers == 0:
        return ok("not needed, 0 recurrent layers in the target")
    if installed is None:
        return look(
            f"{recurrent_layers} recurrent layers would run without their kernels, many times slower", "pip install 'dflash-nb[gpu]'"
        )
    return ok(f"version {installed} for {recurrent_layers} recurrent layers")


def package_version(name: str, module: str | None = None) -> str | None:
    """Version of an installed package that can be found as a module, else None."""
    try:
        return version(name) if find_spec(module or name) else None
    except PackageNotFoundError:
        return None


@check("allocator")
def allocator(on_gpu: bool, variables: Mapping[str, str]) -> Finding:
    """Is PyTorch's GPU allocator set for batches of many shapes?"""
    if not on_gpu:
        return ok(NOT_NEEDED)
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    value = next((variables[name] for name in names if name in variables), None)
    if value is not None and "expandable_segments:true" in value.lower().replace(" ", ""):
        return ok(f"expandable_segments:True, 1 of {len(names)} variables set")
    return look(
        f"{names[0]} is {'not set' if value is None else repr(value)}; batches of many shapes fragment GPU memory",
        f"set {names[0]}=expandable_segments:True before Python starts",
    )


@check("tracker")
def tracker(name: str, load: Callable[[str], Any] = importlib.import_module) -> Finding:
    """Can the tracker be imported, has it what is called, and does it know the settings it will be given?"""
    if name == "none":
        return ok("0 trackers asked for")
    module = "tensorboard.summary" if name == "tensorboard" else name
    on = "the run goes on without it"
    try:
        loaded = load(module)
    except ModuleNotFoundError as error:
        return look(f"{name} is asked for, but {error.name} is not installed; {on}", "pip install 'dflash-nb[trackers]', or tracker none")
    except Exception as error:
        return look(f"{name} fails on import ({type(error).__name__}: {error}); {on}", f"reinstall {name}, or tracker none")
    found = getattr(loaded, "__version__", None) or package_version(name) or "without a version"
    missing = [each for each in NEEDED_NAMES[module] if not callable(getattr(loaded, each, None))]
    if missing:
        return look(f"{name} {found} has no {', '.join(missing)}; {on}", f"upgrade {name}, or tracker none")
    if name == "wandb":
        try:
            loaded.Settings(**WANDB_SETTINGS)
        except Exception as error:
            reason = (str(error).splitlines() or ["no reason"])[0]
            return look(f"wandb {found} refuses {len(WANDB_SETTINGS)} settings ({reason}), so it starts without them", "upgrade wandb")
    return ok(f"{name} {found}")


@check("disk")
def disk(folder: Path, needed: float, free: float | None = None) -> Finding:
    """Is there room for ``needed`` bytes where ``folder`` will be? ``free`` bytes are asked of the system unless given."""
    place = existing(folder)
    advice = "choose another runs_dir, free space, or keep fewer checkpoints (keep_checkpoints)"
    if not place.is_dir() or not os.access(place, os.W_OK):
        return stop(f"{place} is not a folder that can be written to, 0 bytes of room for the run", advice)
    free = shutil.disk_usage(place).free if free is None else free
    evidence = f"{free / 1e9:,.1f} GB free at {place}, checkpoints and export need {needed / 1e9:,.2f} GB"
    if free < needed:
        return stop(evidence, advice)
    if free < 1.5 * needed:
        return look(f"{evidence}, less than 1.5 times that", advice)
    return ok(evidence)


def existing(folder: Path) -> Path:
    """``folder`` or the nearest parent that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def run_bytes(drafter: DFlashDrafter, keep_checkpoints: int) -> float:
    """Bytes of a run folder at its fullest: the checkpoints kept, the one being written, and the export."""
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    return parameters * (CHECKPOINT_BYTES * (keep_checkpoints + 1) + 4)


@check("memory")
def memory(plan: MemoryPlan, capacity: Mapping[str, float]) -> Finding:
    """Does what the largest batch needs fit on every device? ``capacity`` is in bytes; a device that it leaves out is not judged."""
    parts, worst = [], 0.0
    for device in plan.devices:
        needed, room = plan.total(device), capacity.get(device)
        parts.append(f"{device} needs {needed / 1e9:,.2f} GB of {'an unknown size' if room is None else f'{room / 1e9:,.1f}'}")
        worst = max(worst, 0.0 if room is None else needed / room)
    advice = "lower token_budget, anchors or q_hs_mb (pipeline.memory.predict_job says what takes how much)"
    if worst > 1:
        return stop("; ".join(parts), advice)
    if worst > 0.9:
        return look(f"{'; '.join(parts)}: {worst:.0%} is predicted", advice)
    return ok("; ".join(parts))


def free_memory(devices: Iterable[str]) -> dict[str, float]:
    """Bytes that this process can have on each device, what it holds already included. Devices that do not say are left out."""
    found = {}
    for device in devices:
        if device.startswith("cuda"):
            found[device] = float(torch.cuda.mem_get_info(device)[0])
        elif (room := _free_on_the_machine()) is not None:
            found[device] = room + resident_bytes()
    return found


def _free_on_the_machine() -> float | None:
    """What Linux calls available, or what the container's limit leaves, whichever is less."""
    rooms = []
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        rooms += [1024.0 * int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdecimal():
        rooms.append(float(limit) - float((group / "memory.current").read_text()))
    return min(rooms, default=None)
