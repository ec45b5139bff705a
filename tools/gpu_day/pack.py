"""Wheels of what a machine without a network lacks, for tuner and for the other side, at the pinned versions."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
MORE = ("datasets>=4.0", "trl>=1.0", "accelerate>=1.10")
"""What the other side needs besides; `gigatoken` and the trackers are left out."""
TOGETHER = ("transformers", "huggingface-hub", "tokenizers", "peft")
"""Each refuses other versions of the others than its own: always those that the tests run with."""
NEVER = re.compile(r"torch$|triton$|nvidia-.*|cuda-.*|setuptools$")
"""Of the machine itself: what belongs to its CUDA, gigabytes of it."""
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Of the platforms that a wheel may name; pip takes each by its exact number."""


def pack(wheels: Path, there: Path | None, python: str) -> int:
    """Download what is not `there` into `wheels`, and say its size."""
    wheels.mkdir(parents=True, exist_ok=True)
    have = {} if there is None else installed(there.read_text(encoding="utf-8"))
    pins = installed((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, done = [Requirement(line) for line in (*project["dependencies"], *MORE)], set[str]()
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if name in done or NEVER.match(name) or not applies(requirement, python) or is_there(requirement, have, pins):
            continue
        done.add(name)
        wheel = download(wheels, pinned(requirement, pins), python)
        waiting += needs(wheel)
        print(f"{wheel.name}  {wheel.stat().st_size / 2**20:.1f} MiB", file=sys.stderr, flush=True)
    size = sum(path.stat().st_size for path in wheels.glob("*.whl"))
    print(f"{len(done)} wheels, {size / 2**20:.1f} MiB in {wheels}")
    return 0


def installed(text: str) -> dict[str, str | None]:
    """Names and versions of lines such as `name==1.0`, or of a name alone: any version."""
    found = {}
    for line in text.splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            found[canonicalize_name(name)] = version or None
    return found


def is_there(requirement: Requirement, have: dict[str, str | None], pins: dict[str, str | None]) -> bool:
    """Whether the machine has it, in a version that will do."""
    name = canonicalize_name(requirement.name)
    if name not in have:
        return False
    version = have[name]
    if name in TOGETHER:
        return version == pins[name]
    return version is None or requirement.specifier.contains(version.partition("+")[0], prereleases=True)


def applies(requirement: Requirement, python: str) -> bool:
    """Whether it is wanted on Linux with that Python, without extras."""
    surroundings = {
        "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
        "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64", "extra": "",
        "platform_python_implementation": "CPython", "implementation_name": "cpython",
    }  # fmt: skip
    return requirement.marker is None or requirement.marker.evaluate(surroundings)


def pinned(requirement: Requirement, pins: dict[str, str | None]) -> str:
    """The requirement at the version that the tests run with, where it has one."""
    version = pins.get(canonicalize_name(requirement.name))
    return f"{requirement.name}=={version}" if version else f"{requirement.name}{requirement.specifier}"


def download(wheels: Path, wanted: str, python: str) -> Path:
    """The wheel of one requirement, for the machine's platform. Raises CalledProcessError where there is none."""
    platforms = [word for number in GLIBC for word in ("--platform", f"manylinux_2_{number}_x86_64")]
    platforms += [word for old in ("manylinux2014", "manylinux1") for word in ("--platform", f"{old}_x86_64")]
    words = ["download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", python, "--implementation", "cp", *platforms, "-d", str(wheels), wanted]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    name = canonicalize_name(Requirement(wanted).name)
    found = [path for path in wheels.glob("*.whl") if parse_wheel_filename(path.name)[0] == name]
    return max(found, key=lambda path: path.stat().st_mtime)


def needs(wheel: Path) -> list[Requirement]:
    """What a wheel's own metadata require."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode("utf-8")
    return [Requirement(line) for line in Parser().parsestr(text).get_all("Requires-Dist", [])]
