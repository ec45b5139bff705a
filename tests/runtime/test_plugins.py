"""User code by file and by entry point: what loads, and what each mistake is answered with."""

import subprocess
import sys
from pathlib import Path

import pytest

from tuner.errors import ExitCode, PluginError
from tuner.runtime.plugins import failure, load, require_call, source_file

ROOT = Path(__file__).resolve().parents[2]
HOOKS = """\
from dataclasses import dataclass

@dataclass
class Notify:
    channel: str
    loud: bool = False

    def __call__(self, report):
        raise RuntimeError("no such channel")

def plain(report, *, word="hello"):
    return word

LIMIT = 5
"""


@pytest.fixture
def recipe_dir(tmp_path: Path) -> Path:
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    return tmp_path


def refused(use: str, directory: Path) -> PluginError:
    with pytest.raises(PluginError) as caught:
        load(use, "tuner.hooks", directory)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value


def test_a_file_is_found_from_the_recipes_directory_and_loaded_once(recipe_dir: Path) -> None:
    path_before = list(sys.path)
    relative = load("my_hooks.py:Notify", "tuner.hooks", recipe_dir)
    absolute = load(f"{recipe_dir}/my_hooks.py:Notify", "tuner.hooks", Path("/nowhere"))
    assert relative is absolute
    assert relative(channel="a") == absolute(channel="a")
    assert sys.path == path_before
    assert source_file(relative) == source_file(relative("a")) == recipe_dir / "my_hooks.py"


def test_files_of_one_name_in_two_directories_are_two_modules(recipe_dir: Path) -> None:
    other = recipe_dir / "other"
    other.mkdir()
    (other / "my_hooks.py").write_text("class Notify: pass\n")
    one, two = (load("my_hooks.py:Notify", "tuner.hooks", place) for place in (recipe_dir, other))
    assert one.__module__ != two.__module__


def test_the_module_has_the_same_name_in_every_process(recipe_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tuner.runtime.plugins import load\n"
        "print(load('my_hooks.py:Notify', 'tuner.hooks', Path(sys.argv[1])).__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe_dir)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == load("my_hooks.py:Notify", "tuner.hooks", recipe_dir).__module__


def test_what_is_not_there_is_named(recipe_dir: Path) -> None:
    missing = refused("my_hook.py:Notify", recipe_dir)
    assert f"no file {recipe_dir}/my_hook.py" in missing.message
    assert "recipe's directory" in str(missing.hint)
    assert refused("my_hooks.py:Notifi", recipe_dir).hint == "did you mean Notify?"
    assert refused("my_hooks.py:xyz", recipe_dir).hint == "it defines Notify, plain"
    assert refused("my_hooks.py", recipe_dir).hint == "write my_hooks.py:NAME"
    assert "is a int, not a class or a function" in refused("my_hooks.py:LIMIT", recipe_dir).message


def test_code_that_fails_when_imported_is_named_with_its_line(recipe_dir: Path) -> None:
    path = recipe_dir / "broken.py"
    path.write_text("import json\n\ndef f():\n    return json.loads('{')\n\nf()\n")
    error = refused("broken.py:f", recipe_dir)
    assert "JSONDecodeError" in error.message
    assert error.message.endswith(f"({path}:4)")
    assert not [name for name in sys.modules if name.startswith("tuner_plugin_broken")]
    path.write_text("def f(:\n")
    assert refused("broken.py:f", recipe_dir).message.endswith(f"({path}:1)")
    path.write_text("raise SystemExit('off')\n")
    assert "SystemExit: off" in refused("broken.py:f", recipe_dir).message
    (recipe_dir / "helper.py").touch()
    path.write_text("\nimport helper\n")
    lonely = refused("broken.py:f", recipe_dir)
    assert lonely.message.endswith(f"({path}:2)")
    assert "install helper as a package" in str(lonely.hint)


def test_options_and_arguments_are_checked_without_a_call(recipe_dir: Path) -> None:
    notify = load("my_hooks.py:Notify", "tuner.hooks", recipe_dir)
    require_call(notify, "Notify", (), {"channel": "a"})
    with pytest.raises(PluginError, match="Notify has no option chanel") as caught:
        require_call(notify, "Notify", (), {"chanel": "a"})
    assert caught.value.hint == "did you mean channel?"
    with pytest.raises(PluginError, match="Notify has no option x") as caught:
        require_call(notify, "Notify", (), {"x": "a"})
    assert caught.value.hint == "its options are channel, loud"
    with pytest.raises(PluginError, match="missing a required argument: 'channel'") as caught:
        require_call(notify, "Notify", (), {})
    assert caught.value.hint == "it is (channel: str, loud: bool = False) -> None, called with ()"
    plain = load("my_hooks.py:plain", "tuner.hooks", recipe_dir)
    require_call(plain, "plain", ("report",), {"word": "x"})
    with pytest.raises(PluginError, match="too many positional"):
        require_call(plain, "plain", ("report", "more"), {})


def test_a_failure_names_the_users_own_line(recipe_dir: Path) -> None:
    notify = load("my_hooks.py:Notify", "tuner.hooks", recipe_dir)
    try:
        notify("a")(None)
    except RuntimeError as error:
        shown = failure("hook", error, source_file(notify)).message
    assert shown == f"hook: RuntimeError: no such channel ({recipe_dir}/my_hooks.py:9)"


def declare(directory: Path, package: str, line: str) -> None:
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tuner.hooks]\n{line}\n")


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tuner_test_package.py").write_text(HOOKS)
    (tmp_path / "tuner_test_broken.py").write_text("x = 1\ny = x / 0\n")
    declare(tmp_path, "one", "notify = tuner_test_package:Notify\ntwice = a:b\nbroken = tuner_test_broken:y")
    declare(tmp_path, "two", "notify = tuner_test_package:Notify\ntwice = c:d")
    assert load("notify", "tuner.hooks", tmp_path)("a").channel == "a"
    assert refused("notifi", tmp_path).hint == "did you mean notify?"
    assert "installed: broken, notify, twice" in str(refused("zzz", tmp_path).hint)
    assert "a:b of one, c:d of two" in refused("twice", tmp_path).message
    broken = refused("broken", tmp_path).message
    assert "ZeroDivisionError" in broken
    assert broken.endswith(f"({tmp_path}/tuner_test_broken.py:2)")
    with pytest.raises(PluginError, match=r"group tuner\.optimizers"):
        load("notify", "tuner.optimizers", tmp_path)
