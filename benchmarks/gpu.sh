#!/usr/bin/env bash
# What to measure where there is a GPU, in parts of under 8 minutes: benchmarks/gpu.sh PART
#
#   wheels  where there is a package index: what a GPU machine without one lacks beside torch 2.11, for its Python 3.12
#   1       the tests marked gpu                2  training steps, eager and compiled     3  depth-weighted averages alone
#   4       decoding                            5  methods compared, trained from scratch
#
# Results go to benchmarks/results/cuda, or $OUT. A part measures what these lack, so that it can be given again.
# LIMIT is a part's seconds (470). TOY=1 DEVICE=cpu tries out the script, in build/gpu-toy.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?give a part: wheels, or 1 to 5} device=${DEVICE:-cuda} toy=${TOY:-} limit=${LIMIT:-470} python=${PYTHON:-python3}
committed=benchmarks/results/cuda work=build/gpu${toy:+-toy}
results=${OUT:-${toy:+$work/results}} results=${results:-$committed}
mkdir -p "$results" "$work"
[ "$results" = "$committed" ] || cp -n "$committed"/* "$results" 2>/dev/null || true

if [ "$part" = wheels ]; then # under 58 MiB, most of it bitsandbytes, which one test needs
    exec "$python" -m pip download --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --constraint constraints.txt --dest wheels \
        transformers huggingface_hub httpx2 httpcore2 truststore idna datasets dill multiprocess xxhash filelock fsspec \
        regex wrapt click typer pydantic pydantic_core annotated_types typing_inspection bitsandbytes
fi
if [ -d wheels ]; then
    if [ ! -d "$work/site" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/unfinished" wheels/*.whl
        mv "$work/unfinished" "$work/site"
    fi
    export PYTHONPATH=$PWD/$work/site:$PWD/src
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true

run() { # within the part's time
    timeout "$((SECONDS < limit - 5 ? limit - SECONDS : 5))" "$python" "$@" || { echo "stopped after $SECONDS s: $*" && exit 1; }
}
benchmark() { run "benchmarks/$1.py" --device "$device" --threads 1 "${@:2}"; }
chosen() { # rates NAME, or better NAME: what the study goes on with
    "$python" - "$1" "$results/$2.jsonl" <<'END'
import json, statistics, sys
runs = [run for run in map(json.loads, open(sys.argv[2])) if "loss" in run]
def mean(*methods): # diverged runs are the worst
    return statistics.mean(run["loss"] or 9 for run in runs if run["method"] in methods)
if sys.argv[1] == "better":
    print(min("resformer", "denseformer", key=mean))
else:
    plain = [run for run in runs if run["architecture"] == "transformer" and run["seed"] == 100]
    rate = min(plain, key=lambda run: run["loss"] or 9)["learning_rate"]
    rates = {1: "", 10: ":connection_learning_rate=4e-2", 50: ":connection_learning_rate=2e-1"}
    losses = {factor: mean("resformer" + text, "denseformer" + text) for factor, text in rates.items()}
    factor = min(factor for factor, loss in losses.items() if loss <= min(losses.values()) + 0.005)
    print(f"--learning-rate {rate} --connection-learning-rate {factor * rate}")
END
}

case $part in
1)
    grep -qs 'errors="0" failures="0"' "$results/tests.xml" ||
        run -m pytest -q -n 8 -m gpu tests/test_modeling_*.py tests/test_growing_cache.py \
            tests/test_depth_average.py tests/test_value_residual.py --junit-xml "$results/tests.xml"
    ;;
2)
    methods="resformer svformer denseformer denseformer-4x5 mudd attnres hyper-connections mhc"
    shapes=("12 x 768" "32 x 2048") sizes=(--batch 8 --tokens 2048 --rounds 10 --budget 15)
    [ -z "$toy" ] || shapes=("tiny") sizes=(--batch 2 --tokens 32 --rounds 3) methods="resformer"
    benchmark train --dtype bfloat16 --parts time --shapes "${shapes[@]}" --methods $methods "${sizes[@]}" --resume \
        --modes eager layers whole --output "$results/training.json" # train.json is of the decoder before 0.1
    ;;
3)
    shapes=(135M 1B) time=--time
    [ -z "$toy" ] || shapes=(135M) time=
    [ -e "$results/traffic.json" ] || run benchmarks/traffic.py "$results/traffic.json" $time "${shapes[@]}"
    ;;
4)
    options=(--dtype bfloat16 --shape "32 x 2048" --rounds 5 --budget 10 --resume)
    short=(128 4096) long=32768
    [ -z "$toy" ] || options=(--shape tiny --rounds 3 --resume --memory 9999999) short=(16) long=64
    benchmark decode "${options[@]}" --batches 1 8 64 --contexts "${short[@]}" --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches 1 8 --contexts $long --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches --largest $long --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches 1 --contexts "${short[-1]}" --output "$results/decode_compiled.json" \
        --arms llama {llama,resformer,svformer,denseformer,mudd,hyper-connections}" static compiled"
    ;;
5)
    export OMP_NUM_THREADS=1
    together() { # PROCESSES COMMAND: each takes the runs that no other has
        for _ in $(seq "$1"); do run "${@:2}" >>"$work/study.log" 2>&1 & done
        wait
    }
    compared() { # PROCESSES NAME LAYERS OPTIONS
        mkdir -p "$work/$2"
        [ ! -e "$results/$2.jsonl" ] || cp -n "$results/$2.jsonl" "$work/$2/runs.jsonl"
        together "$1" -m resformer compare "$work/$2" --sizes "tiny:num_hidden_layers=$3:$shape" --block 256 \
            --batch 16 --no-bf16 --held-out-blocks 512 "${@:4}"
        cp "$work/$2/runs.jsonl" "$results/$2.jsonl"
    }
    shape=num_attention_heads=4:num_key_value_heads=4:hidden_size=64:intermediate_size=256
    c=connection_learning_rate steps=489 steps24=960 seeds=10 fewer=5 many=14 few=5
    [ -z "$toy" ] || steps=2 steps24=2 seeds=1 fewer=1 many=2 few=1
    compared "$many" a 12 --tokenizer bytes --steps $steps --seeds 2 --first-seed 100 --learning-rate 4e-3 --methods \
        "transformer,transformer:learning_rate=2e-3,transformer:learning_rate=8e-3,$(
            printf "%s,%s:$c=4e-2,%s:$c=2e-1," {resformer,denseformer}{,,} | sed 's/,$//')"
    read -r rates < <(chosen rates a)
    compared "$many" b12 12 --tokenizer bytes $rates --steps $steps --seeds $seeds --save-models \
        --methods resformer,denseformer,svformer,transformer:num_key_value_heads=2
    read -r better < <(chosen better b12)
    compared "$few" b24 24 --tokenizer bytes $rates --steps $steps24 --seeds $fewer --methods $better &
    compared "$few" c 12 --tokenizer bpe:4096 $rates --steps $steps --seeds $fewer --methods resformer &
    wait
    ;;
*) echo "unknown part: $part" && exit 2 ;;
esac
echo "part $part done in $SECONDS s: $results"
