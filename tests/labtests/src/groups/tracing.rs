//! What a host's administrator sees: debugfs, tracepoints, histograms.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::statistics::{VCPU, of_vm};
use crate::kvm::file::{Commands, System};
use crate::machine::code::{done, guest_code, hypercall};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::FREE;
use crate::oracle::{self, Vendor};
use crate::outcome::{Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("tracing":
    debugfs_has_a_file_for_each_of_kvms_numbers,
    debugfs_totals_are_sums_over_the_vms,
    every_file_of_debugfs_is_a_number,
    a_vcpus_directory_tells_of_its_tsc,
    a_vms_directory_goes_with_its_last_file,
    a_directory_that_is_there_already_floods_no_log,
    a_file_that_is_held_open_outlives_its_vm_harmlessly,
    debugfs_tells_exits_by_reason,
    cycles_are_told_while_they_are_switched_on,
    the_events_have_the_fields_that_tools_know,
    the_events_are_printed_as_tools_know_them,
    entries_and_exits_are_traced_in_turn,
    what_exits_ask_for_is_traced,
    listening_may_begin_and_end_while_a_guest_runs,
);

guest_code!(
    work,
    64,
    "mov $3, %esi",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "dec %esi",
    "jnz 0b",
    "mov $0x174, %ecx",
    "mov $0x10, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0x3b, %ecx",
    "xor %eax, %eax",
    "wrmsr",
    "mov $77, %eax",
    hypercall!(),
    "mov NOWHERE, %eax",
    "mov %eax, NOWHERE",
    "in $PORT_MARK, %al",
    done!()
);
guest_code!(until_told, 64, "sti", "0: xor %eax, %eax", "cpuid", "cmpq $0, FREE", "je 0b", done!());

const DEBUG: &str = "/sys/kernel/debug/kvm";

fn debugfs() -> Outcome<&'static Path> {
    let path = Path::new(DEBUG);
    if path.is_dir() { Ok(path) } else { skip("no debugfs here") }
}

fn directory_of(guest: &Guest) -> Outcome<PathBuf> {
    // SAFETY: no arguments.
    let me = unsafe { libc::gettid() };
    Ok(debugfs()?.join(format!("{me}-{}", guest.vm.descriptor())))
}

fn number(path: &Path) -> Outcome<u64> {
    match fs::read_to_string(path) {
        Ok(text) => text.trim().parse().or_else(|_| fail(format!("{path:?} shows {text:?}"))),
        Err(error) => fail(format!("{path:?}: {error}")),
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    of_vm().into_iter().chain(VCPU).map(|(name, ..)| name)
}

fn debugfs_has_a_file_for_each_of_kvms_numbers() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Kernel, crate::machine::guest::Mode::Long, 2, work())?;
    let directory = directory_of(&guest)?;
    for name in names() {
        number(&directory.join(name))?;
        number(&debugfs()?.join(name))?;
    }
    for vcpu in ["vcpu0", "vcpu1"] {
        holds("a directory per vCPU", directory.join(vcpu).is_dir(), vcpu)?;
    }
    Ok(())
}

fn debugfs_totals_are_sums_over_the_vms() -> Outcome {
    let guests = [Guest::new(Chip::None, work())?, Guest::new(Chip::None, work())?];
    let exits = debugfs()?.join("io_exits");
    let before = number(&exits)?;
    for guest in &guests {
        while !guest.exit()?.is_out(crate::machine::layout::PORT_DONE) {}
    }
    let each: Vec<u64> = guests
        .iter()
        .map(|guest| number(&directory_of(guest)?.join("io_exits")))
        .collect::<Outcome<_>>()?;
    equal("port exits of each", each, vec![2, 2])?;
    equal("growth of the total", number(&exits)? - before, 4)
}

/// kvm_stat takes each file there for a counter.
fn every_file_of_debugfs_is_a_number() -> Outcome {
    let Ok(files) = fs::read_dir(debugfs()?) else { return fail("debugfs cannot be listed") };
    for file in files.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        let text = fs::read_to_string(&file).unwrap_or_default();
        // A histogram has several.
        let numbers = text.split_whitespace().all(|word| word.parse::<u64>().is_ok());
        holds("numbers", numbers && !text.is_empty(), &file)?;
    }
    Ok(())
}

