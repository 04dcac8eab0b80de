#!/usr/bin/env bash
# Everything that is recorded for a revision on one H200: tests/gpu, then the benchmarks, each with its JSON document.
# Usage: benchmarks/h200.sh FOLDER [PYTHON].  Later steps run even if an earlier one fails; the exit code is the first failure's.
set -u
out=${1:?folder for the results}
python=${2:-python3}
status=0
mkdir -p "$out"
step() {
    local name=$1
    shift
    local began=$SECONDS
    "$@" >"$out/$name.log" 2>&1 || { local code=$?; [ "$status" -eq 0 ] && status=$code; echo "$name: exit code $code"; }
    echo "$name: $((SECONDS - began)) s"
}
step tests-gpu "$python" -m pytest tests/gpu -q -p no:cacheprovider
step tick "$python" -m rlt_jax.bench tick --model ouro-1.4b --slots 1,32,128 --context 512 --out "$out/tick-ouro-1.4b.json"
step first-token "$python" -m rlt_jax.bench first-token --model ouro-1.4b --prompt 1024 --out "$out/first-token-ouro-1.4b.json"
for clients in 32 128 1; do
    step "throughput-$clients" "$python" -m rlt_jax.bench throughput --model ouro-1.4b --clients "$clients" \
        --prompt 512 --outputs 64 --out "$out/throughput-$clients-ouro-1.4b.json"
done
exit "$status"
