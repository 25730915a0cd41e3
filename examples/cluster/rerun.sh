#!/bin/bash
# Run a command, and run it again when it ends with a status that a rerun can mend, on each of several machines:
#
#   examples/cluster/rerun.sh t5x_lite train --distributed=on --gin_file=recipes/keyword_cloze.gin \
#     --gin.MODEL_DIR=/shared/runs/a
#
# All processes of a run end together, and meet again. Ctrl-C, SIGTERM and SIGHUP stop the command, which saves, and end
# the script with its status. On one machine, use `t5x_lite launch --max_restarts`.

# A command that ends again and again must not be run for ever.
max_restarts=${MAX_RESTARTS:-100}

child=
stopped=
stop() {
  stopped=yes
  if [[ $child ]]; then kill -TERM "$child" 2>/dev/null; fi
}
trap stop INT TERM HUP

for ((restart = 0; ; restart++)); do
  "$@" &
  child=$!
  # A signal may have come before the line above.
  if [[ $stopped ]]; then stop; fi
  # A signal interrupts `wait`.
  while
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null
  do :; done
  case $status in
    # As in train.sbatch, and `t5x_lite launch --max_restarts`.
    4 | 74 | 75 | 129 | 13[1-9] | 1[4-8]? | 19[0-2]) ;;
    *) exit "$status" ;;
  esac
  if [[ $stopped ]] || ((restart >= max_restarts)); then exit "$status"; fi
  echo "Status $status: restart $((restart + 1)) of at most $max_restarts." >&2
  # Others of the run may still be ending.
  sleep "${RESTART_SECONDS:-10}" &
  wait $!
  if [[ $stopped ]]; then exit "$status"; fi
done
