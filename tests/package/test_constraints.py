import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_is_pinned_to_a_version_that_it_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for group in groups for line in group]
    pinned: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pinned.setdefault(canonicalize_name(pin.name), []).append(pin)
    for requirement in wanted:
        if requirement.name == "vlp":
            continue
        pins = pinned.get(canonicalize_name(requirement.name), [])
        assert pins, f"{requirement.name} is not in constraints.txt: run `make lock`"
        for pin in pins:
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            assert requirement.specifier.contains(specifier.version, prereleases=True), requirement
