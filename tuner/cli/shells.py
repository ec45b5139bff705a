"""Completion in a shell: the script that asks `tuner` what to offer, and where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

from tuner.errors import MachineError, RecipeError

BASH = r"""_tuner_completion() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _tuner_completion tuner
"""
ZSH = r"""#compdef tuner
_tuner() {
    local -a offers directories
    local line word
    while IFS= read -r line; do
        word="${line%%$'\t'*}"
        if [[ "$word" == */ ]]; then directories+=("$word"); else offers+=("${word//:/\\:}:${line#*$'\t'}"); fi
    done < <("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( ${#offers} )) && _describe 'tuner' offers
    (( ${#directories} )) && compadd -S '' -- "${directories[@]}"
}
compdef _tuner tuner
"""
FISH = r"""function __tuner_complete
    set -l words (commandline -opc)
    tuner __complete $words[2..-1] (commandline -ct) 2>/dev/null
end
complete --command tuner --no-files --arguments '(__tuner_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def shell_of(name: str | None) -> str:
    """The shell that is meant: the one named, else that of $SHELL. Raises RecipeError for one that is not known."""
    shell = name or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SCRIPTS:
        raise RecipeError(
            f"no completion for the shell {shell!r}" if shell else "which shell? the environment has no SHELL",
            hint=f"name one: --shell {' or '.join(SCRIPTS)}",
        )
    return shell


def install(shell: str, home: Path) -> list[Path]:
    """Write the script where the shell finds it; returns the files that were written. Again, it changes nothing.

    bash and zsh need a line in the file that they read when they start. Raises MachineError.
    """
    if shell == "fish":
        script, begins, line = home / ".config/fish/completions/tuner.fish", None, ""
    elif shell == "zsh":
        script, begins = home / ".zfunc/_tuner", home / ".zshrc"
        line = "fpath+=~/.zfunc; autoload -Uz compinit && compinit"
    else:
        script, begins = home / ".config/tuner/completion.bash", home / ".bashrc"
        line = "source ~/.config/tuner/completion.bash"
    written = []
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(SCRIPTS[shell], encoding="utf-8")
        written.append(script)
        if begins is not None:
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
