use std::vec::Vec;

use x86::vmcs::enlightened::{READ_LINES, WRITTEN_LINES};
use x86::vmcs::{ExitReason, InstructionError, PinControls, ProcControls, ProcControls2};

use super::*;
use crate::Vmcs12;
use crate::leave::Report;
use crate::machine::{Composed, Entered, EntryBy, Instruction, PendingEntry};
use crate::saved::{self, Context, HEADER, IMAGE, Images, Onto, Restored, flag};
use crate::testing::{CPU, KNOWN, LIMITS, Memory, Vmcs02, capabilities, good, set};

const VMXON: u64 = 0x1000;
const REGION: u64 = 0x2000;
const ASSIST_AT: u64 = 0x8000;
const PAGE: u64 = 0x9000;
const OTHER: u64 = 0xa000;
const NOWHERE: u64 = 1 << 30;

struct Guest {
    machine: Machine,
    memory: Memory,
}

/// Writes what a page holds of a VMCS12.
fn fill(memory: &Memory, page: u64, v: &Vmcs12) {
    memory.put(page, &[0; BYTES]);
    memory.put(page, &page::VERSION.to_le_bytes());
    for line in &READ_LINES {
        put(memory, page, line.field.encoding, v.served(&line.field));
    }
}

fn put(memory: &Memory, page: u64, encoding: u16, value: u64) {
    let (offset, bytes) = page::find(encoding.into()).unwrap();
    memory.put(page + u64::from(offset), &value.to_le_bytes()[..bytes]);
}

fn get(memory: &Memory, page: u64, encoding: u32) -> u64 {
    let (offset, bytes) = page::find(encoding.into()).unwrap();
    let mut value = [0; 8];
    memory.read(Gpa(page + u64::from(offset)), &mut value[..bytes]).unwrap();
    u64::from_le_bytes(value)
}

fn clean(memory: &Memory, page: u64) -> u32 {
    memory.read_u32(Gpa(page + at::CLEAN as u64)).unwrap()
}

impl Guest {
    fn new() -> Self {
        let memory = Memory::new();
        fill(&memory, PAGE, &good());
        fill(&memory, OTHER, &good());
        memory.put(REGION, good().as_bytes());
        let mut machine = Machine::new(capabilities());
        machine.set_regions(Some(Gpa(VMXON)), None);
        machine.enlighten(true, true, true, Some(Gpa(ASSIST_AT)));
        let guest = Self { machine, memory };
        guest.name(1, PAGE);
        guest
    }

    /// What the VP assist page says.
    fn name(&self, enlightens: u8, page: u64) {
        self.memory.put(ASSIST_AT + 40, &[enlightens]);
        self.memory.put(ASSIST_AT + 48, &page.to_le_bytes());
    }

    fn load(&mut self, by: EntryBy) -> Result<Loaded, Fail> {
        self.machine.load_enlightened(by, &CPU, &LIMITS, &self.memory)
    }

    fn enter(&mut self, by: EntryBy) -> Result<PendingEntry, Fail> {
        assert_eq!(self.load(by), Ok(Loaded::Page));
        let entry = self.machine.execute_entry(by, &CPU, &LIMITS, &self.memory);
        entry.map_err(|fail| self.machine.refuse_entry(fail, &self.memory))
    }

    /// L2 runs.
    fn run(&mut self, by: EntryBy) -> Groups {
        let entry = self.enter(by).unwrap();
        let Entered::L2(dirty) = self.machine.finish_entry(&LIMITS, &self.memory) else {
            panic!("the entry failed")
        };
        self.machine.entered(entry);
        dirty
    }

    fn leave(&mut self, exit: &Vmcs02) {
        let report = Report::plain(ExitReason::Cpuid, 0x77);
        self.machine.leave(exit, &report, &KNOWN, &self.memory);
    }

    fn execute(&mut self, instruction: Instruction) -> Result<Then, Fail> {
        self.machine.execute(instruction, &CPU, &LIMITS, &mut self.memory)
    }

