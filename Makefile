# The commands of Gannet: each makes sure of the private toolchain and hands over to `cargo xtask`.

KERNEL ?=
MACHINE ?=
MODULE ?=
PARAMETERS ?=
STOCK_PARAMETERS ?=
L1_PARAMETERS ?=
CPUS ?=
HOST_CPUS ?=
JSON ?=
REPORTS ?=
ONLY ?=
FILTER ?=
FROM ?=
COMMAND ?=
PROCESSOR ?=
PROGRAMS ?=
SECONDS ?=
SYMVERS ?=

# Any of these in the environment means something else to the tools below.
unexport KERNEL MACHINE MODULE PARAMETERS STOCK_PARAMETERS L1_PARAMETERS CPUS HOST_CPUS JSON REPORTS ONLY FILTER FROM COMMAND PROCESSOR PROGRAMS SECONDS SYMVERS

XTASK = @lab/xtask.sh

.PHONY: help run test bench mechanisms matrix boot try module harden fuzz sanitize deb vmms symbols setup clean

help:
	@echo 'Gannet: a hypervisor for Linux, as a module behind /dev/kvm'
	@echo
	@echo '  make run      set up, measure VM exits and boot a Linux guest, on stock KVM and on Gannet, side by side'
	@echo '  make test     format, lints, unit tests, module checks, lab tests; ends with "N passed, N failed"'
	@echo '  make bench    JSON=path        the measurements alone, written as JSON'
	@echo '  make mechanisms                every mechanism off and on, and stock KVM beside: writes docs/results'
	@echo '  make matrix                    what stock KVM and Gannet offer on each machine with each kernel: writes docs/results'
	@echo '  make boot     CPUS=2           boot a Linux guest on Gannet and stream its console'
	@echo "  make try      COMMAND='labtests --filter cpuid'   a shell command in one machine"
	@echo '  make module                    build gannet.ko and check it'
	@echo '  make harden   FILTER=part      the lab tests on a debug kernel (KASAN, lockdep, kmemleak ...), built once in 15 to 25 minutes'
	@echo '  make fuzz     SECONDS=60 ONLY=walk   coverage-guided fuzzing of the core on this machine, each target with an oracle'
	@echo '  make sanitize ONLY=thread      unit tests of the crates with locks and tables under AddressSanitizer and ThreadSanitizer'
	@echo '  make deb                       the package gannet-dkms: DKMS builds Gannet for each installed kernel'
	@echo '  make vmms                      QEMU, libvirt, perf, trace-cmd and the selftests of KVM, stock KVM beside: 25 minutes, root'
	@echo '  make symbols  SYMVERS=file     what a kernel no longer exports of that which Gannet takes, or restricts'
	@echo '  make setup                     fetch and unpack everything; the others fetch what they need'
	@echo '  make clean                     remove what was built and unpacked; downloads stay in the cache'
	@echo
	@echo 'Variables: KERNEL=6.12|6.1|7.3|6.12-debug (the host kernel), MACHINE=amd|intel|amd-nrip, MODULE=gannet|stock (boot),'
	@echo '           PARAMETERS="npt=0 keep_roots=0" of that module (boot) or of Gannet (bench; STOCK_PARAMETERS of stock,'
	@echo '           L1_PARAMETERS of the KVM in a Linux guest that is a hypervisor),'
	@echo '           ONLY=cpuid,rdmsr (run, bench) or targets (fuzz), address|thread (sanitize), FILTER=source|unit|module|lab|lab:part-of-a-name (test),'
	@echo "           REPORTS=folder for exitbench's own reports, such as exitbench compare and plot take (bench),"
	@echo '           FROM=docs/results/mechanisms.json for page and plots of an earlier run (mechanisms),'
	@echo '           GANNET_CACHE=folder for downloads (default ~/.cache/gannet)'

run:
	$(XTASK) run --machine '$(MACHINE)' --kernel '$(KERNEL)' --json '$(JSON)' --only '$(ONLY)'

test:
	$(XTASK) test --machine '$(MACHINE)' --filter '$(FILTER)'

bench:
	$(XTASK) bench --machine '$(MACHINE)' --kernel '$(KERNEL)' --json '$(JSON)' --reports '$(REPORTS)' --only '$(ONLY)' \
		--parameters '$(PARAMETERS)' --stock-parameters '$(STOCK_PARAMETERS)' --l1-parameters '$(L1_PARAMETERS)'

mechanisms:
	$(XTASK) mechanisms --machine '$(MACHINE)' --kernel '$(KERNEL)' --json '$(JSON)' --from '$(FROM)'

matrix:
	$(XTASK) matrix --machine '$(MACHINE)' --json '$(JSON)' --from '$(FROM)'

boot:
	$(XTASK) boot --machine '$(MACHINE)' --kernel '$(KERNEL)' --cpus '$(CPUS)' --host-cpus '$(HOST_CPUS)' --module '$(MODULE)' --parameters '$(PARAMETERS)'

try:
	$(XTASK) try --machine '$(MACHINE)' --kernel '$(KERNEL)' --host-cpus '$(HOST_CPUS)' --module '$(MODULE)' --parameters '$(PARAMETERS)' \
		--processor '$(PROCESSOR)' --seconds '$(SECONDS)' --programs '$(PROGRAMS)' --command '$(subst ','\'',$(COMMAND))'

module:
	$(XTASK) module --kernel '$(KERNEL)'

harden:
	$(XTASK) harden --machine '$(MACHINE)' --filter '$(FILTER)'

fuzz:
	$(XTASK) fuzz --seconds '$(SECONDS)' --only '$(ONLY)'

sanitize:
	$(XTASK) sanitize --only '$(ONLY)'

deb:
	$(XTASK) deb

vmms:
	@ONLY='$(ONLY)' tests/vmms/all.sh

symbols:
	$(XTASK) symbols --kernel '$(KERNEL)' --symvers '$(SYMVERS)'

setup:
	$(XTASK) setup

clean:
	rm -rf target
