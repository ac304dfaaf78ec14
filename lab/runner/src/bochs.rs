//! The machines that run in Bochs: `intel` with VMX, EPT and unrestricted guest, `amd-nrip` with SVM and NRIP save. The kernel and the initramfs are put into memory by the emulator;
//! an option ROM (`lab/intel/boot.S`) enters the kernel by PVH. What the machine says comes through port 0xE9, which the emulator
//! writes to its own output, between two marks (`lab/host-init.sh`).

use crate::{Job, Layout, Machine, image};
use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The page that `boot.S` finds at a place of its own.
const INFO: u64 = 0x00f0_0000;
/// Where the option ROM lies.
const ROM: u64 = 0x000d_0000;
/// The command line's place in that page, and the initramfs's description.
const COMMAND_LINE: usize = 0x80;
const MODULE: usize = 0x40;
/// The kernel's entry, for `boot.S`.
const ENTRY: usize = 56;
/// The magic number of PVH's start-of-day structure.
const PVH: u32 = 0x336e_c578;
/// The emulator loads files in pieces of its own blocks of memory.
const BLOCK: u64 = 0x10_0000;

/// The host kernel's command line. `clearcpuid`: Bochs gives a wrong size for the compacted XSAVE area, and Linux would do without
/// XSAVE. `tsc_early_khz`: CPUID gives a frequency at which nothing here runs. `idle=halt`: MWAIT is slow to emulate. `initcall_blacklist`: a fifth of the boot, for names in traces.
const COMMAND: &str = "console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 \
                       random.trust_cpu=on cryptomgr.notests nowatchdog idle=halt \
                       initcall_blacklist=trace_eval_init";

/// What differs between the processors: the file of `lab/intel` with the MSRs that are given, and what the kernel does not use. On
/// `amd-nrip` that is MWAITX, too, in which the kernel waits in its delays: nothing ever ends it.
fn vendors(machine: Machine) -> (&'static str, &'static str) {
    if machine.has_svm() {
        ("msrs-amd.def", "xsaves,xsavec,mwaitx")
    } else {
        ("msrs.def", "xsaves,xsavec")
    }
}

/// Instructions in a microsecond of the machine's own time, by which all of its clocks go: about what Bochs does, so that a test that
/// waits waits no longer than it means to.
const MHZ: u32 = 200;
/// The settings where instructions are counted, as on the machine `amd`: the host's own ticks come seldom.
const COUNTING_MHZ: u32 = 1000;

/// Bochs's words for an end that is one: power off, and a reset, by which a kernel ends that panicked.
const ENDS: [&str; 2] = ["soft power off", "shutdown requested"];

/// Writes what the emulator reads into the run's folder and gives the command that starts it there.
pub fn command(
    layout: &Layout,
    job: &Job,
    folder: &Path,
    initramfs: &Path,
    counts: &Path,
) -> Result<Command> {
    let kernel = image::lay_out(&layout.vmlinux(job.kernel))?;
    let at = kernel.end.next_multiple_of(BLOCK);
    let size = std::fs::metadata(initramfs)?.len();
    let top = u64::from(job.memory) << 20;
    if at + size + BLOCK > top {
        bail!("{} MiB do not hold the kernel and the initramfs", job.memory);
    }
    let mhz = if job.counting { COUNTING_MHZ } else { MHZ };
    let (msrs, unused) = vendors(job.machine);
    let append = format!("{COMMAND} clearcpuid={unused} tsc_early_khz={mhz}000 {}", job.append);
    let page = info(kernel.entry, (at, size), append.trim_end())?;
    std::fs::write(folder.join("info"), page)?;
    let bochs = layout.out.join("bochs");
    let rom = std::fs::read(bochs.join("boot.rom")).context("the option ROM is not set up")?;
    std::fs::write(folder.join("rom"), with_checksum(rom))?;
    std::fs::write(folder.join("debugger"), "c\n")?;
    let share = bochs.join("usr/share");
    let mut bios = share.join("bochs/BIOS-bochs-latest");
    if job.vmx_locked {
        let locking = without_vmx(std::fs::read(bios)?)?;
        bios = folder.join("bios");
        std::fs::write(&bios, locking)?;
    }
    let settings = format!(
        "display_library: rfb, options=\"timeout=0\"\n\
         plugin_ctrl: speaker=0, parallel=0\n\
         cpu: model={processor}, count={cpus}, ips={mhz}000000, reset_on_triple_fault=0, msrs={msrs}\n\
         memory: guest={memory}, host={memory}\n\
         romimage: file={bios}, options=fastboot\n\
         vgaromimage: file={share}/vgabios/vgabios.bin\n\
         optromimage1: file=rom, address={ROM:#x}\n\
         optramimage1: file={image}, address={start:#x}\n\
         optramimage2: file=initramfs, address={at:#x}\n\
         optramimage3: file=info, address={INFO:#x}\n\
         vga: extension=none, update_freq=1\n\
         ata0: enabled=0\n\
         ata1: enabled=0\n\
         port_e9_hack: enabled=1\n\
         clock: sync=none, time0=1700000000\n\
         com1: enabled=1, mode=file, dev=serial\n\
         log: log\n\
         panic: action=fatal\n\
         error: action=report\n\
         info: action=ignore\n\
         debug: action=ignore\n",
        processor = job.processor,
        cpus = job.cpus,
        memory = job.memory,
        msrs = layout.root.join("lab/intel").join(msrs).display(),
        bios = bios.display(),
        share = share.display(),
        image = kernel.file.display(),
        start = kernel.start,
    );
    std::fs::write(folder.join("settings"), settings)?;
    // As in `run::emulator`: a machine ends with whoever started it.
    let mut command = layout.tool("setpriv");
    command.args(["--pdeathsig", "KILL", "env"]).args(environment(&bochs, job, counts));
    command.arg(bochs.join("usr/bin/bochs-bin"));
    command.args(["-q", "-f", "settings", "-rc", "debugger"]).current_dir(folder);
    Ok(command)
}

