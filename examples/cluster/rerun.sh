#!/bin/bash
# Run a command, and run it again when it ends with a status that a rerun can mend:
#
#   examples/cluster/rerun.sh t5x_lite launch -n 8 -- train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/a
#
# Ctrl-C, SIGTERM and SIGHUP stop the command, which saves, and end the script with its status. With several machines,
# start it on each: all processes of a run end together, and meet again.

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
    # As in train.sbatch.
    4 | 74 | 75 | 134 | 137 | 143) ;;
    *) exit "$status" ;;
  esac
  if [[ $stopped ]] || ((restart >= max_restarts)); then exit "$status"; fi
  echo "Status $status: restart $((restart + 1)) of at most $max_restarts." >&2
  # Others of the run may still be ending.
  sleep "${RESTART_SECONDS:-10}" &
  wait $!
  if [[ $stopped ]]; then exit "$status"; fi
done