/// What trace-cmd reads to bring the events of a guest and its host together.
fn a_vcpus_directory_tells_of_its_tsc() -> Outcome {
    for chip in [Chip::None, Chip::Kernel] {
        let guest = Guest::new(chip, work())?;
        let directory = directory_of(&guest)?.join("vcpu0");
        let text = |name: &str| fs::read_to_string(directory.join(name)).ok();
        equal("guest_mode", text("guest_mode").as_deref(), Some("0\n"))?;
        let offset = text("tsc-offset").unwrap_or_default();
        holds(
            "a TSC that began behind the host's",
            offset.trim().parse().is_ok_and(|n: i64| n < 0),
            offset,
        )?;
        let advance = text("lapic_timer_advance_ns");
        equal("an APIC's timer", advance.is_some(), chip == Chip::Kernel)?;
        let bits = if oracle::vendor() == Vendor::Amd { 32 } else { 48 };
        let scales = System::open()?.extension(kvm_bindings::KVM_CAP_TSC_CONTROL) > 0;
        let expected = scales.then(|| (format!("{}\n", 1u64 << bits), format!("{bits}\n")));
        let got = text("tsc-scaling-ratio").zip(text("tsc-scaling-ratio-frac-bits"));
        equal("ratio and its fractional bits", got, expected)?;
    }
    Ok(())
}

fn a_vms_directory_goes_with_its_last_file() -> Outcome {
    let guest = Guest::new(Chip::None, work())?;
    let directory = directory_of(&guest)?;
    holds("a directory", directory.is_dir(), &directory)?;
    let Guest { vcpus, vm, .. } = guest;
    drop(vm);
    holds("a directory while a vCPU is open", directory.is_dir(), &directory)?;
    drop(vcpus);
    holds("no directory", !directory.exists(), &directory)
}

/// A VM is named by its creator and its descriptor; both may serve again while it lives.
fn a_directory_that_is_there_already_floods_no_log() -> Outcome {
    const TIMES: usize = 50;
    debugfs()?;
    let all = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
    let Ok(mut log) = all else { return skip("no /dev/kmsg here") };
    holds("the log's end", log.seek(SeekFrom::End(0)).is_ok(), log.as_raw_fd())?;
    let system = System::open()?;
    let first = system.create_vm()?;
    let descriptor = first.descriptor();
    // SAFETY: a descriptor of ours, which is closed by its owner next.
    let kept = unsafe { OwnedFd::from_raw_fd(libc::dup(descriptor)) };
    drop(first);
    for _ in 0..TIMES {
        equal("the descriptor", system.create_vm()?.descriptor(), descriptor)?;
    }
    drop(kept);
    let mut line = [0; 4096];
    let mut lines = 0;
    loop {
        match log.read(&mut line) {
            Ok(length) => {
                lines += usize::from(String::from_utf8_lossy(&line[..length]).contains("kvm"));
            }
            // Lines were lost, so there were many.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => lines += TIMES,
            Err(_) => break,
        }
    }
    // Stock KVM says so, but not each time.
    holds("few lines", lines <= oracle::documented(0, TIMES / 2), lines)
}

fn a_file_that_is_held_open_outlives_its_vm_harmlessly() -> Outcome {
    let guest = Guest::new(Chip::None, work())?;
    let Ok(mut file) = fs::File::open(directory_of(&guest)?.join("exits")) else {
        return fail("expected exits in debugfs got nothing");
    };
    let mut text = String::new();
    holds("a number", file.read_to_string(&mut text).is_ok(), file.as_raw_fd())?;
    drop(guest);
    let _ = file.seek(SeekFrom::Start(0));
    let again = file.read_to_string(&mut text).map_err(|e| e.raw_os_error());
    // In stock KVM an open file keeps its VM alive.
    equal("a read after the VM's end", again, oracle::documented(Err(Some(libc::EIO)), Ok(0)))
}

/// The rows of a table in debugfs, without its head.
fn rows(path: &Path) -> Outcome<Vec<Vec<String>>> {
    let Ok(text) = fs::read_to_string(path) else { return fail(format!("no {path:?}")) };
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    Ok(text.lines().skip(1).map(words).collect())
}

fn own_tables(guest: &Guest) -> Outcome<PathBuf> {
    if oracle::is_stock() {
        return skip("Gannet's own");
    }
    directory_of(guest)
}

fn debugfs_tells_exits_by_reason() -> Outcome {
    let guest = Guest::new(Chip::None, work())?;
    let directory = own_tables(&guest)?;
    while !guest.exit()?.is_out(crate::machine::layout::PORT_DONE) {}
    for path in ["exit_reasons", "vcpu0/exit_reasons"] {
        let table = rows(&directory.join(path))?;
        let of = |reason: &str| table.iter().find(|row| row[0] == reason).cloned();
        let row = |name: &str, a: &str, b: &str| Some(vec![name.into(), a.into(), b.into()]);
        equal(path, of("cpuid"), row("cpuid", "3", "3"))?;
        equal(path, of("io"), row("io", "2", "0"))?;
        equal(path, of("shutdown"), None)?;
    }
    Ok(())
}

