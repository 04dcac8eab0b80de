#!/usr/bin/env bash
# Everything that is recorded for a revision on one H200: the benchmarks, each with its JSON document, and tests/gpu.
# Usage: benchmarks/h200.sh FOLDER [PYTHON [STEP...]].  A step is a name below or the beginning of names ("tick",
# "tick-huginn", "throughput-2.6b"); none means all.  Later steps run even if an earlier one fails; the exit code
# is the first failure's.  The checkpoint of the load step goes to a new folder under TMPDIR, which is removed.
set -u
out=${1:?folder for the results}
python=${2:-python3}
wanted=("${@:3}")
status=0
names=()
mkdir -p "$out"

selected() { # NAME: whether it was asked for
    [ "${#wanted[@]}" -eq 0 ] && return 0
    local each
    for each in "${wanted[@]}"; do
        [[ $1 == "$each" || $1 == "$each"-* ]] && return 0
    done
    return 1
}
step() { # NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    names+=("$name")
    selected "$name" || return 0
    "$@" >"$out/$name.log" 2>&1 || { local code=$?; [ "$status" -eq 0 ] && status=$code; echo "$name: exit code $code"; }
    echo "$name: $((SECONDS - began)) s"
}
bench() { # NAME ARGUMENT...
    local name=$1
    shift
    step "$name" "$python" -m rlt_jax.bench "$@" --out "$out/$name.json"
}

# the tick, the three forms, at 64 and 128 outputs: one engine per count of clients serves them all
bench throughput-1.4b throughput --model ouro-1.4b --clients 128,32,1 --prompt 512 --outputs 64,128 --tick
bench first-token-1.4b first-token --model ouro-1.4b --prompt 1024
bench throughput-2.6b throughput --model ouro-2.6b --clients 96,32,1 --prompt 512 --outputs 64,128 --tick
# prompts run position by position there, as decode does: the context is short to keep it short
bench tick-shared tick --model ouro-1.4b --kv-layout shared --slots 32 --context 128
bench tick-nanbeige tick --model nanbeige4.2-3b --slots 1,32 --context 512
bench tick-huginn-8 tick --model huginn-0125 --depth-cap 8 --slots 1,32 --context 512
# at 32 loops a layer's pool of 32 x 512 positions is more than kernels address
bench tick-huginn-32 tick --model huginn-0125 --depth-cap 32 --slots 1,32 --context 256
step tests-gpu "$python" -m pytest tests/gpu -q -p no:cacheprovider
checkpoint=$(mktemp -d)
trap 'rm -rf "$checkpoint"' EXIT
bench load-1.4b load --model ouro-1.4b --folder "$checkpoint/ouro-1.4b"

for each in ${wanted[@]+"${wanted[@]}"}; do
    known=0
    for name in "${names[@]}"; do
        [[ $name == "$each" || $name == "$each"-* ]] && known=1
    done
    if [ "$known" -eq 0 ]; then
        echo "no step is called $each; there are: ${names[*]}" >&2
        [ "$status" -eq 0 ] && status=2
    fi
done
exit "$status"