    fn pointer(
        &mut self,
        instruction: fn(super::super::Address) -> Instruction,
        to: u64,
    ) -> Result<Then, Fail> {
        self.memory.put(0xf000, &to.to_le_bytes());
        self.execute(instruction(Ok(0xf000)))
    }
}

/// A region was set down, and the hardware's VMCS is composed of a page since: what comes back finds nothing composed.
#[test]
fn what_is_composed_of_a_page_is_composed_of_no_region() {
    let mut guest = Guest::new();
    guest.name(0, PAGE);
    guest.pointer(|pointer| Instruction::Vmptrld { pointer }, REGION).unwrap();
    let entry =
        guest.machine.execute_entry(EntryBy::Vmlaunch, &CPU, &LIMITS, &guest.memory).unwrap();
    let entered = guest.machine.finish_entry(&LIMITS, &guest.memory);
    assert!(matches!(entered, Entered::L2(_)));
    guest.machine.entered(entry);
    guest.leave(&left());
    guest.machine.fetch(&left(), &KNOWN, Groups::ALL);
    let mut down = Composed::NOTHING;
    guest.machine.set_down(&mut down);
    guest.name(1, PAGE);
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    guest.name(0, PAGE);
    guest.pointer(|pointer| Instruction::Vmptrld { pointer }, REGION).unwrap();
    guest.machine.take_up(&down, &down);
    assert_eq!(guest.machine.dirty(), Groups::ALL);
}

/// What L2 has left in the hardware's VMCS.
fn left() -> Vmcs02 {
    let mut exit = Vmcs02::new();
    for line in &WRITTEN_LINES {
        exit.values[usize::from(line.field.encoding)] = good().served(&line.field);
    }
    // What L0 owns of them is seen there.
    exit.put(field::CR0_SHADOW, good().get(field::GUEST_CR0));
    exit.put(field::CR4_SHADOW, good().get(field::GUEST_CR4));
    exit.put(field::GUEST_RIP, 0x4002);
    exit.put(field::GUEST_RFLAGS, 0x202);
    exit.put(field::GUEST_RSP, 0x7000);
    exit.put(field::GUEST_CR3, 0xc000);
    exit.put(field::GUEST_ES_SELECTOR, 0x18);
    exit.put(field::GUEST_GS_BASE, 0x1234_5678_9abc);
    exit.put(field::GUEST_SYSENTER_CS, 0x10);
    exit
}

#[test]
fn an_entry_takes_all_that_the_page_carries() {
    let mut guest = Guest::new();
    guest.memory.forget_reads();
    assert_eq!(guest.load(EntryBy::Vmlaunch), Ok(Loaded::Page));
    assert_eq!(guest.memory.most_reads(), 1, "each byte once");
    for line in &READ_LINES {
        let (taken, meant) = (guest.machine.vmcs12.served(&line.field), good().served(&line.field));
        assert_eq!(taken, meant, "{:#x}", line.field.encoding);
    }
    assert!(guest.machine.is_enlightened() && guest.machine.current().is_none());
    guest.run(EntryBy::Vmlaunch);
    assert_eq!(guest.machine.level(), Level::L2);
}

#[test]
fn there_is_no_launch_state() {
    for first in [EntryBy::Vmresume, EntryBy::Vmlaunch] {
        let mut guest = Guest::new();
        guest.run(first);
        guest.leave(&left());
        assert!(guest.enter(EntryBy::Vmlaunch).is_ok());
        assert!(guest.enter(EntryBy::Vmresume).is_ok());
    }
}