/// The switch of the histograms, under Gannet's own name and under KVM's.
const SWITCHES: [&str; 2] =
    ["/sys/module/gannet/parameters/exit_histograms", "/sys/module/kvm/parameters/exit_histograms"];

fn cycles_are_told_while_they_are_switched_on() -> Outcome {
    let guest = Guest::new(Chip::None, until_told())?;
    let table = own_tables(&guest)?.join("vcpu0/exit_cycles");
    let told = || -> Outcome<u64> {
        let rows = rows(&table)?;
        Ok(rows.iter().filter(|r| r[0] == "cpuid").filter_map(|r| r[2].parse::<u64>().ok()).sum())
    };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| guest.finish());
        let switch = SWITCHES.iter().find(|file| fs::exists(file).is_ok_and(|there| there));
        let switched = |on: &str| switch.is_some_and(|file| fs::write(file, on).is_ok());
        let mut all = Ok(());
        for _ in 0..5 {
            all = all.and_then(|()| {
                holds("the switch", switched("1"), SWITCHES)?;
                let before = told()?;
                let grown =
                    crate::machine::threads::within(std::time::Duration::from_secs(2), || {
                        told().is_ok_and(|now| now > before)
                    });
                holds("cycles of CPUID", grown, before)?;
                holds("the switch", switched("0"), SWITCHES)?;
                std::thread::sleep(std::time::Duration::from_millis(5));
                let still = told()?;
                std::thread::sleep(std::time::Duration::from_millis(5));
                equal("cycles of CPUID while it is off", told()?, still)
            });
        }
        let _ = switched("0");
        guest.memory.write(FREE, 1_u64);
        let ended = run.join().unwrap_or_else(|_| fail("the vCPU's thread"));
        all.and(ended)
    })
}

const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

fn tracefs() -> Outcome<PathBuf> {
    let here = TRACEFS.iter().map(Path::new).find(|path| path.join("events").is_dir());
    match here {
        Some(path) => Ok(path.into()),
        None => skip("no tracefs here"),
    }
}

/// The events that there are here: their fields (type, name, size), and how they are printed.
const EVENTS: [(&str, &[&str], &str); 9] = [
    (
        "kvm_entry",
        &["unsigned int vcpu_id 4", "unsigned long rip 8", "bool immediate_exit 1"],
        r#""vcpu %u, rip 0x%lx%s", REC->vcpu_id, REC->rip, REC->immediate_exit ? "[immediate exit]" : """#,
    ),
    (
        "kvm_exit",
        &[
            "unsigned int exit_reason 4",
            "unsigned long guest_rip 8",
            "u32 isa 4",
            "u64 info1 8",
            "u64 info2 8",
            "u32 intr_info 4",
            "u32 error_code 4",
            "unsigned int vcpu_id 4",
        ],
        r#""vcpu %u reason %s%s%s rip 0x%lx info1 0x%016llx info2 0x%016llx intr_info 0x%08x error_code 0x%08x", REC->vcpu_id, (REC->isa == 1) ? __print_symbolic(REC->exit_reason & 0xffff, { 0, "EXCEPTION_NMI" }"#,
    ),
    (
        "kvm_pio",
        &[
            "unsigned int rw 4",
            "unsigned int port 4",
            "unsigned int size 4",
            "unsigned int count 4",
            "unsigned int val 4",
        ],
        r#""pio_%s at 0x%x size %d count %d val 0x%x %s", REC->rw ? "write" : "read", REC->port, REC->size, REC->count, REC->val, REC->count > 1 ? "(...)" : """#,
    ),
    (
        "kvm_mmio",
        &["u32 type 4", "u32 len 4", "u64 gpa 8", "u64 val 8"],
        r#""mmio %s len %u gpa 0x%llx val 0x%llx", __print_symbolic(REC->type, { 0, "unsatisfied-read" }, { 1, "read" }, { 2, "write" }), REC->len, REC->gpa, REC->val"#,
    ),
    (
        "kvm_msr",
        &["unsigned write 4", "u32 ecx 4", "u64 data 8", "u8 exception 1"],
        r#""msr_%s %x = 0x%llx%s", REC->write ? "write" : "read", REC->ecx, REC->data, REC->exception ? " (#GP)" : """#,
    ),
    (
        "kvm_cpuid",
        &[
            "unsigned int function 4",
            "unsigned int index 4",
            "unsigned long rax 8",
            "unsigned long rbx 8",
            "unsigned long rcx 8",
            "unsigned long rdx 8",
            "bool found 1",
            "bool used_max_basic 1",
        ],
        r#""func %x idx %x rax %lx rbx %lx rcx %lx rdx %lx, cpuid entry %s%s", REC->function, REC->index, REC->rax, REC->rbx, REC->rcx, REC->rdx, REC->found ? "found" : "not found", REC->used_max_basic ? ", used max basic" : """#,
    ),
    (
        "kvm_hypercall",
        &[
            "unsigned long nr 8",
            "unsigned long a0 8",
            "unsigned long a1 8",
            "unsigned long a2 8",
            "unsigned long a3 8",
        ],
        r#""nr 0x%lx a0 0x%lx a1 0x%lx a2 0x%lx a3 0x%lx", REC->nr, REC->a0, REC->a1, REC->a2, REC->a3"#,
    ),
    (
        "kvm_inj_virq",
        &["unsigned int vector 4", "bool soft 1", "bool reinjected 1"],
        r#""%s 0x%x%s", REC->soft ? "Soft/INTn" : "IRQ", REC->vector, REC->reinjected ? " [reinjected]" : """#,
    ),
    (
        "kvm_page_fault",
        &[
            "unsigned int vcpu_id 4",
            "unsigned long guest_rip 8",
            "u64 fault_address 8",
            "u64 error_code 8",
        ],
        r#""vcpu %u rip 0x%lx address 0x%016llx error_code 0x%llx", REC->vcpu_id, REC->guest_rip, REC->fault_address, REC->error_code"#,
    ),
];

