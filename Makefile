# SPDX-License-Identifier: Apache-2.0
#
# natkit is one static binary made by the go command; the targets that need more
# than Go install it on Debian and Ubuntu (scripts/install-deps.sh).

VERSION := $(shell git describe --always --dirty --tags 2>/dev/null)
PREFIX  := /usr/local
# The demo makes network namespaces, which needs root.
SUDO    := $(shell test "$$(id -u)" = 0 || command -v sudo)

.PHONY: help build demo test race bench lint generate man schema test-long test-carrier test-who test-collectors test-kernels test-kernels-short check-instructions packages test-packages image test-kubernetes test-boot test-night test-day test-soak test-arm64 install clean

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

build: ## build ./natkit
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w -X main.release=$(VERSION)' -o natkit ./cmd/natkit

demo: build ## build, then show the whole case on this machine, in namespaces of its own
	$(SUDO) ./natkit demo

test: ## run the tests; without root those that can, and say what was left out
	@scripts/install-deps.sh test
	@scripts/test.sh -short

test-long: ## run what make test leaves out or shortens because it takes long, whole
	@scripts/install-deps.sh test
	@scripts/test.sh -long

race: ## the same under the race detector, which needs gcc
	@scripts/install-deps.sh test race
	@CGO_ENABLED=1 scripts/test.sh -race -short

bench: ## run the benchmarks of the packages
	go test -run '^$$' -bench . -benchmem ./...

lint: ## check formatting, vet, staticcheck, scripts and C
	@scripts/install-deps.sh lint
	@scripts/lint.sh

generate: ## rebuild the eBPF objects from bpf/ with the one compiler they are pinned to
	@scripts/install-deps.sh generate
	go generate ./...

man: ## rewrite docs/natkit.8 from the command tree
	go test ./cmd/natkit -run '^TestManPage$$' -update

schema: ## rewrite docs/schema and the list of kinds in docs/json.md from the types
	go test ./internal/ui/report -run '^TestSchemas$$' -update

test-carrier: ## every session of a million is the same through changes of blocks, classes, limits and addresses: minutes, as root
	NATKIT_FLOWS=1000000 go test ./internal/bench -run '^TestHitlessChange$$' -v

test-who: ## ask natkit who 10 000 times what was on the wire, around kills, set clocks and replaced rules (ROUNDS=10: longer): minutes, as root
	NATKIT_ROUNDS=$(or $(ROUNDS),1) go test -count=1 -v -timeout 3h ./cmd/natkit -run '^(TestWhoIsWhoWas|TestWhoInTrouble)$$'

test-collectors: ## read the log with chDB, DuckDB, pandas, goflow2, rsyslog, syslog-ng and from a Kafka broker: downloads 1 GB once, then takes 5 minutes
	@scripts/install-deps.sh collectors
	@scripts/test-collectors.sh

test-kernels: ## run the tests of the kernel parts on Linux 6.1 and 6.12 in qemu: hours; writes docs/kernels.md
	@scripts/install-deps.sh kernels
	@scripts/test-kernels.sh

test-kernels-short: ## run one life of each engine and packet tests on Linux 6.1 in qemu: minutes
	@scripts/install-deps.sh compare kernels
	@scripts/test-kernels.sh -s

check-instructions: ## count the instructions of the hot paths in qemu; more than docs/bench.md has fail
	@scripts/install-deps.sh kernels
	@scripts/check-instructions.sh

packages: ## make .deb, .rpm, the bare binaries, bill of materials and checksums below dist/
	@scripts/packages.sh

test-packages: ## install, upgrade under traffic, remove and purge the packages on a bare Debian of their own; needs root
	@scripts/install-deps.sh packages
	@scripts/test-packages.sh

image: ## make a container image below dist/, without Docker
	@scripts/image.sh

test-night: ## faults at random times on a busy router for 20 minutes (NIGHT=35m: longer), and what the history shows of them; needs root
	NATKIT_NIGHT=$(or $(NIGHT),20m) go test -count=1 -v -timeout 3h ./internal/scenario -run '^TestLongNight$$'

test-day: ## healthy machines under bursts of load for an hour (DAY=8h: longer), and that natkit monitor warns of nothing; needs root
	NATKIT_DAY=$(or $(DAY),1h) go test -count=1 -v -timeout 25h ./internal/scenario -run '^TestLongDay$$'

test-soak: ## an hour of changing load under natkit monitor --tune apply (SOAK=20m: shorter), and each change in its history; needs root
	NATKIT_SOAK=$(or $(SOAK),1h) go test -count=1 -v -timeout 3h ./cmd/natkit -run '^TestTuneSoak$$'

test-kubernetes: ## run the monitor against a real kube-apiserver, built once in 20 minutes; needs root
	@scripts/install-deps.sh kubernetes
	@scripts/test-kubernetes.sh

test-boot: ## boot a Debian with the package in qemu, reboot it, look what is back; needs root, takes minutes
	@scripts/install-deps.sh packages kernels
	@scripts/test-boot.sh

test-arm64: ## run the arm64 build on an emulated machine: load every eBPF object, translate; needs root, takes minutes
	@scripts/install-deps.sh packages arm64
	@scripts/test-arm64.sh

install: build ## install natkit, its man page and units below PREFIX (/usr/local)
	install -D -m 755 natkit $(DESTDIR)$(PREFIX)/bin/natkit
	install -D -m 644 docs/natkit.8 $(DESTDIR)$(PREFIX)/share/man/man8/natkit.8
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in deploy/systemd/*.service; do sed 's#/usr/bin/natkit#$(PREFIX)/bin/natkit#' $$unit >$(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/}; done

clean: ## remove what the other targets left in this folder
	rm -rf --one-file-system natkit dist .cache