#[test]
fn an_exit_writes_what_l2_left_and_nothing_of_l1s() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    // L1 rewrites the page while L2 runs.
    guest.memory.put(PAGE, &[0xee; BYTES]);
    guest.leave(&left());
    for (encoding, value) in [
        (field::EXIT_REASON.encoding(), 10),
        (field::EXIT_QUALIFICATION.encoding(), 0x77),
        (field::GUEST_RIP.encoding(), 0x4002),
        (field::GUEST_RFLAGS.encoding(), 0x202),
        (field::GUEST_ES_SELECTOR.encoding(), 0x18),
        (field::GUEST_GS_BASE.encoding(), 0x1234_5678_9abc),
        (field::GUEST_CR3.encoding(), 0xc000),
        (field::GUEST_SYSENTER_CS.encoding(), 0x10),
    ] {
        assert_eq!(get(&guest.memory, PAGE, encoding), value, "{encoding:#x}");
    }
    let mut theirs = [true; BYTES];
    for line in &WRITTEN_LINES {
        let (offset, bytes) = page::find(line.field.encoding.into()).unwrap();
        theirs[usize::from(offset)..usize::from(offset) + bytes].fill(false);
    }
    theirs[at::CLEAN..at::CLEAN + 4].fill(false);
    let bytes = guest.memory.bytes.borrow();
    for (at, of_l1) in theirs.iter().enumerate() {
        assert!(!of_l1 || bytes[PAGE as usize + at] == 0xee, "{at}");
    }
    drop(bytes);
    assert_eq!(clean(&guest.memory, PAGE) & 0xffff, ALL_CLEAN);
    assert!(guest.machine.behind().is_empty(), "L1 reads it all in the page");
}

#[test]
fn what_follows_from_a_word_of_the_page_is_composed_with_it() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    let all = clean(&guest.memory, PAGE);
    guest.memory.put(PAGE + at::CLEAN as u64, &(all & !Clean::Proc.bit()).to_le_bytes());
    // Offsetting: what the TSC is for.
    let word = u64::from(guest.machine.vmcs12.get(field::PROC_CONTROLS)) ^ 1 << 3;
    put(&guest.memory, PAGE, field::PROC_CONTROLS.encoding() as u16, word);
    assert!(guest.run(EntryBy::Vmresume).has(x86::vmcs::Group::Time));
}

#[test]
fn what_is_clean_is_not_looked_at_and_what_is_not_is() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    put(&guest.memory, PAGE, field::HOST_RIP.encoding() as u16, 0x5555);
    put(&guest.memory, PAGE, field::GUEST_RIP.encoding() as u16, 0x4010);
    let dirty = guest.run(EntryBy::Vmresume);
    assert_ne!(guest.machine.vmcs12.get(field::HOST_RIP), 0x5555);
    assert_eq!(guest.machine.vmcs12.get(field::GUEST_RIP), 0x4010, "never clean");
    assert!(dirty.has(x86::vmcs::Group::Flow) && !dirty.has(x86::vmcs::Group::Host));
    guest.leave(&left());
    let all = clean(&guest.memory, PAGE);
    guest.memory.put(PAGE + at::CLEAN as u64, &(all & !Clean::Host1.bit()).to_le_bytes());
    guest.memory.forget_reads();
    guest.run(EntryBy::Vmresume);
    assert_eq!(guest.memory.most_reads(), 1);
    assert_eq!(guest.machine.vmcs12.get(field::HOST_RIP), 0x5555);
    // VMLAUNCH takes nothing for clean.
    guest.leave(&left());
    put(&guest.memory, PAGE, field::HOST_RIP.encoding() as u16, 0x6666);
    guest.run(EntryBy::Vmlaunch);
    assert_eq!(guest.machine.vmcs12.get(field::HOST_RIP), 0x6666);
}

/// Whatever L1 writes and says of it, VMCS12 has what was not clean, and the old value of the rest.
#[test]
fn each_group_follows_its_bit() {
    for group in 0..page::GROUPS - 1 {
        let mut guest = Guest::new();
        guest.run(EntryBy::Vmlaunch);
        guest.leave(&left());
        let before = guest.machine.vmcs12.clone();
        for line in &READ_LINES {
            put(&guest.memory, PAGE, line.field.encoding, !before.served(&line.field));
        }
        guest.memory.put(PAGE + at::CLEAN as u64, &(ALL_CLEAN & !(1 << group)).to_le_bytes());
        assert_eq!(guest.load(EntryBy::Vmresume), Ok(Loaded::Page));
        for (at, line) in READ_LINES.iter().enumerate() {
            let of = |g: usize| usize::from(page::STARTS[g])..usize::from(page::STARTS[g + 1]);
            let read = of(group).contains(&at) || of(Clean::Always as usize).contains(&at);
            let now = guest.machine.vmcs12.served(&line.field);
            assert_eq!(now != before.served(&line.field), read, "{:#x}", line.field.encoding);
        }
    }
}

