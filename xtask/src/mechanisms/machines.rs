//! Which runs of its machines `make mechanisms` starts, and what runs on each: every mechanism with its switch off and on, and stock KVM beside.

use gannet_lab::{Machine as On, Module};

/// Numbers of pages that the guest maps for the role toggles.
pub const PAGES: [u64; 5] = [1, 10, 100, 1000, 10_000];

/// The role toggles and the switch of CR3, each at every number of pages.
pub const TOGGLES: [&str; 5] = ["cr0_wp", "cr4_pge", "cr4_smep", "efer_nx", "cr3_switch"];

/// The Linux guest's task that forks.
pub const FORKS: &str = "forks";

/// The workload that sets deadlines anew before they expire.
pub const TIMER: &str = "timer_rearm";

/// The Linux guest's task of two tasks that answer each other.
pub const PINGPONG: &str = "pingpong";

/// Something that one machine does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// `exitbench run` with these arguments.
    Bench(String),
    /// A task of the Linux guest, measured from one line on its console to another; with more for its kernel's command line.
    Guest { task: &'static str, more: &'static str, from: &'static str, to: &'static str },
}

/// One machine.
#[derive(Clone, Debug)]
pub struct Machine {
    pub module: Module,
    pub parameters: &'static str,
    pub parts: Vec<Part>,
}

impl Machine {
    fn new(
        module: Module,
        parameters: &'static str,
        parts: impl IntoIterator<Item = Part>,
    ) -> Self {
        Self { module, parameters, parts: parts.into_iter().collect() }
    }

    /// What a progress display calls it.
    pub fn title(&self) -> String {
        self.module.with(self.parameters)
    }
}

/// Workloads that have no number of pages; all of them when there are no names. The guest uses a lazy TSC deadline where one is offered.
fn plain(names: &str) -> Part {
    let counts = "--iterations 100 --warm-up 10 --marker-iterations 100";
    Part::Bench(format!("{names} --lazy-timer {counts}"))
}

/// The toggles as the guest's page tables grow, with a small part of the pages written to after each. What counts is the steady state:
/// under shadow paging, which is on `amd` alone, the first hundred flushes still compare guest tables that are then write-protected
/// because they never change.
fn few(on: On) -> Part {
    let pages = PAGES.map(|n| n.to_string()).join(",");
    let counts = match on {
        On::Amd => "--warm-up 200 --iterations 50 --marker-iterations 500",
        On::Intel => "--warm-up 20 --iterations 20 --marker-iterations 20",
    };
    Part::Bench(format!("--pages {pages} {counts}"))
}

/// The toggle with which every page is written to: one that both modules are left for on this machine.
pub fn dear_toggle(on: On) -> &'static str {
    match on {
        On::Amd => "cr0_wp",
        On::Intel => "efer_nx",
    }
}

/// The same with every page written to after each: what was thrown away is built again. Few operations, as some take millions of
/// instructions.
fn all(on: On) -> [Part; 2] {
    let toggle = dear_toggle(on);
    let part = |pages: &str, counts: &str| {
        Part::Bench(format!("{toggle} --pages {pages} --touch all {counts}"))
    };
    [
        part("10,100,1000", "--iterations 6 --warm-up 2 --marker-iterations 4"),
        part("10000", "--iterations 3 --warm-up 1 --marker-iterations 2"),
    ]
}

fn forks() -> Part {
    Part::Guest { task: FORKS, more: "", from: "GANNET-FORKS-BEGIN", to: "GANNET-FORKS-END" }
}

/// With the guest's module for lazy deadlines, or without.
fn pingpong(more: &'static str) -> Part {
    Part::Guest { task: PINGPONG, more, from: "GANNET-PINGPONG-BEGIN", to: "GANNET-PINGPONG-END" }
}

/// The rounds of the ping-pong, and the sleeps whose lateness it measures: on `amd` enough for a percentile of 99.9, on `intel`, which is
/// several times as slow, for one of 99. Stock KVM's lateness is held against nothing, and takes less time so.
pub struct PingPong {
    pub rounds: u64,
    pub sleeps: u64,
    pub stock_sleeps: u64,
    lazy: &'static str,
    not_lazy: &'static str,
    stock: &'static str,
}

