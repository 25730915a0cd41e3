#!/bin/bash
# Train on all machines of a TPU pod, which have the project in the folder t5x_lite with its .venv, and a shared folder.
# Its arguments are those of `t5x_lite train`:
#
#   TPU_NAME=my-pod ZONE=us-central2-b examples/cluster/tpu_pod.sh \
#     --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=/shared/runs/cloze
set -eu

command='cd t5x_lite && examples/cluster/rerun.sh .venv/bin/t5x_lite train --distributed=on'
for argument in "$@"; do
  command+=" $(printf '%q' "$argument")"
done
exec gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$command"