#[test]
fn what_is_no_such_page_is_refused() {
    let mut guest = Guest::new();
    for nowhere in [PAGE + 8, 1 << 41, NOWHERE, 0xdead_beef] {
        guest.name(1, nowhere);
        assert_eq!(guest.load(EntryBy::Vmlaunch), Err(Fail::Outside), "{nowhere:#x}");
    }
    guest.name(1, PAGE);
    for revision in [0, 2, 0x91e5_7ed0, u32::MAX] {
        guest.memory.put(PAGE, &revision.to_le_bytes());
        assert_eq!(guest.load(EntryBy::Vmlaunch), Err(Fail::Invalid), "{revision:#x}");
        assert!(!guest.machine.is_enlightened());
        assert_eq!(
            guest.machine.execute_entry(EntryBy::Vmlaunch, &CPU, &LIMITS, &guest.memory),
            Err(Fail::Invalid)
        );
    }
    // What Hyper-V writes, against its own specification.
    guest.memory.put(PAGE, &VMCS12_REVISION.to_le_bytes());
    assert!(guest.enter(EntryBy::Vmlaunch).is_ok());
    guest.machine.refuse_enlightened(&guest.memory);
    assert!(!guest.machine.is_enlightened() && !guest.machine.owes_memory());
}

#[test]
fn without_the_assist_pages_word_the_current_vmcs_counts() {
    let mut guest = Guest::new();
    guest.pointer(|pointer| Instruction::Vmptrld { pointer }, REGION).unwrap();
    for (enlightens, page) in [(0, PAGE), (1, u64::MAX), (1, u64::MAX - 1)] {
        guest.name(enlightens, page);
        assert_eq!(guest.load(EntryBy::Vmlaunch), Ok(Loaded::None));
        assert!(
            guest.machine.execute_entry(EntryBy::Vmlaunch, &CPU, &LIMITS, &guest.memory).is_ok()
        );
    }
    guest.machine.enlighten(true, true, true, Some(Gpa(NOWHERE)));
    assert_eq!(guest.load(EntryBy::Vmlaunch), Ok(Loaded::NoAssist));
    guest.machine.enlighten(true, false, true, Some(Gpa(ASSIST_AT)));
    assert!(!guest.machine.asks_assist_page(), "not shown to L1");
    guest.machine.enlighten(false, true, true, Some(Gpa(ASSIST_AT)));
    assert!(!guest.machine.asks_assist_page(), "not enabled");
    // Who may not execute the instruction is not asked for a page.
    let mut guest = Guest::new();
    let user = Cpu { cpl: 3, ..CPU };
    assert_eq!(
        guest.machine.load_enlightened(EntryBy::Vmlaunch, &user, &LIMITS, &guest.memory),
        Ok(Loaded::None)
    );
    assert!(!guest.machine.is_enlightened());
}

/// L1 takes its VP assist page away: its next entry is none of the page that it named there.
#[test]
fn an_entry_without_an_assist_page_is_of_no_page() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    guest.machine.enlighten(true, true, true, None);
    assert!(guest.machine.asks_assist_page(), "which page it was is to be found out");
    assert_eq!(guest.load(EntryBy::Vmresume), Ok(Loaded::None));
    assert!(!guest.machine.is_enlightened() && !guest.machine.owes_memory());
    assert!(!guest.machine.asks_assist_page());
    let entry = guest.machine.execute_entry(EntryBy::Vmresume, &CPU, &LIMITS, &guest.memory);
    assert_eq!(entry, Err(Fail::Invalid));
}

