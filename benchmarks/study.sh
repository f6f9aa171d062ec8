#!/usr/bin/env bash
# The studies of docs/results.md that take hours: benchmarks/study.sh PART. Each goes on where it was stopped; given twice at the
# same time, both processes share the runs.
#   budget-rates   half a million parameters, 20 tokens a parameter, three learning rates
#   budget         the same at the rates chosen there, five seeds; BUDGET=5, 20 or 40 tokens a parameter
#   context        the same at 20 tokens a parameter and a context of 1,024
#   starts         plain Llama at 10, 25, 50 and 100 % of 5 million bytes at a constant rate, three seeds
#   early          each of them, converted and trained to the same end (FROM=10, 25, 50 or 100)
#   capacity       retrofits with capacity of their own, from the end of `starts`
# RATES="transformer:learning_rate=4e-3,..." names the methods of `budget` and `context` with their chosen rates.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$script")/results/study"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
half=tiny:hidden_size=64:num_hidden_layers=6:num_attention_heads=4:intermediate_size=256:initializer_range=0.079
common=(--tokenizer bytes --batch 16 --micro-batch 16 --warmup 0.05 --held-out-blocks 512 --no-bf16)
compare() { resformer compare "$@" && [ ! -f "$1/study.json" ] || { cp "$1/study.json" "$1.json" && cp "$1/study.png" "$1.png"; }; }

swept() { # METHOD... RATE...: each method at each rate
    local methods=$1 rate list=""
    for rate in $2; do for method in $methods; do list+=",$method:learning_rate=$rate"; done; done
    echo "${list#,}"
}

case $1 in
budget-rates)
    methods=$(swept "transformer resformer svformer denseformer" "4e-3 2e-3 8e-3")
    compare budget20 --methods "$methods" --sizes $half --seeds 1 --steps 2080 --block 256 --learning-rate 4e-3 \
        --save-models "${common[@]}" ;;
budget)
    compare "budget$BUDGET" --methods "$RATES" --sizes $half --seeds 5 --steps $((104 * BUDGET)) --block 256 \
        --learning-rate 4e-3 --save-models "${common[@]}" ;;
context)
    compare context1024 --methods "$RATES" --sizes $half --seeds 3 --steps 2080 --block 1024 --learning-rate 4e-3 \
        "${common[@]}" --batch 4 --micro-batch 4 ;;
starts)
    for percent in 10 25 50 100; do
        for seed in 0 1 2; do
            compare "starts/$percent-$seed" --methods transformer --seeds 1 --first-seed $seed --steps $((1221 * percent / 100)) \
                --block 256 --learning-rate 2e-3 --schedule constant --save-models "${common[@]}"
        done
    done ;;
early)
    methods=resformer,denseformer,resformer-gated,value-embeddings,resformer:value_residual_init=[0.5,0.5]
    for seed in 0 1 2; do
        steps=$((1465 - 1221 * FROM / 100))
        compare "early/$FROM-$seed" --from "starts/$FROM-$seed/models/tiny/transformer/$seed" --methods "$methods" --seeds 1 \
            --first-seed $((seed + 10)) --steps $steps --block 256 --learning-rate 2e-3 --connection-learning-rate 2e-3 \
            --schedule wsd --decay "0$(bc -l <<<"244 / $steps")" "${common[@]}"
    done ;;
capacity)
    methods=value-embeddings,resformer-gated,attention-residuals,depth-attention
    for seed in 0 1 2; do
        compare "capacity/$seed" --from "starts/100-$seed/models/tiny/transformer/$seed" --methods "$methods" --seeds 1 \
            --first-seed $((seed + 10)) --steps 1221 --block 256 --learning-rate 1e-3 --connection-learning-rate 2e-3 \
            "${common[@]}"
    done ;;
*) sed -n '2,/^set/s/^# \?//p' "$script" >&2; exit 2 ;;
esac