/// What the emulator needs in its environment, and nobody else may have: the libraries beside it, and what is loaded before it.
fn environment(bochs: &Path, job: &Job, counts: &Path) -> Vec<OsString> {
    let set = |name: &str, values: &[&Path]| {
        let values: Vec<&OsStr> = values.iter().map(|value| value.as_os_str()).collect();
        let mut pair = OsString::from(format!("{name}="));
        pair.push(values.join(OsStr::new(":")));
        pair
    };
    let libraries = bochs.join("usr/lib/x86_64-linux-gnu");
    let shim = bochs.join("shim.so");
    let before: Vec<&Path> =
        [Some(&shim), job.plugin.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
    let mut all = vec![
        set("LD_LIBRARY_PATH", &[&libraries, &bochs.join("lib/x86_64-linux-gnu")]),
        set("LD_PRELOAD", &before),
        set("BXSHARE", &[&bochs.join("usr/share/bochs")]),
        set("LTDL_LIBRARY_PATH", &[&libraries.join("bochs/plugins")]),
    ];
    if job.plugin.is_some() {
        all.push(set("GANNET_LAB_COUNTS", &[counts]));
    }
    all
}

/// Whether the emulator ended because the machine did. Bochs calls both a panic, and its status is the same for all.
pub fn ended_well(errors: &str) -> bool {
    ENDS.iter().any(|end| errors.contains(end))
}

/// PVH's start-of-day structure, version 1 (Xen: xen/include/public/arch-x86/hvm/start_info.h), with the list of one module at
/// [`MODULE`], the command line, and the entry where the structure ends. `boot.S` adds the number of entries of the map.
fn info(entry: u32, (at, size): (u64, u64), command: &str) -> Result<Vec<u8>> {
    let mut page = vec![0u8; 4096];
    let mut put = |at: usize, bytes: &[u8]| {
        let room = page.get_mut(at..at + bytes.len()).context("the command line is too long")?;
        room.copy_from_slice(bytes);
        Ok::<(), anyhow::Error>(())
    };
    for (at, word) in [(0, PVH), (4, 1), (12, 1), (ENTRY, entry)] {
        put(at, &word.to_le_bytes())?;
    }
    let places = [(16, INFO + MODULE as u64), (24, INFO + COMMAND_LINE as u64), (40, 0x5000)];
    for (at, word) in places.into_iter().chain([(MODULE, at), (MODULE + 8, size)]) {
        put(at, &word.to_le_bytes())?;
    }
    put(COMMAND_LINE, command.as_bytes())?;
    put(COMMAND_LINE + command.len(), &[0])?;
    Ok(page)
}

/// The BIOS, but it locks IA32_FEATURE_CONTROL without VMX, where it allowed VMX: `or $5, %eax` becomes `or $1, %eax`, on the first
/// CPU (32-bit code) and on the others (16-bit).
fn without_vmx(mut bios: Vec<u8>) -> Result<Vec<u8>> {
    const READ: &[u8] = &[0xb9, 0x3a, 0, 0, 0, 0x0f, 0x32];
    const OR_AND_WRITE: &[u8] = &[0x83, 0xc8, 5, 0x0f, 0x30];
    let reads: Vec<usize> = (0..bios.len())
        .filter(|at| bios[*at..].starts_with(READ))
        .map(|at| at + READ.len())
        .collect();
    let mut mended = 0;
    for at in reads {
        let at = if bios.get(at) == Some(&0x66) { at + 1 } else { at };
        if bios[at..].starts_with(OR_AND_WRITE) {
            bios[at + 2] = 1;
            mended += 1;
        }
    }
    if mended != 2 {
        bail!("the BIOS is not as expected: it allows VMX in {mended} places");
    }
    Ok(bios)
}

/// An option ROM's bytes add up to nothing.
fn with_checksum(mut rom: Vec<u8>) -> Vec<u8> {
    if let Some((last, others)) = rom.split_last_mut() {
        *last = others.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte));
    }
    rom
}

