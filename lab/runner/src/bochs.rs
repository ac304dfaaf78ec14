//! The machine `intel`: Bochs with VMX, EPT and unrestricted guest. The kernel and the initramfs are put into memory by the emulator;
//! an option ROM (`lab/intel/boot.S`) enters the kernel by PVH. What the machine says comes through port 0xE9, which the emulator
//! writes to its own output, between two marks (`lab/host-init.sh`).

use crate::trace::{self, Trace};
use crate::{Counts, Job, Layout, image};
use anyhow::{Context, Result, bail};
use std::path::Path;
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
                       clearcpuid=xsaves,xsavec initcall_blacklist=trace_eval_init";

/// Instructions in a microsecond of the machine's own time, by which all of its clocks go: about what Bochs does, so that a test that
/// waits waits no longer than it means to.
const MHZ: u32 = 200;
/// The same where they are counted, as on the machine `amd`: the host's own ticks come seldom.
const COUNTING_MHZ: u32 = 1000;

/// Bochs's words for an end that is one: power off, and a reset, by which a kernel ends that panicked.
const ENDS: [&str; 2] = ["soft power off", "shutdown requested"];

/// Writes what the emulator reads into the run's folder and gives the command that starts it there.
pub fn command(layout: &Layout, job: &Job, folder: &Path, initramfs: &Path) -> Result<Command> {
    let kernel = image::lay_out(&layout.vmlinux(job.kernel))?;
    let at = kernel.end.next_multiple_of(BLOCK);
    let size = std::fs::metadata(initramfs)?.len();
    let top = u64::from(job.memory) << 20;
    if at + size + BLOCK > top {
        bail!("{} MiB do not hold the kernel and the initramfs", job.memory);
    }
    let mhz = if job.counting { COUNTING_MHZ } else { MHZ };
    let append = format!("{COMMAND} tsc_early_khz={mhz}000 {}", job.append);
    let page = info(kernel.entry, (at, size), append.trim_end())?;
    std::fs::write(folder.join("info"), page)?;
    let bochs = layout.out.join("bochs");
    let rom = std::fs::read(bochs.join("boot.rom")).context("the option ROM is not set up")?;
    std::fs::write(folder.join("rom"), with_checksum(rom))?;
    let script = if job.trace { trace::script() } else { "c\n".to_owned() };
    std::fs::write(folder.join("debugger"), script)?;
    let share = bochs.join("usr/share");
    let settings = format!(
        "display_library: rfb, options=\"timeout=0\"\n\
         plugin_ctrl: speaker=0, parallel=0\n\
         cpu: model={processor}, count={cpus}, ips={mhz}000000, reset_on_triple_fault=0, msrs={msrs}\n\
         memory: guest={memory}, host={memory}\n\
         romimage: file={share}/bochs/BIOS-bochs-latest, options=fastboot\n\
         vgaromimage: file={share}/vgabios/vgabios.bin\n\
         optromimage1: file=rom, address={ROM:#x}\n\
         optramimage1: file={image}, address={start:#x}\n\
         optramimage2: file=initramfs, address={at:#x}\n\
         optramimage3: file=info, address={INFO:#x}\n\
         vga: extension=none, update_freq=1\n\
         ata0: enabled=0\n\
         ata1: enabled=0\n\
         port_e9_hack: enabled=1\n\
         magic_break: enabled={magic}\n\
         clock: sync=none, time0=1700000000\n\
         com1: enabled=1, mode=file, dev=serial\n\
         log: log\n\
         panic: action=fatal\n\
         error: action=report\n\
         info: action=ignore\n\
         debug: action=ignore\n",
        processor = job.processor,
        magic = u8::from(job.trace),
        cpus = job.cpus,
        memory = job.memory,
        msrs = layout.root.join("lab/intel/msrs.def").display(),
        share = share.display(),
        image = kernel.file.display(),
        start = kernel.start,
    );
    std::fs::write(folder.join("settings"), settings)?;
    // As in `machine::emulator`: a machine ends with whoever started it.
    let mut command = layout.tool("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(layout.program("bochs"));
    command.args(["-q", "-f", "settings", "-rc", "debugger"]).current_dir(folder);
    Ok(command)
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

/// An option ROM's bytes add up to nothing.
fn with_checksum(mut rom: Vec<u8>) -> Vec<u8> {
    if let Some((last, others)) = rom.split_last_mut() {
        *last = others.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte));
    }
    rom
}

