#compdef tuner
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
