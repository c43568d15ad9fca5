#!/usr/bin/env bash
# Checks and times the GPU groups; each group ends within nine minutes.
#   benchmarks/gpu.sh OUT [probe|checks|figures|speed|pal|plan|quote|start|tiers|rows|peer] [MODEL...]
# probe: the probe against itself, an independent measurement and ncu; the checks of facts, counters and device operations.
# checks: what is right or wrong, beside each other. figures: the checks that also time or count what is recorded, each with the card to itself.
# pal: step model, the ablation's twelve cells in one run, another card's profile. plan: plan quality, a small card out of this one;
# quicker after pal on the same machine, whose kernels are timed by then.
# peer: ours and transformers in the same minutes; without MODEL the two small ones, each with half of the time.
# The raw results and logs go to OUT/GROUP.tar, packed anew every few seconds and at the end, so that a run that is
# cut off has left them; benchmarks.record_gpu records the *.json in it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the raw results}
group=${2:-checks}
shift $(($# < 2 ? $# : 2))
models=${*:-qwen3-0.6b llama-3.2-1b qwen3-8b}
export PYTHONPATH=".:benchmarks:tests/gpu:clients/python:clients/text:clients/cli:controller:gpu_agent:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$(mktemp -d)
failed=0
pack() { mkdir -p "$out" && tar -cf "$out/.$group.$BASHPID" -C "$work" . ; mv "$out/.$group.$BASHPID" "$out/$group.tar"; }
# Without our output: who reads it waits until nobody has it any more.
(while sleep "${PACK_SECONDS:-15}"; do pack; done) < /dev/null &> /dev/null &
packer=$!
# The last one by us: the packer may have begun its own before the last result came.
trap 'kill $packer; wait $packer; pack; rm -rf "$work" "$out/.$group."*' EXIT
run() { echo "== $*"; timeout "${LIMIT:-280}" "$@" || { echo "FAILED ($?): $*"; failed=1; }; }
# Beginnings of the names of checks whose figures are recorded.
figures=determinism,kv_fp8,overlap,tiers,embedding,sampling_gpu,submit_gpu
if [ "$group" = checks ]; then
  OUT="$work" LIMIT=530 run python3 -m benchmarks.gpu_checks "$work" --models "${models// /,}" --skip "$figures" --seconds 500
elif [ "$group" = figures ]; then
  OUT="$work" LIMIT=530 run python3 -m benchmarks.gpu_checks "$work" --models "${models// /,}" --only "$figures" --seconds 510
elif [ "$group" = probe ]; then
  LIMIT=260 run python3 tests/gpu/check_probe.py --out "$work"
  OUT="$work" LIMIT=150 run python3 -m benchmarks.gpu_checks "$work" --only facts,indices,device --seconds 140
elif [ "$group" = quote ]; then
  LIMIT=400 run python3 -m benchmarks.quote --device cuda --out "$work/quote.json"
elif [ "$group" = tiers ]; then
  LIMIT=200 run python3 tests/gpu/check_tiers.py qwen3-0.6b --out "$work/tiers-qwen3-0.6b.json"
  LIMIT=200 run python3 -m benchmarks.tiers --device cuda --tier host --model random:qwen3-8b --tokens 8192 --out "$work/tiers.json"
elif [ "$group" = rows ]; then
  LIMIT=150 run python3 -m benchmarks.row_kernels_gpu
  LIMIT=60 run python3 -m benchmarks.submit_gpu --out "$work/submit_gpu.json"
  LIMIT=60 run python3 -m benchmarks.sampling_gpu --kernels --out "$work/sampling_gpu.json"
  LIMIT=90 run python3 -m benchmarks.prefill_kernels_gpu
  LIMIT=90 run python3 -m benchmarks.step_kernels_gpu "${models%% *}"
elif [ "$group" = start ]; then
  run python3 -m benchmarks.start_gpu qwen3-0.6b --out "$work/start.json"
  LIMIT=120 run python3 -m benchmarks.start_profile_gpu qwen3-0.6b
elif [ "$group" = peer ]; then
  names=(${*:-qwen3-0.6b llama-3.2-1b})
  begun=0
  for model in "${names[@]}"; do
    begun=$((begun + 1))
    LIMIT=130 run python3 -m benchmarks.engine_gpu "$model" --benches decode,prefill --out "$work/$model.json"
    ours=()
    [ -e "$work/$model.json" ] && ours=(--ours "$work/$model.json")
    # Each model ends with its share of the time; 20 s are an end too, where a limit of 0 would be none.
    left=$((530 * begun / ${#names[@]} - SECONDS))
    left=$((left > 20 ? left : 20))
    LIMIT=$left run python3 -m benchmarks.peer_transformers "$model" "${ours[@]}" --seconds $((left - 8)) --out "$work/$model-transformers.json"
  done
elif [ "$group" = pal ]; then
  LIMIT=530 run python3 -m benchmarks.pal_gpu $models --only step_model,ablation,wrong_profile --out "$work" --seconds 470
elif [ "$group" = plan ]; then
  LIMIT=390 run python3 -m benchmarks.pal_gpu $models --only plan_quality --out "$work" --seconds 330
  DRAGOMAN_SM_LIMIT=24 DRAGOMAN_MEMORY_LIMIT=8000000000 LIMIT=140 run python3 -m benchmarks.small_card qwen3-0.6b \
    --whole-timings "$work/timings.json" --out "$work"
else
  for model in $models; do LIMIT=150 run python3 -m benchmarks.engine_gpu "$model" --out "$work/$model.json"; done
  LIMIT=70 run python3 -m benchmarks.embed_gpu --out "$work/embed.json"
fi
exit $failed