#[test]
fn another_page_brings_nothing_of_the_one_before() {
    let mut guest = Guest::new();
    guest.pointer(|pointer| Instruction::Vmptrld { pointer }, REGION).unwrap();
    let mark = field::EXIT_MSR_LOAD_COUNT;
    guest.machine.vmcs12_mut().set(mark, 3);
    guest.machine.vmcs12_mut().set(field::PML_INDEX, 9);
    guest.run(EntryBy::Vmresume);
    assert_eq!(guest.machine.vmcs12.get(mark), 0);
    assert_eq!(guest.machine.vmcs12.get(field::PML_INDEX), 0);
    let mut region = [0; 4];
    guest.memory.read(Gpa(REGION + 776), &mut region).unwrap();
    assert_eq!(u32::from_le_bytes(region), 3, "written back");
    guest.leave(&left());
    put(&guest.memory, OTHER, field::HOST_RIP.encoding() as u16, 0x5555);
    guest.memory.put(OTHER + at::CLEAN as u64, &ALL_CLEAN.to_le_bytes());
    guest.name(1, OTHER);
    let dirty = guest.run(EntryBy::Vmresume);
    assert_eq!(guest.machine.vmcs12.get(field::HOST_RIP), 0x5555, "nothing is clean");
    assert!(dirty == Groups::ALL);
    guest.leave(&left());
    assert_eq!(get(&guest.memory, OTHER, field::EXIT_REASON.encoding()), 10);
}

/// One page on two vCPUs: each has what it read.
#[test]
fn a_page_on_two_vcpus_harms_neither() {
    let (mut first, mut second) = (Guest::new(), Guest::new());
    first.run(EntryBy::Vmlaunch);
    core::mem::swap(&mut first.memory, &mut second.memory);
    put(&second.memory, PAGE, field::HOST_RIP.encoding() as u16, 0x5555);
    second.run(EntryBy::Vmlaunch);
    core::mem::swap(&mut first.memory, &mut second.memory);
    first.leave(&left());
    assert_ne!(first.machine.vmcs12().get(field::HOST_RIP), 0x5555);
    assert_eq!(second.machine.vmcs12().get(field::HOST_RIP), 0x5555);
}

#[test]
fn vmread_reads_the_page_and_vmwrite_has_no_vmcs() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    let read = |guest: &mut Guest, field: u64| {
        guest.execute(Instruction::Vmread { field, to: Place::Register(0) })
    };
    assert_eq!(read(&mut guest, 0x681e), Ok(Then::Register(0, 0x4002)));
    put(&guest.memory, PAGE, 0x681e, 0x9999);
    assert_eq!(read(&mut guest, 0x681e), Ok(Then::Register(0, 0x9999)), "as it is now");
    let unsupported = Err(Fail::Valid(InstructionError::UnsupportedField));
    assert_eq!(read(&mut guest, field::PML_ADDRESS.encoding().into()), unsupported);
    assert_eq!(get(&guest.memory, PAGE, 0x4400), 12);
    let write = Instruction::Vmwrite { field: 0x681e, from: Place::Register(0), value: 1 };
    assert_eq!(guest.execute(write), Err(Fail::Invalid));
    guest.execute(Instruction::Vmptrst { to: Ok(0xf000) }).unwrap();
    assert_eq!(guest.memory.read_u64(Gpa(0xf000)), Ok(u64::MAX));
}

#[test]
fn vmclear_gives_the_page_up_and_writes_nothing() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    for page in [OTHER, PAGE] {
        let before = guest.memory.bytes.borrow()[page as usize..][..4096].to_vec();
        assert!(guest.machine.is_enlightened());
        guest.pointer(|pointer| Instruction::Vmclear { pointer }, page).unwrap();
        assert!(guest.memory.bytes.borrow()[page as usize..][..4096] == before);
    }
    assert!(!guest.machine.is_enlightened());
    // VMPTRLD and VMXOFF do as well.
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    guest.pointer(|pointer| Instruction::Vmptrld { pointer }, REGION).unwrap();
    assert!(!guest.machine.is_enlightened() && guest.machine.current() == Some(Gpa(REGION)));
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    guest.execute(Instruction::Vmxoff).unwrap();
    assert!(!guest.machine.is_enlightened());
}