/// What comes out of the emulator: its own words, then what the machine writes to port 0xE9: its console, interrupted by traces, and
/// its files.
#[derive(Default)]
pub struct DebugPort {
    part: Part,
    held: Vec<u8>,
    trace: Trace,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Part {
    #[default]
    Before,
    Console,
    Traced,
    Files,
}

const CONSOLE: &[u8] = b"\x01GANNET-CONSOLE\n";
const FILES: &[u8] = b"\x01GANNET-FILES\n";

impl Part {
    /// The marks that end a part, and what follows them.
    fn marks(self) -> &'static [(&'static [u8], Part)] {
        match self {
            Part::Before => &[(CONSOLE, Part::Console)],
            Part::Console => &[(FILES, Part::Files), (trace::STOPPED, Part::Traced)],
            Part::Traced => &[(trace::OFF, Part::Console)],
            Part::Files => &[],
        }
    }
}

impl DebugPort {
    /// Takes what came and hands on what is the console's.
    pub fn take(&mut self, bytes: &[u8], console: &mut dyn FnMut(&[u8])) {
        self.held.extend_from_slice(bytes);
        while self.part != Part::Files {
            let (until, mark, next) = self.next();
            match self.part {
                Part::Console => console(&self.held[..until]),
                Part::Traced => {
                    for line in self.held[..until].split(|b| *b == b'\n') {
                        self.trace.line(&String::from_utf8_lossy(line));
                    }
                }
                Part::Before | Part::Files => {}
            }
            self.held.drain(..until + mark);
            if mark == 0 {
                return;
            }
            self.part = next;
        }
    }

    /// How much of what is held belongs to this part for certain, the size of the mark behind it or 0, and what comes then.
    fn next(&self) -> (usize, usize, Part) {
        let at = |mark: &[u8]| self.held.windows(mark.len()).position(|w| w == mark);
        let found = self.part.marks().iter().filter_map(|(m, part)| Some((at(m)?, m.len(), *part)));
        if let Some(first) = found.min_by_key(|(at, ..)| *at) {
            return first;
        }
        // What may be the beginning of a mark waits for its end; so does an unfinished line of a trace.
        let begun = |mark: &[u8]| (0..mark.len()).rev().find(|n| self.held.ends_with(&mark[..*n]));
        let waits = self.part.marks().iter().filter_map(|(m, _)| begun(m)).max().unwrap_or(0);
        let until = match self.part {
            Part::Traced => self.held.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1),
            _ => self.held.len() - waits,
        };
        (until, 0, self.part)
    }

    /// What `host-init.sh` sent back, with whatever the emulator said after that, and the operations between the markers.
    pub fn finish(self) -> (Vec<u8>, Vec<Counts>) {
        let files = if self.part == Part::Files { self.held } else { Vec::new() };
        (files, self.trace.records())
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
            assert_eq!(port.finish().0, b"FILE a 1\nx");
        }
    }

    #[test]
    fn a_trace_is_no_part_of_the_console() {
        let all = b"\x01GANNET-CONSOLE\n[1/2] (0) Magic breakpoint\nNext at t=1\n\
            (0).[1] [0x1] 0008:0000000000010000 (unk. ctxt): nop ; 0f1f80474e5401\n\
            (0).[2] [0x1] 0010:ffffffff81000000 (unk. ctxt): vmresume ; 0f01c3\n\
            (0).[3] [0x1] 0008:0000000000010000 (unk. ctxt): nop ; 0f1f80474e5402\n\
            (0) Magic breakpoint\nNext at t=4\nTracing disabled for CPU0\ncpuid\n\x01GANNET-FILES\n";
        for piece in [1, 7, 1000] {
            let (mut port, mut console) = (DebugPort::default(), Vec::new());
            for bytes in all.chunks(piece) {
                port.take(bytes, &mut |text| console.extend_from_slice(text));
            }
            assert_eq!(console, b"[1/2] cpuid\n");
            let counts = port.finish().1;
            assert_eq!((counts.len(), counts[0]["host.vmresume"]), (1, 1));
        }
    }

    #[test]
    fn a_machine_that_ended_early_sent_no_files() {
        let mut port = DebugPort::default();
        port.take(b"\x01GANNET-CONSOLE\nhalf", &mut |_| ());
        assert!(port.finish().0.is_empty());
    }
}
