#!/usr/bin/env bash
# The studies of docs/results.md that take hours: benchmarks/study.sh PART. Each goes on where it was stopped; given twice at the
# same time, both processes share the runs.
#   budget-rates   half a million parameters, 20 tokens a parameter, four learning rates
#   budget         the same at the rates chosen there, five seeds or SEEDS; BUDGET=5, 20 or 40 tokens a parameter
#   context        the same at 20 tokens a parameter and a context of 1,024
#   starts         plain Llama of half a million parameters, at 10, 25, 50 and 100 % of 5 million bytes at a constant rate, three seeds
#   early          each of them, converted and trained to the same end (FROM=10, 25, 50 or 100); also with its values aligned
#   scratch        the same methods from scratch, with the same schedule
#   capacity       only what is added is trained, connections and LoRA, on plain Llama of `starts` with its rate brought down
#   five-rates     2 million parameters on 5 million bytes, three learning rates, four for two methods
#   five           the same at the rates chosen there, five seeds or SEEDS
#   smollm2        connections and LoRA on SmolLM2-135M (the folder or id in FROM), frozen, on three texts (two more in TEXTS): a
#                  quarter of a million tokens at three rates, and with RATES="resformer:1e-2 ..." a million, two seeds
# RATES="transformer:learning_rate=4e-3,..." names the methods of `budget`, `context` and `five` with their chosen rates.
# RATE is that of `starts`, `early`, `scratch` and `capacity`. SEEDS="0" has `starts`, `early` and `capacity` do one of the three,
# FROM="10 100" has `starts` do two of the four.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$script")/results/study"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
half=tiny:hidden_size=64:num_hidden_layers=6:num_attention_heads=4:intermediate_size=256:initializer_range=0.079
middle='value_residual_init=[0.5,0.5]'
common=(--tokenizer bytes --batch 16 --micro-batch 16 --warmup 0.05 --held-out-blocks 512 --no-bf16)
compare() {
    resformer compare "$@"
    if [ -f "$1/study.json" ]; then cp "$1/study.json" "$1.json" && cp "$1/study.png" "$1.png"; fi # the last process has written it
}

swept() { # METHOD... RATE...: each method at each rate
    local methods=$1 rate list=""
    for rate in $2; do for method in $methods; do list+=",$method:learning_rate=$rate"; done; done
    echo "${list#,}"
}

case $1 in
budget-rates)
    methods=$(swept "transformer resformer svformer denseformer" "4e-3 2e-3 8e-3 16e-3")
    compare budget20-rates --methods "$methods" --sizes $half --seeds 1 --steps 2080 --block 256 --learning-rate 4e-3 \
        --save-models "${common[@]}" ;;
budget)
    compare "budget$BUDGET" --methods "$RATES" --sizes $half --seeds "${SEEDS:-5}" --steps $((104 * BUDGET)) --block 256 \
        --learning-rate 4e-3 --save-models "${common[@]}" ;;
context)
    compare context1024 --methods "$RATES" --sizes $half --seeds 3 --steps 2080 --block 1024 --learning-rate 4e-3 \
        "${common[@]}" --batch 4 --micro-batch 4 ;;
starts)
    for percent in ${FROM:-10 25 50 100}; do
        for seed in ${SEEDS:-0 1 2}; do
            compare "starts/$percent-$seed" --methods transformer --sizes $half --seeds 1 --first-seed $seed \
                --steps $((1221 * percent / 100)) --block 256 --learning-rate "$RATE" --schedule constant --save-models "${common[@]}"
        done
    done ;;
early)
    methods=resformer,denseformer,resformer-gated,value-embeddings,resformer:$middle
    for seed in ${SEEDS:-0 1 2}; do
        start=starts/$FROM-$seed/models/${half//[:=]/-}/transformer/$seed steps=$((1465 - 1221 * FROM / 100))
        recipe=(--seeds 1 --first-seed $((seed + 10)) --steps $steps --block 256 --learning-rate "$RATE"
            --connection-learning-rate "$RATE" --schedule wsd --decay "$(python -c "print(min(0.95, 244 / $steps))")" "${common[@]}")
        compare "early/$FROM-$seed" --from "$start" --methods "$methods" "${recipe[@]}"
        flock "$start" bash -c "[ -d $start-aligned ] || {
            resformer revert $start $start-llama && python ../../align_values.py $start-llama $start-aligned; }"
        compare "early/$FROM-$seed-aligned" --from "$start-aligned" --methods "resformer:$middle" "${recipe[@]}"
    done ;;
scratch)
    compare scratch --methods transformer,resformer,denseformer,resformer-gated,value-embeddings --sizes $half --seeds 3 --steps 1465 \
        --block 256 --learning-rate "$RATE" --schedule wsd --decay "$(python -c "print(244 / 1465)")" "${common[@]}" ;;
capacity)
    for seed in ${SEEDS:-0 1 2}; do
        start=starts/100-$seed/models/${half//[:=]/-}/transformer/$seed
        flock "$start" bash "$script" annealed "$seed" "$start"
        python ../../capacity.py "annealed/$seed/models/transformer-$seed/transformer/$((seed + 10))" "capacity/$seed" \
            --seed $((seed + 20)) --rate "$RATE"
    done ;;
annealed) # for `capacity`
    compare "annealed/$2" --from "$3" --methods transformer --seeds 1 --first-seed $(($2 + 10)) --steps 244 --block 256 \
        --learning-rate "$RATE" --schedule wsd --decay 0.95 --save-models "${common[@]}" ;;
five-rates)
    methods=$(swept "transformer resformer svformer denseformer" "4e-3 2e-3 8e-3"),$(swept "transformer resformer" 1e-3)
    compare five-rates --methods "$methods" --seeds 1 --steps 1221 --block 256 --learning-rate 2e-3 "${common[@]}" ;;
five)
    compare five --methods "$RATES" --seeds "${SEEDS:-5}" --steps 1221 --block 256 --learning-rate 2e-3 "${common[@]}" ;;
smollm2)
    recipe=(--data standard-library $TEXTS --held-out 0.05 --held-out-blocks 16 --block 512 --batch 8 --micro-batch 2 --bf16)
    arms=(resformer resformer-gated denseformer lora-values-1)
    python ../../capacity.py "$FROM" smollm2 --arms checkpoint "${recipe[@]}"
    for rate in 3e-3 1e-3 1e-2; do
        python ../../capacity.py "$FROM" "smollm2/$rate" --rate $rate --steps 61 --arms "${arms[@]}" "${recipe[@]}"
    done
    for seed in 0 1; do
        for rated in ${RATES:-}; do
            python ../../capacity.py "$FROM" "smollm2/seed-$seed" --seed $seed --rate "${rated#*:}" --steps 245 --arms "${rated%:*}" \
                "${recipe[@]}"
        done
    done ;;
*) sed -n '2,/^set/s/^# \?//p' "$script" >&2; exit 2 ;;
esac
