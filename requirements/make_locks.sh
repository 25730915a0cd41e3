#!/bin/sh
# Resolves the locks; each keeps the comment at its top. COMPILE is the command of uv, and DOWNLOAD that of pip for wheels
# (see the Makefile).
set -eu
cd "$(dirname "$0")/.."
resolved=$(mktemp)
others=$(mktemp)
wheels=$(mktemp -d)
trap 'rm -rf "$resolved" "$others" "$wheels"' EXIT

# write FILE: writes a lock, whose packages are the input, below the comment at its top.
write() {
  { grep '^#' "$1"; cat; } >"$1.new"
  mv "$1.new" "$1"
}

# lock NAME OPTIONS: writes requirements/lock-NAME.txt.
lock() {
  file=requirements/lock-$1.txt
  shift
  $COMPILE "$@" --override requirements/overrides.txt setup.py >"$resolved"
  grep -E "${ONLY:-.}" "$resolved" | write "$file"
}

# lock_more NAME EXTRA OPTIONS: writes the lock of an extra, without the packages of the locks of Pythons.
lock_more() {
  file=requirements/lock-$1.txt
  extra=$2
  shift 2
  sed -n 's/^\([A-Za-z0-9._-]*==\).*/^\1/p' requirements/lock-3.*.txt >"$others"
  $COMPILE --python-version 3.11 --extra "$extra" -c requirements/lock-3.11.txt "$@" setup.py >"$resolved"
  # What only torch's CUDA builds ask for is not pinned: pip installs it where it takes such a build.
  grep -v -f "$others" "$resolved" | grep -v -E '^(cuda-|nvidia-|triton=)' | write "$file"
}

# lock_all VERSION OPTIONS: the lock of a Python that has TensorFlow.
lock_all() {
  version=$1
  shift
  lock "$version" --python-version "$version" --extra seqio --extra test requirements/lock.in "$@"
}

lock_all 3.11 -c requirements/oldest.txt
lock_all 3.12
lock_all 3.13
lock core-3.14 --python-version 3.14 --extra test
ONLY='^(jax-cuda13-|nvidia-)' lock cuda --python-version 3.12 --extra cuda -c requirements/lock-3.12.txt
lock_more stores test-stores --override requirements/overrides.txt
lock_more docs docs -c requirements/lock-stores.txt
lock_more pictures pictures -c requirements/lock-stores.txt
lock_more interop test-interop -c requirements/lock-stores.txt

# The wheels of `make gpu`: pytest, and what t5x_lite needs and JAX does not bring, each with its hash.
echo pytest |
  $COMPILE --python-version 3.12 -c requirements/lock-3.12.txt --override requirements/overrides.txt setup.py - |
  grep -v -E '^(jax|jaxlib|ml-dtypes|numpy|opt-einsum|scipy)==' >"$resolved"
$DOWNLOAD -d "$wheels" -r "$resolved"
(cd "$wheels" && sha256sum -- *.whl) |
  sed -E 's/^([0-9a-f]+)  ([^-]+)-([^-]+)-.*/\2==\3 --hash=sha256:\1/; :name s/^([^=_]*)_/\1-/; t name' |
  write requirements/gpu-wheels.txt