/// What comes out of the emulator: its own words, then what the machine writes to port 0xE9: its console and its files.
#[derive(Default)]
pub struct DebugPort {
    part: Part,
    held: Vec<u8>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Part {
    #[default]
    Before,
    Console,
    Files,
}

const CONSOLE: &[u8] = b"\x01GANNET-CONSOLE\n";
const FILES: &[u8] = b"\x01GANNET-FILES\n";

impl Part {
    /// The mark that ends a part, and what follows it.
    fn mark(self) -> Option<(&'static [u8], Part)> {
        match self {
            Part::Before => Some((CONSOLE, Part::Console)),
            Part::Console => Some((FILES, Part::Files)),
            Part::Files => None,
        }
    }
}

impl DebugPort {
    /// Takes what came and hands on what is the console's.
    pub fn take(&mut self, bytes: &[u8], console: &mut dyn FnMut(&[u8])) {
        self.held.extend_from_slice(bytes);
        while let Some((mark, next)) = self.part.mark() {
            let found = self.held.windows(mark.len()).position(|w| w == mark);
            // What may be the beginning of the mark waits for its end.
            let begun = || (0..mark.len()).rev().find(|n| self.held.ends_with(&mark[..*n]));
            let until = found.unwrap_or_else(|| self.held.len() - begun().unwrap_or(0));
            if self.part == Part::Console {
                console(&self.held[..until]);
            }
            match found {
                Some(at) => {
                    self.held.drain(..at + mark.len());
                    self.part = next;
                }
                None => {
                    self.held.drain(..until);
                    return;
                }
            }
        }
    }

    /// What `host-init.sh` sent back, with whatever the emulator said after that.
    pub fn finish(self) -> Vec<u8> {
        if self.part == Part::Files { self.held } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roms_bytes_add_up_to_nothing() {
        let rom = with_checksum(vec![0x55, 0xaa, 2, 7, 99]);
        assert_eq!(rom.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
        assert_eq!(rom[..4], [0x55, 0xaa, 2, 7]);
    }

    #[test]
    fn a_bios_locks_vmx_away_on_every_cpu_or_is_not_the_one_that_is_known() {
        let first = [0xb9, 0x3a, 0, 0, 0, 0x0f, 0x32, 0x83, 0xc8, 5, 0x0f, 0x30];
        let others = [0x66, 0xb9, 0x3a, 0, 0, 0, 0x0f, 0x32, 0x66, 0x83, 0xc8, 5, 0x0f, 0x30];
        let bios = [&[7][..], &first, &[0x83, 0xc8, 5], &others].concat();
        let mended = without_vmx(bios.clone()).unwrap();
        let changed: Vec<usize> = (0..bios.len()).filter(|at| bios[*at] != mended[*at]).collect();
        assert_eq!(changed, [10, 27]);
        assert!(changed.iter().all(|at| (bios[*at], mended[*at]) == (5, 1)));
        assert!(without_vmx(first.to_vec()).is_err() && without_vmx(Vec::new()).is_err());
    }

    #[test]
    fn the_start_of_day_structure_names_module_and_command_line() {
        let page = info(0x0100_0a30, (0x0500_0000, 77), "quiet").unwrap();
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
        assert_eq!((word(16), word(24)), (INFO + 0x40, INFO + 0x80));
        assert_eq!((word(0x40), word(0x48)), (0x0500_0000, 77));
        assert_eq!(word(56), 0x0100_0a30, "the entry, and not yet started");
        assert_eq!(&page[0x80..0x86], b"quiet\0");
        assert!(info(0, (0, 0), &"x".repeat(4096)).is_err());
    }

    #[test]
    fn the_console_lies_between_the_marks() {
        let all =
            b"Bochs says\x01GANN\x01GANNET-CONSOLE\none\n\x01two\x01GANNET-FILES\nFILE a 1\nx";
        for piece in [1, 3, 1000] {
            let (mut port, mut console) = (DebugPort::default(), Vec::new());
            for bytes in all.chunks(piece) {
                port.take(bytes, &mut |text| console.extend_from_slice(text));
            }
            assert_eq!(console, b"one\n\x01two");
            assert_eq!(port.finish(), b"FILE a 1\nx");
        }
    }

    /// Debian's kernels have it. The set-up holds every line of the file against the kernel that came of it.
    #[test]
    fn the_debug_kernel_lets_the_debug_port_be_written_to() {
        let config = include_str!("../../debug.config");
        assert!(config.lines().any(|line| line == "CONFIG_X86_IOPL_IOPERM=y"));
    }

    #[test]
    fn a_machine_that_ended_early_sent_no_files() {
        let mut port = DebugPort::default();
        port.take(b"\x01GANNET-CONSOLE\nhalf", &mut |_| ());
        assert!(port.finish().is_empty());
    }
}