pub fn ping_pong(on: On) -> PingPong {
    match on {
        On::Amd => PingPong {
            rounds: 8000,
            sleeps: 10_000,
            stock_sleeps: 1000,
            lazy: "gannet.rounds=8000 gannet.sleeps=10000 gannet.lazy=1",
            not_lazy: "gannet.rounds=8000 gannet.sleeps=10000 gannet.lazy=0",
            stock: "gannet.rounds=8000 gannet.sleeps=1000 gannet.lazy=0",
        },
        On::Intel => PingPong {
            rounds: 2000,
            sleeps: 1000,
            stock_sleeps: 100,
            lazy: "gannet.rounds=2000 gannet.sleeps=1000 gannet.lazy=1",
            not_lazy: "gannet.rounds=2000 gannet.sleeps=1000 gannet.lazy=0",
            stock: "gannet.rounds=2000 gannet.sleeps=100 gannet.lazy=0",
        },
    }
}

/// Everything that runs on a machine, the longest first, so that two at a time end together. What has the same module and parameters
/// shares a run.
pub fn machines(on: On) -> Vec<Machine> {
    use Module::{Gannet, Stock};
    let toggles =
        |more: Vec<Part>| more.into_iter().chain([few(on)]).chain(all(on)).collect::<Vec<_>>();
    let PingPong { lazy, not_lazy, stock, .. } = ping_pong(on);
    let xstate = "cpuid hlt_loop xsetbv cr4_osxsave";
    match on {
        On::Amd => vec![
            Machine::new(Gannet, "", [pingpong(lazy)]),
            Machine::new(Gannet, "lazy_tscdeadline=0", [pingpong(not_lazy), plain(TIMER)]),
            Machine::new(Stock, "npt=0", toggles(vec![forks(), plain("nothing hlt_loop cpuid")])),
            Machine::new(Gannet, "npt=0", toggles(vec![forks(), plain("")])),
            Machine::new(Stock, "", toggles(vec![pingpong(stock), plain("")])),
            Machine::new(Gannet, "npt=0 keep_roots=0", toggles(vec![])),
            Machine::new(Gannet, "keep_roots=0", toggles(vec![])),
            Machine::new(Gannet, "", toggles(vec![plain("")])),
            Machine::new(Stock, "kvm.tdp_mmu=0", [few(on)]),
            Machine::new(Gannet, "xstate_cache=0", [plain(xstate)]),
            Machine::new(Gannet, "host_state=msr", [plain("hlt_loop cpuid pio_user")]),
        ],
        On::Intel => vec![
            Machine::new(Gannet, "", [pingpong(lazy)]),
            Machine::new(Gannet, "lazy_tscdeadline=0", [pingpong(not_lazy), plain(TIMER)]),
            Machine::new(Stock, "", [pingpong(stock)]),
            Machine::new(Gannet, "keep_roots=0", toggles(vec![])),
            Machine::new(Stock, "", toggles(vec![plain("")])),
            Machine::new(Gannet, "", toggles(vec![plain("")])),
            Machine::new(Gannet, "xstate_cache=0", [plain(xstate)]),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gannet_lab::MACHINES;

    #[test]
    fn nothing_is_measured_twice_under_the_same_parameters() {
        for on in MACHINES {
            let machines = machines(on);
            let parts = machines
                .iter()
                .flat_map(|m| m.parts.iter().map(|part| format!("{} {part:?}", m.title())));
            let mut all: Vec<_> = parts.collect();
            let count = all.len();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count);
        }
    }

    #[test]
    fn the_guests_are_told_what_the_page_says() {
        for on in MACHINES {
            let it = ping_pong(on);
            let told = |words: &str, sleeps: u64| {
                assert!(words.contains(&format!("gannet.rounds={} ", it.rounds)), "{words}");
                assert!(words.contains(&format!("gannet.sleeps={sleeps} ")), "{words}");
            };
            told(it.lazy, it.sleeps);
            told(it.not_lazy, it.sleeps);
            told(it.stock, it.stock_sleeps);
        }
    }
}
