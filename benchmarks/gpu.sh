#!/usr/bin/env bash
# Checks and times the GPU groups; each group ends within nine minutes.
#   benchmarks/gpu.sh OUT [probe|checks|speed|pal] [MODEL...]     raw results go to OUT/*.json; benchmarks.record_gpu records them
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the raw results}
group=${2:-checks}
shift $(($# < 2 ? $# : 2))
models=${*:-qwen3-0.6b llama-3.2-1b qwen3-8b}
export PYTHONPATH=".:benchmarks:tests/gpu:clients/python:clients/text:clients/cli:gpu_agent:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
run() { echo "== $*"; timeout "${LIMIT:-280}" "$@" || { echo "FAILED ($?): $*"; failed=1; }; }
if [ "$group" = checks ]; then
  for dtype in bfloat16 float16; do run python3 tests/kernels/triton/check_ops.py cuda "$dtype"; done
  [ -f tests/gpu/check_sampling.py ] && run python3 tests/gpu/check_sampling.py
  [ -n "${EMBEDDED_MODEL:-}" ] && run python3 tests/gpu/check_engine.py "$EMBEDDED_MODEL"
  run python3 tests/gpu/check_features.py qwen3-0.6b
  run python3 tests/gpu/check_device.py
  for model in $models; do run python3 tests/gpu/check_parity.py "$model"; done
elif [ "$group" = probe ]; then
  run python3 tests/gpu/check_probe.py --out "$out"
elif [ "$group" = pal ]; then
  LIMIT=450 run python3 -m benchmarks.pal_gpu $models --out "$out" --seconds 390
  DRAGOMAN_SM_LIMIT=24 DRAGOMAN_MEMORY_LIMIT=8000000000 LIMIT=90 run python3 -m benchmarks.small_card qwen3-0.6b \
    --whole-timings "$out/timings.json" --out "$out"
else
  for model in $models; do run python3 -m benchmarks.engine_gpu "$model" --out "$out/$model.json"; done
fi
exit $failed
