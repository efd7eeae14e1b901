# The same commands everywhere: README, CONTRIBUTING and CI name only these.
CARGO ?= cargo
VENV  := target/python
# What users run. Built for itself, so that no feature of tests is on in it.
SHIPPED  := $(CARGO) build --profile dist --target-dir target/shipped
BINARIES := baton baton-router baton-prefill-worker baton-decode-worker
# Most tests wait for processes and deadlines more than they compute.
export RUST_TEST_THREADS ?= $(shell expr 2 '*' "$$(nproc)")

.PHONY: up test test-full test-k8s chaos lint bench bench-peers dist shipped setup model clients further-clients browser charts cuda cubins gpu-bundle

up: setup model ## Start a split cluster on this machine and serve the default model until Ctrl-C.
	$(CARGO) build --release --bins
	target/release/baton up $(ARGS)

test: setup model clients browser charts cubins ## Everything a change must pass; at most 35 minutes cold on 2 cores.
	$(CARGO) build --release --workspace --bins --tests
	$(CARGO) test --release --workspace
	tests/gpu/check dry-run

test-full: test further-clients ## All the rest: the longer runs, checks against further clients, etcd 3.6, Jaeger, a UCX with CUDA, and Kubernetes.
	scripts/build-jaeger target/jaeger
	$(CARGO) test --release --workspace -- --ignored
	WHOLE=1 tests/gpu/check dry-run
	$(MAKE) shipped
	$(CARGO) xtask hazards $(BINARIES:%=target/shipped/dist/%)
	$(CARGO) xtask hazards --present $(BINARIES:%=target/release/%)
	scripts/build-etcd target/etcd-3.6
	PATH="$(CURDIR)/target/etcd-3.6:$$PATH" $(CARGO) test --release --package baton-node --lib etcd
	PATH="$(CURDIR)/target/etcd-3.6:$$PATH" $(CARGO) test --release --package baton-tests --test etcd
	scripts/test-ucx-cuda target/ucx-cuda
	$(MAKE) test-k8s

test-k8s: setup model ## The chart on a real Kubernetes of one node, or on KUBECONFIG's with the images of REGISTRY and TAG.
	$(CARGO) build --release --package baton-tests --examples
	tests/kubernetes/run

chaos: setup model clients ## Breaks a whole cluster in every way for 15 minutes (BATON_CHAOS_SEED): tables on stdout, target/chaos.
	$(CARGO) build --release --workspace --bins
	$(CARGO) run --release --package baton-tests --example chaos

lint: setup ## Formatting, clippy, docs, style, structure, and what is linked.
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --workspace --no-deps --quiet
	$(CARGO) xtask tidy
	$(CARGO) codegen --check
	scripts/deny target/deny
	scripts/lint-images target/lint

bench: shipped model ## Measures the promises in one run, on what users run: table on stdout, target/bench/summary.json.
	$(SHIPPED) --package baton-kv-transfer --example put_bench
	$(CARGO) bench --profile dist --target-dir target/shipped --package baton-tests --bench cluster

bench-peers: setup model ## Installs OpenVINO GenAI and llama.cpp into target/peers: the parts `classes` and `clients` of the benchmark then measure them too.
	scripts/setup-peers target/peers

shipped: setup ## Builds the binaries as images and releases hold them: target/shipped/dist.
	$(SHIPPED) --package baton-cli --package baton-router --package baton-prefill-worker --package baton-decode-worker

dist: shipped cubins ## Packs the binaries of a release for hosts like this one and the GPU kernels, with checksums: target/dist.
	scripts/dist target/dist

setup: ## Installs what the build needs, where it is missing.
	scripts/setup

model: setup ## Fetches the default model into the user's cache.
	scripts/fetch-model

clients: setup ## The real clients and servers that tests talk with.
	scripts/setup-clients $(VENV)
	scripts/setup-etcd target/etcd

further-clients: setup ## Load generators, lm-eval and clients of gRPC, for `make test-full`: ten minutes and 8 GB, once.
	scripts/setup-further-clients target/clients

browser: clients ## A browser for the test of the router's page.
	scripts/setup-browser $(VENV)

cuda: setup ## The compiler of CUDA kernels: target/cuda. It needs no GPU.
	scripts/setup-cuda target/cuda

cubins: cuda ## Compiles the CUDA kernels for every target: target/cuda/packs.
	$(CARGO) xtask cubins

gpu-bundle: cuda ## What tests/gpu/check needs on a machine with a GPU: target/gpu-check.tar.xz.
	tests/gpu/check bundle target/gpu-check.tar.xz

charts: setup ## What tests render the Helm chart and read its alerts with: Helm is built once.
	scripts/setup-helm target/helm
	scripts/setup-prometheus target/prometheus
