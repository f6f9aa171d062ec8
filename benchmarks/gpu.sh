#!/usr/bin/env bash
# What to measure where there is a GPU, in parts of under 8 minutes: benchmarks/gpu.sh PART
#
#   wheels  where there is a package index: what a GPU machine without one lacks beside torch 2.11, for its Python 3.12
#   1       the tests marked gpu                2  training steps, eager and compiled     3  depth-weighted averages alone
#   4       decoding                            5  methods compared, trained from scratch
#
# Results go to benchmarks/results/cuda, or $OUT. A part measures what these lack, so that it can be given again.
# TOY=1 DEVICE=cpu tries out the script, in build/gpu-toy.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?give a part: wheels, or 1 to 5} device=${DEVICE:-cuda} toy=${TOY:-} python=${PYTHON:-python3}
committed=benchmarks/results/cuda work=build/gpu${toy:+-toy}
results=${OUT:-${toy:+$work/results}} results=${results:-$committed}
mkdir -p "$results" "$work"
[ "$results" = "$committed" ] || cp -n "$committed"/* "$results" 2>/dev/null || true

if [ "$part" = wheels ]; then # under 58 MiB, most of it bitsandbytes, which one test needs
    exec "$python" -m pip download --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --constraint constraints.txt --dest wheels \
        transformers huggingface_hub httpx2 httpcore2 truststore idna datasets dill multiprocess xxhash filelock fsspec \
        regex wrapt click typer bitsandbytes
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
    timeout "$((SECONDS < 465 ? 470 - SECONDS : 5))" "$python" "$@" || { echo "stopped after $SECONDS s: $*" && exit 1; }
}
benchmark() { run "benchmarks/$1.py" --device "$device" --threads 1 "${@:2}"; }
python_sources() { # every installed package's sources, one document a file
    [ -e "$work/python.jsonl" ] || "$python" - "$work/python.jsonl" "${toy:+200}" <<'END'
import json, pathlib, random, sys, sysconfig
files = sorted(pathlib.Path(sysconfig.get_path("purelib")).rglob("*.py"))
random.Random(0).shuffle(files)
with open(sys.argv[1], "w") as output:
    for file in files[: int(sys.argv[2] or len(files))]:
        print(json.dumps({"text": file.read_text(errors="replace")}), file=output)
END
}

case $part in
1)
    grep -qs 'errors="0" failures="0"' "$results/tests.xml" ||
        run -m pytest -q -m gpu tests/test_modeling_*.py tests/test_growing_cache.py \
            tests/test_depth_average.py --junit-xml "$results/tests.xml"
    ;;
2)
    methods="resformer svformer denseformer denseformer-4x5 resformer-denseformer"
    shapes=("8 x 512" "12 x 768" "24 x 1024" "32 x 2048") sizes=(--batch 8 --tokens 2048 --rounds 10 --budget 30)
    [ -z "$toy" ] || shapes=("tiny") sizes=(--batch 2 --tokens 32 --rounds 3) methods="resformer"
    benchmark train --dtype bfloat16 --parts time --shapes "${shapes[@]}" --methods $methods "${sizes[@]}" --resume \
        --modes eager layers whole --output "$results/train.json"
    ;;
3)
    shapes=(135M 1B) time=--time
    [ -z "$toy" ] || shapes=(135M) time=
    [ -e "$results/traffic.json" ] || run benchmarks/traffic.py "$results/traffic.json" $time "${shapes[@]}"
    ;;
4)
    options=(--dtype bfloat16 --shape "32 x 2048" --rounds 5 --budget 30 --resume)
    short=(128 4096) long=32768
    [ -z "$toy" ] || options=(--shape tiny --rounds 3 --resume --memory 9999999) short=(16) long=64
    benchmark decode "${options[@]}" --batches 1 8 64 --contexts "${short[@]}" --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches 1 8 --contexts $long --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches --largest $long --output "$results/decode.json"
    benchmark decode "${options[@]}" --batches 1 --contexts "${short[-1]}" --output "$results/decode_compiled.json" \
        --arms llama "llama static compiled" "resformer static compiled" "svformer static compiled"
    ;;
5)
    python_sources
    study=(--sizes 10m --seeds 3 --tokens 100000000 --block 512 --batch 64 --tokenizer bpe:8192 --bf16)
    [ -z "$toy" ] || study=(--sizes tiny --seeds 1 --steps 2 --block 32 --tokenizer bytes --held-out-blocks 2)
    [ ! -e "$results/study.jsonl" ] || exit 0
    run -m resformer compare "$work/study" --data "$work/python.jsonl" \
        --methods resformer,svformer,denseformer --learning-rate 3e-3 "${study[@]}"
    cp "$work/study/runs.jsonl" "$results/study.jsonl"
    ;;
*) echo "unknown part: $part" && exit 2 ;;
esac
echo "part $part done in $SECONDS s: $results"
