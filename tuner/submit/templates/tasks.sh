#!/bin/bash
# Starts a process for each GPU of this pod, says to each which one it is, and ends with the exit code that says why: a
# process's own error before what the others make of its loss, else the largest.
export WORLD_SIZE=$((NODES * PROCESSES)) LOCAL_WORLD_SIZE=$PROCESSES
started=()
for ((task = 0; task < PROCESSES; task++)); do
    RANK=$((JOB_COMPLETION_INDEX * PROCESSES + task)) LOCAL_RANK=$task "$@" &
    started+=("$!")
done
# The pod is to go: each process finishes its step, saves and ends with 75.
trap 'kill -TERM "${started[@]}" 2>/dev/null' TERM INT

# Processes whose peer died may wait inside a GPU kernel, where no signal reaches them: they end with the pod.
code=0 patience=30
while ((${#started[@]} && patience)); do
    sleep 1
    running=()
    for process in "${started[@]}"; do
        if kill -0 "$process" 2>/dev/null; then
            running+=("$process")
            continue
        fi
        wait "$process"
        ended=$?
        case $code in
            [1-3] | [5-7]) ;;
            *) case $ended in
                [1-3] | [5-7]) code=$ended ;;
                *) ((ended <= code)) || code=$ended ;;
            esac ;;
        esac
    done
    started=("${running[@]}")
    ((code == 0 || code == 75)) || ((patience--))
done
exit "$code"
