#!/usr/bin/env bash
# Everything that is recorded for a revision on one H200: tests/gpu, then the benchmarks, each with its JSON document.
# Usage: benchmarks/h200.sh FOLDER [PYTHON [STEP...]].  A step is a name below or the beginning of names ("tick",
# "throughput-1.4b", "throughput-2.6b-96"); none means all.  Later steps run even if an earlier one fails; the exit code
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

step tests-gpu "$python" -m pytest tests/gpu -q -p no:cacheprovider
bench tick-1.4b tick --model ouro-1.4b --slots 1,32,128 --context 512
bench tick-2.6b tick --model ouro-2.6b --slots 1,32,96 --context 512
bench first-token-1.4b first-token --model ouro-1.4b --prompt 1024
for clients in 1 32 128; do
    bench "throughput-1.4b-$clients" throughput --model ouro-1.4b --clients "$clients" --prompt 512 --outputs 64,128
done
for clients in 1 32 96; do
    bench "throughput-2.6b-$clients" throughput --model ouro-2.6b --clients "$clients" --prompt 512 --outputs 64
done
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
