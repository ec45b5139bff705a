function __tuner_complete
    set -l words (commandline -opc)
    tuner __complete $words[2..-1] (commandline -ct) 2>/dev/null
end
complete --command tuner --no-files --arguments '(__tuner_complete)'
