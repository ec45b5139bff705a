"""User code that a recipe names: `file.py:Name`, or the name of an entry point that an installed package declares.

A file is loaded by its path alone, through a module spec: neither `sys.path` nor the working directory matters, and the
module has the same name in every process. It is loaded once per process.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tuner.errors import PluginError, is_out_of_memory

Group = Literal[
    "tuner.hooks", "tuner.optimizers", "tuner.schedules", "tuner.methods", "tuner.tasks", "tuner.scorers",
    "tuner.data_sources", "tuner.tokenizers", "tuner.models",
]
Plugin = Callable[..., Any]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load(use: str, group: Group, base_dir: Path = Path()) -> Plugin:
    """Return the callable that `use` names; a relative file starts from `base_dir`, and a loaded recipe has none.

    Raises PluginError for a file, a name or an entry point that is not there, for code that fails while it is imported
    (with the line of it), and for an object that cannot be called.
    """
    file, colon, name = use.rpartition(":")
    if colon and file.endswith(".py"):
        path = base_dir / file
        found = _attribute(_module(path, use), name, use, path)
    elif use.endswith(".py"):
        raise PluginError(f"{use} names a file and nothing in it", hint=f"write {use}:NAME")
    else:
        found = _entry_point(use, group)
    if not callable(found):
        raise PluginError(f"{use} is a {type(found).__name__}, not a class or a function")
    plugin: Plugin = found
    return plugin


def require_call(plugin: Plugin, use: str, arguments: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Check that `plugin` can be called with positional `arguments` (their names, for people) and `options` by keyword.

    Nothing is called. Raises PluginError that names the option or argument which does not fit, and what there is.
    """
    try:
        signature = inspect.signature(plugin)
    except (TypeError, ValueError):
        return  # some callables written in C have none
    takes = [item for item in signature.parameters.values() if item.kind in _BY_NAME][len(arguments) :]
    names = [item.name for item in takes]
    anything = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    for option in options:
        if option not in names and not anything:
            near = get_close_matches(option, names, 1, 0.6)
            known = f"its options are {', '.join(names)}" if names else "it takes no options"
            raise PluginError(f"{use} has no option {option}", hint=f"did you mean {near[0]}?" if near else known)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{name}=..." for name in options)])
        raise PluginError(f"{use}: {error}", hint=f"it is {signature}, called with ({called})") from None


def failure(what: str, error: BaseException, path: Path | None = None) -> PluginError:
    """What user code raised, as one error that names its line: the innermost one in `path`, or of all."""
    place = _place(error, path)
    shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return PluginError(f"{what}: {shown}{f' ({place})' if place else ''}", hint=_hint(error))


@contextmanager
def naming(what: str, file: Path | None, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Within, what user code raises becomes a PluginError (:func:`failure`), but for what is `passing`, and memory."""
    try:
        yield
    except passing:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise failure(what, error, file) from error


def source_file(plugin: Plugin) -> Path | None:
    """The file of a plug-in's code; None where Python does not know it."""
    with suppress(TypeError):
        return Path(inspect.getfile(plugin if isinstance(plugin, type) or inspect.isroutine(plugin) else type(plugin)))
    return None


def _module(path: Path, use: str) -> ModuleType:
    path = Path(path.absolute())
    if not path.is_file():
        raise PluginError(f"{use}: there is no file {path}", hint="a relative path starts from the recipe's directory")
    name = f"tuner_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None, "a .py file has a loader"
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # as `import` does: dataclasses and pickles of the module look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failure(f"{use} cannot be imported", error, path) from error
    return module


def _attribute(module: ModuleType, name: str, use: str, path: Path) -> Any:
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if _own(value, module)]
        near = get_close_matches(name, names, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(sorted(names)) or 'nothing to call'}"
        raise PluginError(f"{use}: {path} has no {name or 'empty name'}", hint=hint)
    return getattr(module, name)


def _own(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _entry_point(use: str, group: Group) -> Any:
    declared = metadata.entry_points(group=group)
    if not (found := {(point.value, point) for point in declared if point.name == use}):
        names = sorted({point.name for point in declared})
        near = get_close_matches(use, names, 1, 0.5)
        known = f"installed: {', '.join(names)}" if names else "none is installed"
        hint = f"did you mean {near[0]}?" if near else f"{known}; a file is written FILE.py:NAME"
        raise PluginError(f"{use}: no entry point of that name in the group {group}", hint=hint)
    if len({value for value, _ in found}) > 1:
        owners = sorted(f"{value} of {point.dist.name if point.dist else '?'}" for value, point in found)
        raise PluginError(f"{use}: several packages declare it in the group {group}: {', '.join(owners)}")
    try:
        return found.pop()[1].load()
    except (Exception, SystemExit) as error:
        raise failure(f"{use} cannot be imported", error) from error


def _place(error: BaseException, path: Path | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [item for item in frames if not item[0].startswith("<frozen importlib")]
    own = [item for item in frames if path is not None and item[0] == str(path)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def _hint(error: BaseException) -> str | None:
    match error:
        case ModuleNotFoundError():
            return f"a plug-in's file is loaded alone: install {error.name} as a package, or put its code into the file"
        case SyntaxError():
            return "the file is not Python of this version"
    return None
