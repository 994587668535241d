"""The environment file, the constraints and the package's own list of dependencies say the same."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.lower().split("==") for line in lines if line)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_environment_is_python_pip_and_the_package():
    text = (ROOT / "environment.yml").read_text()
    entries = re.findall(r"^\s+- (?!conda-forge)(.+?):?$", text, re.M)
    assert entries == [f"python{PROJECT['requires-python']}", "pip", "pip", "-e .[gpu,dev]"]
    assert {"gpu", "dev"} <= set(EXTRAS)
    assert any(Requirement(r).name == "flash-linear-attention" for r in EXTRAS["gpu"])


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *EXTRAS["dev"]])
def test_every_requirement_has_an_exact_pin_inside_its_range(requirement):
    wanted = Requirement(requirement)
    version = {canonical(k): v for k, v in pins().items()}[canonical(wanted.name)]
    assert wanted.specifier.contains(version)


def test_torch_is_a_range_for_users_and_one_version_here():
    torch = next(Requirement(r) for r in PROJECT["dependencies"] if r.startswith("torch"))
    assert str(torch.specifier).startswith(">=")
    assert pins()["torch"] == "2.13.0"


def test_extras_of_the_architecture_exist():
    assert {"ray", "gpu", "trackers", "smollm2", "dev"} <= set(EXTRAS)


def test_the_oldest_versions_are_the_lower_bounds():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = {Requirement(each).name: next(iter(Requirement(each).specifier)) for each in PROJECT["dependencies"]}
    assert set(oldest) == set(bounds)
    for name, bound in bounds.items():
        assert bound.operator == ">=" and Version(bound.version) == Version(oldest[name]), name
