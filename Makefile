# One door for people and CI. `make help` lists what there is; each line is what .ci/run calls, too.
PYTHON ?= python3
ONLY ?=
ARGS ?=
BIN := .venv/bin
CARGO_TARGET := --target x86_64-unknown-linux-gnu
SETUP := $(PYTHON) -m tools.setup

.PHONY: help setup demo test lab check format bench docs envd storaged guest base qemu10 lock clean

help: ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## everything that the rest needs; done by itself where it is needed
	@$(SETUP)

demo: ## set-up, the template `base`, and examples/demo.py against a server of its own
	@$(SETUP) --for demo
	@$(BIN)/python -m tools.demo

test: ## all tests: cargo test, then every pytest suite (ARGS="-k name" narrows it)
	@$(SETUP) --for test
	cargo test --workspace --locked $(CARGO_TARGET)
	$(BIN)/python -m pytest $(ARGS)

lab: ## tests that need KVM or ublk, in a virtual machine that has them (docs/guides/lab.md; ARGS="-k name")
	@$(SETUP) packages venv
	AENV_LAB=1 AENV_REQUIRE=lab,root,qemu $(BIN)/python -m pytest -s tests/lab $(ARGS)

check: ## format, lint, types, import rules, generated files
	@$(SETUP) --for check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.openapi --check
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked $(CARGO_TARGET) -- -D warnings

format: ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --select I .
	cargo fmt --all

bench: ## figures beside their floor; ONLY=group for one group. Writes bench/out/latest.json
	@$(SETUP) --for demo
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

docs: ## write the generated parts of docs and spec anew
	@$(SETUP) --for check
	$(BIN)/python -m tools.openapi
	$(BIN)/python -m tools.config_reference

envd: ## only the guest agent
	@$(SETUP) packages envd

storaged: ## only the storage daemon
	@$(SETUP) packages venv storaged

guest: ## only the guest kernel and initramfs
	@$(SETUP) packages venv envd guest

base: ## only the root file system of the template `base`
	@$(SETUP) packages base

qemu10: ## QEMU 10 from backports, unpacked beside the installed one; use it with AENV_QEMU=.cache/qemu10/qemu
	@sh tools/qemu10.sh .cache/qemu10

lock: ## write requirements/*.txt anew from pyproject.toml
	@sh tools/lock.sh

clean: ## remove what set-up built here; nothing outside this folder
	rm -rf .cache .venv target bench/out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