#[test]
fn what_the_page_does_not_carry_is_not_offered() {
    let shown = capabilities().enlightened();
    let whole = capabilities();
    assert_eq!(whole.pin.may() & !shown.pin.may(), 0xc0);
    assert_eq!(
        whole.secondary.may() & !shown.secondary.may(),
        (ProcControls2::VIRTUALIZE_APIC_ACCESSES
            | ProcControls2::APIC_REGISTERS
            | ProcControls2::VIRTUAL_INTERRUPTS
            | ProcControls2::VMFUNC
            | ProcControls2::SHADOW_VMCS
            | ProcControls2::PML
            | ProcControls2::TSC_SCALING)
            .bits()
    );
    assert_eq!(whole.exit.may() & !shown.exit.may(), 1 << 22);
    assert_eq!((shown.primary, shown.entry, shown.vmfunc), (whole.primary, whole.entry, 0));
    let mut guest = Guest::new();
    let mut v = good();
    let pin = v.pin() | PinControls::PREEMPTION_TIMER;
    v.set(field::PIN_CONTROLS, pin.bits());
    fill(&guest.memory, PAGE, &v);
    assert_eq!(guest.load(EntryBy::Vmlaunch), Ok(Loaded::Page));
    let entry = guest.machine.execute_entry(EntryBy::Vmlaunch, &CPU, &LIMITS, &guest.memory);
    // The entry may be made again outside the loop: nothing is told until it is final.
    assert_eq!(get(&guest.memory, PAGE, 0x4400), 0);
    let fail = guest.machine.refuse_entry(entry.unwrap_err(), &guest.memory);
    assert_eq!(fail, Fail::Valid(InstructionError::InvalidControls));
    assert_eq!(get(&guest.memory, PAGE, 0x4400), 7);
    let mut v = good();
    let primary = v.primary() | ProcControls::SECONDARY;
    set!(v, PROC_CONTROLS = primary.bits(), PROC_CONTROLS2 = ProcControls2::SHADOW_VMCS.bits());
    fill(&guest.memory, PAGE, &v);
    assert_eq!(guest.enter(EntryBy::Vmlaunch), Err(Fail::Valid(InstructionError::InvalidControls)));
}

#[test]
fn a_failed_entry_is_told_in_the_page() {
    let mut guest = Guest::new();
    let mut v = good();
    set!(v, GUEST_RFLAGS = 0);
    fill(&guest.memory, PAGE, &v);
    guest.enter(EntryBy::Vmlaunch).unwrap();
    let Entered::Failed(failure) = guest.machine.finish_entry(&LIMITS, &guest.memory) else {
        panic!("entered")
    };
    guest.machine.fail_entry(failure);
    guest.machine.store_enlightened(&guest.memory);
    assert_eq!(get(&guest.memory, PAGE, 0x4402), 1 << 31 | 33);
    assert_eq!(clean(&guest.memory, PAGE), 0, "L1's");
}

#[test]
fn the_msr_bitmap_is_clean_only_if_l1_asked_for_that() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.leave(&left());
    for (control, clean, keeps) in [(0, ALL_CLEAN, false), (2, ALL_CLEAN, true), (2, !2, false)] {
        guest.memory.put(PAGE + at::CONTROL as u64, &u32::to_le_bytes(control));
        guest.memory.put(PAGE + at::CLEAN as u64, &u32::to_le_bytes(clean));
        guest.load(EntryBy::Vmresume).unwrap();
        assert_eq!(guest.machine.keeps_msr_bitmap(), keeps);
    }
    guest.load(EntryBy::Vmlaunch).unwrap();
    assert!(!guest.machine.keeps_msr_bitmap());
}