fn format_of(event: &str) -> Outcome<String> {
    let path = tracefs()?.join("events/kvm").join(event).join("format");
    fs::read_to_string(&path).or_else(|error| fail(format!("{path:?}: {error}")))
}

fn the_events_have_the_fields_that_tools_know() -> Outcome {
    for (event, expected, _) in EVENTS {
        let format = format_of(event)?;
        // Ours come behind an empty line; the common ones before it. Their places follow.
        let (_, own) = format.split_once("\n\n").unwrap_or_default();
        let mut fields = Vec::new();
        let mut place = 8;
        for line in own.lines().filter_map(|line| line.trim().strip_prefix("field:")) {
            let mut parts = line.split(';').map(str::trim);
            let (declaration, offset, size) = (parts.next(), parts.next(), parts.next());
            let size = size.and_then(|s| s.strip_prefix("size:")).unwrap_or("?");
            let bytes: u32 = size.parse().unwrap_or(1);
            place = u32::next_multiple_of(place, bytes);
            equal(event, offset, Some(format!("offset:{place}").as_str()))?;
            place += bytes;
            fields.push(format!("{} {size}", declaration.unwrap_or("?")));
        }
        equal(event, fields, expected.iter().map(|f| f.to_string()).collect())?;
    }
    Ok(())
}

fn the_events_are_printed_as_tools_know_them() -> Outcome {
    for (event, _, expected) in EVENTS {
        let format = format_of(event)?;
        let print = format.lines().find_map(|line| line.strip_prefix("print fmt: "));
        let print = print.unwrap_or_default();
        if event == "kvm_exit" {
            holds("how kvm_exit is printed", print.starts_with(expected), print.get(..300))?;
            let svm = r#"{ 0x072, "cpuid" }"#;
            holds(
                "SVM's reasons",
                print.contains(svm) && print.contains(r#"{ 0x400, "npf" }"#),
                "",
            )?;
        } else {
            equal(event, print, expected)?;
        }
    }
    Ok(())
}

/// A trace of our own, in an instance that goes with it.
struct Trace(PathBuf);

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("events/kvm/enable"), "0");
        let _ = fs::remove_dir(&self.0);
    }
}

impl Trace {
    fn new() -> Outcome<Self> {
        let path = tracefs()?.join(format!("instances/labtests{}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => {
                // A guest that does nothing but exit fills any buffer, and a slow host reads long.
                let _ = fs::write(path.join("buffer_size_kb"), "64");
                Ok(Self(path))
            }
            Err(error) => skip(format!("no instance of tracefs: {error}")),
        }
    }

    fn listen(&self, events: &[&str], on: bool) -> Outcome {
        for event in events {
            let path = self.0.join("events/kvm").join(event).join("enable");
            if let Err(error) = fs::write(&path, if on { "1" } else { "0" }) {
                return fail(format!("{path:?}: {error}"));
            }
        }
        Ok(())
    }

