# The same commands everywhere: README, CONTRIBUTING and CI name only these.
CARGO ?= cargo
VENV  := target/python

.PHONY: up test test-full test-k8s chaos lint bench dist setup model clients charts doc

up: setup model ## Start a split cluster on this machine and serve the default model until Ctrl-C.
	$(CARGO) build --release --bins
	target/release/baton up $(ARGS)

test: setup model clients charts ## Everything a change must pass; under 25 minutes cold on 2 cores.
	$(CARGO) build --release --workspace --bins --tests
	$(CARGO) test --release --workspace

test-full: test ## All the rest: the longer runs, checks against further clients, etcd 3.6, Jaeger, a UCX with CUDA, and Kubernetes.
	scripts/build-jaeger target/jaeger
	$(CARGO) test --release --workspace -- --ignored
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

lint: setup ## Formatting, clippy, docs, style and structure.
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --workspace --no-deps --quiet
	$(CARGO) xtask tidy
	$(CARGO) codegen --check
	scripts/lint-images target/lint

bench: setup model ## Measures the promises in one run: table on stdout, target/bench/summary.json.
	$(CARGO) build --release --workspace --bins
	$(CARGO) build --release --package baton-kv-transfer --example put_bench
	$(CARGO) bench --package baton-tests --bench cluster

dist: setup ## Packs the binaries of a release for hosts like this one, with checksums: target/dist.
	$(CARGO) build --release --bins
	scripts/dist target/dist

setup: ## Installs what the build needs, where it is missing.
	scripts/setup

model: setup ## Fetches the default model into the user's cache.
	scripts/fetch-model

clients: setup ## The real clients and servers that tests talk with.
	scripts/setup-clients $(VENV)
	scripts/setup-etcd target/etcd

charts: setup ## What tests render the Helm chart and read its alerts with: Helm is built once.
	scripts/setup-helm target/helm
	scripts/setup-prometheus target/prometheus