#[test]
fn a_flush_for_l2_needs_the_word_of_all() {
    let mut guest = Guest::new();
    let direct = |guest: &mut Guest, assist: u8, control: u32| {
        guest.memory.put(ASSIST_AT + 32, &[assist]);
        guest.memory.put(PAGE + at::CONTROL as u64, &control.to_le_bytes());
        guest.load(EntryBy::Vmresume).unwrap();
        guest.machine.told().unwrap().direct_flush
    };
    assert!(direct(&mut guest, 1, 1));
    assert!(!direct(&mut guest, 0, 1));
    assert!(!direct(&mut guest, 1, 2));
    guest.machine.enlighten(true, true, false, Some(Gpa(ASSIST_AT)));
    assert!(!direct(&mut guest, 1, 1));
    guest.memory.put(PAGE + at::PARTITION_ASSIST as u64, &0xb000_u64.to_le_bytes());
    guest.load(EntryBy::Vmresume).unwrap();
    assert_eq!(guest.machine.wants_flush_told(&guest.memory), Some(false));
    guest.memory.put(0xb000, &[0, 0, 0, 1]);
    assert_eq!(guest.machine.wants_flush_told(&guest.memory), Some(true));
    guest.memory.put(PAGE + at::PARTITION_ASSIST as u64, &NOWHERE.to_le_bytes());
    guest.load(EntryBy::Vmresume).unwrap();
    assert_eq!(guest.machine.wants_flush_told(&guest.memory), None);
    guest.machine.tell_flush(&guest.memory);
    assert_eq!(get(&guest.memory, PAGE, 0x4402), 0x1000_0031);
}

fn restore(guest: &mut Guest, bytes: &[u8], enlightened: bool) -> Result<Restored, saved::Refused> {
    let mut images = Images::NONE;
    let capabilities = guest.machine.checked_by();
    let context = Context { offered: true, smm: false, enlightened };
    let onto = Onto { context, capabilities: &capabilities, limits: &LIMITS };
    let good = saved::check(bytes, &onto, &guest.memory, &mut images)?;
    Ok(saved::take_over(&mut guest.machine, &good, &images).0)
}

#[test]
fn a_saved_state_says_that_it_has_one_and_not_where() {
    for runs in [false, true] {
        let mut guest = Guest::new();
        guest.run(EntryBy::Vmlaunch);
        if runs {
            guest.machine.save_running(&left(), &KNOWN);
        } else {
            guest.leave(&left());
            put(&guest.memory, PAGE, 0x6c16, 0x5555);
        }
        guest.machine.refresh_enlightened(&guest.memory);
        let mut bytes: Vec<u8> = std::vec![0; saved::LARGEST];
        assert_eq!(saved::save(&guest.machine, None, &mut bytes), Some(HEADER + IMAGE));
        bytes.truncate(HEADER + IMAGE);
        let flags = u16::from_le_bytes([bytes[0], bytes[1]]);
        assert_eq!(flags & flag::EVMCS, flag::EVMCS);
        assert_eq!(bytes[16..24], [0xff; 8], "no address");

        let mut other = Guest::new();
        assert_eq!(restore(&mut other, &bytes, false), Err(saved::Refused::Flags));
        let expected = if runs { Restored::L2 } else { Restored::L1 };
        assert_eq!(restore(&mut other, &bytes, true), Ok(expected));
        assert!(other.machine.is_unsettled());
        assert_eq!(saved::size(&other.machine), HEADER + IMAGE, "not lost");
        if !runs {
            assert_eq!(
                other.machine.vmcs12().get(field::HOST_RIP),
                0x5555,
                "not only what is not clean"
            );
        }
        other.machine.settle_enlightened(&LIMITS, &other.memory);
        assert!(other.machine.is_enlightened() && !other.machine.is_unsettled());
        assert_eq!(get(&other.memory, PAGE, 0x681e), 0x4002, "the state is newer than the page");
        if runs {
            other.leave(&left());
        }
        assert_eq!(get(&other.memory, PAGE, 0x4402), 10);
    }
}