    /// What was told: event and text, one line each.
    fn told(&self) -> Outcome<Vec<(String, String)>> {
        let Ok(text) = fs::read_to_string(self.0.join("trace")) else { return fail("no trace") };
        let split = |line: &str| {
            let (_, rest) = line.split_once(": kvm_")?;
            let (event, text) = rest.split_once(": ")?;
            Some((format!("kvm_{event}"), text.to_owned()))
        };
        Ok(text.lines().filter(|line| !line.starts_with('#')).filter_map(split).collect())
    }
}

fn entries_and_exits_are_traced_in_turn() -> Outcome {
    let (trace, guest) = (Trace::new()?, Guest::new(Chip::None, work())?);
    trace.listen(&["kvm_entry", "kvm_exit"], true)?;
    while !guest.exit()?.is_out(crate::machine::layout::PORT_DONE) {}
    trace.listen(&["kvm_entry", "kvm_exit"], false)?;
    let told = trace.told()?;
    for (n, (event, text)) in told.iter().enumerate() {
        let expected = if n % 2 == 0 { "kvm_entry" } else { "kvm_exit" };
        equal("entries and exits in turn", (n, event.as_str()), (n, expected))?;
        holds("vCPU 0", text.starts_with("vcpu 0"), text)?;
    }
    let exits = |reason: &str| {
        let with = format!("vcpu 0 reason {reason} rip 0x");
        told.iter().filter(|(_, text)| text.starts_with(&with)).count()
    };
    let [cpuid, port, hypercall] = match oracle::vendor() {
        Vendor::Intel => ["CPUID", "IO_INSTRUCTION", "VMCALL"],
        Vendor::Amd => ["cpuid", "io", "hypercall"],
    };
    equal("CPUID exits", exits(cpuid), 3)?;
    equal("port exits", exits(port), 2)?;
    equal("hypercalls", exits(hypercall), 1)
}

fn what_exits_ask_for_is_traced() -> Outcome {
    let (trace, guest) = (Trace::new()?, Guest::new(Chip::None, work())?);
    let events = ["kvm_cpuid", "kvm_msr", "kvm_hypercall", "kvm_pio", "kvm_mmio", "kvm_page_fault"];
    trace.listen(&events, true)?;
    loop {
        let exit = guest.exit()?;
        if exit.is_out(crate::machine::layout::PORT_DONE) {
            break;
        }
        guest.vcpu().answer(&[0x5a; 8]);
    }
    trace.listen(&events, false)?;
    let told = trace.told()?;
    let count = |event: &str, part: &str| {
        told.iter().filter(|(e, text)| e == event && text.contains(part)).count()
    };
    for (event, part, expected) in [
        ("kvm_cpuid", "func 0 idx 0 rax ", 3),
        ("kvm_cpuid", "cpuid entry found", 3),
        ("kvm_msr", "msr_write 3b = 0x0", 1),
        ("kvm_hypercall", "nr 0x4d a0 ", 1),
        ("kvm_pio", "pio_read at 0xf6 size 1 count 1 val 0x5a", 1),
        ("kvm_pio", "pio_write at 0xf4 size 1 count 1 val 0x5a", 1),
        ("kvm_mmio", "mmio unsatisfied-read len 4 gpa 0xd0000000 val 0x0", 1),
        ("kvm_mmio", "mmio read len 4 gpa 0xd0000000 val 0x5a5a5a5a", 1),
        ("kvm_mmio", "mmio write len 4 gpa 0xd0000000 val 0x5a5a5a5a", 1),
    ] {
        equal(&format!("{event} with {part:?}"), count(event, part), expected)?;
    }
    holds("page faults", count("kvm_page_fault", "vcpu 0 rip 0x10") > 0, "none")
}

fn listening_may_begin_and_end_while_a_guest_runs() -> Outcome {
    let (trace, guest) = (Trace::new()?, Guest::new(Chip::Kernel, until_told())?);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let outcome = guest.finish();
            ended.store(true, Ordering::Release);
            outcome
        });
        let mut all = Ok(());
        for _ in 0..5 {
            all = all.and_then(|()| {
                let _ = fs::write(trace.0.join("trace"), "");
                trace.listen(&["kvm_exit"], true)?;
                let heard =
                    crate::machine::threads::within(std::time::Duration::from_secs(2), || {
                        trace.told().is_ok_and(|told| !told.is_empty())
                    });
                holds("exits heard of", heard && !ended.load(Ordering::Acquire), "none")?;
                trace.listen(&["kvm_exit"], false)
            });
        }
        guest.memory.write(FREE, 1_u64);
        let ended = run.join().unwrap_or_else(|_| fail("the vCPU's thread"));
        all.and(ended)
    })
}
