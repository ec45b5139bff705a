"""Completion in a shell: the script that asks `tuner` what to offer, and where it is installed."""

import os
from pathlib import Path

from tuner.errors import MachineError, RecipeError

_PLACES = {
    "bash": (".config/tuner/completion.bash", ".bashrc", "source ~/.config/tuner/completion.bash"),
    "zsh": (".zfunc/_tuner", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit && compinit"),
    "fish": (".config/fish/completions/tuner.fish", None, ""),
}
"""In the home directory: the script, the file that the shell reads when it starts, and the line that belongs in it."""
SHELLS = tuple(_PLACES)


def script_of(shell: str) -> str:
    """The script that completes in a shell: it asks `tuner __complete`."""
    return (Path(__file__).parent / "completion" / f"tuner.{shell}").read_text(encoding="utf-8")


def shell_of(name: str | None) -> str:
    """The shell that is meant: the one named, else that of $SHELL. Raises RecipeError for one that is not known."""
    shell = name or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        raise RecipeError(
            f"no completion for the shell {shell!r}" if shell else "which shell? the environment has no SHELL",
            hint=f"name one: --shell {' or '.join(SHELLS)}",
        )
    return shell


def install(shell: str, home: Path) -> list[Path]:
    """Write the script where the shell finds it; returns the files that were written. Again, it changes nothing.

    bash and zsh need a line in the file that they read when they start. Raises MachineError.
    """
    place, start, line = _PLACES[shell]
    script, written = home / place, []
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(script_of(shell), encoding="utf-8")
        written.append(script)
        if start is not None:
            begins = home / start
            text = begins.read_text(encoding="utf-8", errors="surrogateescape") if begins.is_file() else ""
            if line not in text.splitlines():
                gap = "" if not text or text.endswith("\n") else "\n"
                begins.write_text(f"{text}{gap}{line}\n", encoding="utf-8", errors="surrogateescape")
                written.append(begins)
    except OSError as error:
        raise MachineError(
            f"{error.filename}: {error.strerror}", hint="tuner --show-completion prints the script"
        ) from error
    return written