#[test]
fn a_state_whose_page_is_not_there_waits_for_it_while_l2_runs() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.machine.save_running(&left(), &KNOWN);
    let mut bytes: Vec<u8> = std::vec![0; HEADER + IMAGE];
    saved::save(&guest.machine, None, &mut bytes).unwrap();
    for (enlightens, page) in [(0, PAGE), (1, NOWHERE), (1, PAGE + 1)] {
        restore(&mut guest, &bytes, true).unwrap();
        guest.name(enlightens, page);
        guest.machine.settle_enlightened(&LIMITS, &guest.memory);
        assert!(guest.machine.is_unsettled());
        // It is saved with all it has, and goes on as soon as the page is there.
        assert_eq!(saved::save(&guest.machine, None, &mut bytes), Some(HEADER + IMAGE));
        guest.name(1, PAGE);
        guest.machine.settle_enlightened(&LIMITS, &guest.memory);
        assert!(guest.machine.is_enlightened() && !guest.machine.is_unsettled());
        guest.leave(&left());
        // Where L1 runs, its next entry names one.
        guest.machine.refresh_enlightened(&guest.memory);
        let mut of_l1: Vec<u8> = std::vec![0; HEADER + IMAGE];
        saved::save(&guest.machine, None, &mut of_l1).unwrap();
        restore(&mut guest, &of_l1, true).unwrap();
        guest.name(enlightens, page);
        guest.machine.settle_enlightened(&LIMITS, &guest.memory);
        assert!(!guest.machine.is_enlightened() && !guest.machine.owes_memory());
    }
    // One that says it has a VMCS and brings none.
    let flags = flag::EVMCS.to_le_bytes();
    let mut short = bytes[..HEADER].to_vec();
    short[..2].copy_from_slice(&flags);
    short[4..8].copy_from_slice(&(HEADER as u32).to_le_bytes());
    assert_eq!(restore(&mut guest, &short, true), Err(saved::Refused::Flags));
}

/// Memory that can only be read.
struct ReadOnly<'a>(&'a Memory);

impl GuestMemory for ReadOnly<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.0.read(at, into)
    }

    fn write(&self, _: Gpa, _: &[u8]) -> Result<(), Outside> {
        Err(Outside)
    }

    fn exchange(&self, _: Gpa, _: u64, _: u64) -> Result<bool, Outside> {
        Err(Outside)
    }
}

#[test]
fn a_page_that_can_only_be_read_is_not_found_for_a_restored_state() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    guest.machine.save_running(&left(), &KNOWN);
    let mut bytes: Vec<u8> = std::vec![0; HEADER + IMAGE];
    saved::save(&guest.machine, None, &mut bytes).unwrap();
    restore(&mut guest, &bytes, true).unwrap();
    guest.machine.settle_enlightened(&LIMITS, &ReadOnly(&guest.memory));
    assert!(guest.machine.is_unsettled(), "L2's state is kept until the page can be written");
    guest.machine.settle_enlightened(&LIMITS, &guest.memory);
    assert!(!guest.machine.is_unsettled() && guest.machine.is_enlightened());
}

#[test]
fn what_smm_has_put_aside_is_not_read_from_the_page_again() {
    let mut guest = Guest::new();
    guest.run(EntryBy::Vmlaunch);
    let asked = guest.machine.vmcs12.get(field::PROC_CONTROLS2);
    guest.machine.save_running(&left(), &KNOWN);
    guest.machine.put_aside();
    put(&guest.memory, PAGE, 0x401e, (asked | 1 << 18).into());
    guest.machine.refresh_enlightened(&guest.memory);
    assert_eq!(guest.machine.vmcs12.get(field::PROC_CONTROLS2), asked, "RSM enters it unchecked");
    assert!(guest.machine.take_back());
}
