use x86::vmcs::{EntryControls, Group, Groups, InstructionError, field};
use x86::{Exception, Gpa, Rflags};
use zerocopy::IntoBytes;

use super::*;
use crate::leave::{Known, REST, Report};
use crate::merge::{self, Fields};
use crate::testing::{CPU, KNOWN, LIMITS, Memory, Vmcs02, capabilities, good, set};

const VMXON: u64 = 0x1000;
const REGION: u64 = 0x2000;
const OTHER: u64 = 0x3000;
const OPERAND: u64 = 0xf000;

/// L2 is not in IA-32e mode.
const LEGACY: Known = Known { efer: 0, ..KNOWN };

struct Guest {
    machine: Machine,
    memory: Memory,
    cpu: Cpu,
}

type Result = core::result::Result<Then, Fail>;

impl Guest {
    /// Outside VMX operation, with regions in memory.
    fn new() -> Self {
        let memory = Memory::new();
        for region in [VMXON, REGION, OTHER] {
            memory.put(region, good().as_bytes());
        }
        Self { machine: Machine::new(capabilities()), memory, cpu: CPU }
    }

    /// In VMX operation with a current VMCS.
    fn with_vmcs() -> Self {
        let mut guest = Self::new();
        assert_eq!(guest.pointer(|pointer| Instruction::Vmxon { pointer }, VMXON), Ok(Then::Next));
        assert_eq!(guest.load(REGION), Ok(Then::Next));
        guest
    }

    fn run(&mut self, instruction: Instruction) -> Result {
        self.machine.execute(instruction, &self.cpu, &LIMITS, &mut self.memory)
    }

    fn pointer(&mut self, instruction: fn(Address) -> Instruction, to: u64) -> Result {
        self.memory.put(OPERAND, &to.to_le_bytes());
        self.run(instruction(Ok(OPERAND)))
    }

    fn load(&mut self, to: u64) -> Result {
        self.pointer(|pointer| Instruction::Vmptrld { pointer }, to)
    }

    fn clear(&mut self, to: u64) -> Result {
        self.pointer(|pointer| Instruction::Vmclear { pointer }, to)
    }

    fn read(&mut self, field: u64) -> Result {
        self.run(Instruction::Vmread { field, to: Place::Register(0) })
    }

    fn write(&mut self, field: u64, value: u64) -> Result {
        self.run(Instruction::Vmwrite { field, from: Place::Register(0), value })
    }
}

fn valid(error: InstructionError) -> Result {
    Err(Fail::Valid(error))
}

fn fault(exception: Exception) -> Result {
    Err(Fail::Fault(exception))
}

#[test]
fn vmxon_looks_at_mode_level_and_registers_in_order() {
    let vmxon = |g: &mut Guest| g.pointer(|pointer| Instruction::Vmxon { pointer }, VMXON);
    let cases: [(Cpu, Result); 8] = [
        (Cpu { vm86: true, cpl: 3, ..CPU }, fault(Exception::ud())),
        (Cpu { is_64_bit: false, ..CPU }, fault(Exception::ud())),
        (Cpu { cr4: 0x20, cpl: 3, ..CPU }, fault(Exception::ud())),
        (Cpu { cr0: 0x8005_0032, ..CPU }, fault(Exception::ud())),
        (Cpu { cpl: 1, ..CPU }, fault(Exception::gp(0))),
        (Cpu { cr0: 0x8005_0013, ..CPU }, fault(Exception::gp(0))),
        (Cpu { feature_control: 1, ..CPU }, fault(Exception::gp(0))),
        (Cpu { feature_control: 4, ..CPU }, fault(Exception::gp(0))),
    ];
    for (cpu, expected) in cases {
        let mut guest = Guest::new();
        guest.cpu = cpu;
        assert_eq!(vmxon(&mut guest), expected);
    }
    let mut guest = Guest::new();
    assert_eq!(guest.run(Instruction::Vmxoff), fault(Exception::ud()));
    for wrong in [0x1001, 1 << 40, 0x9000, 1 << 39] {
        let result = guest.pointer(|pointer| Instruction::Vmxon { pointer }, wrong);
        assert_eq!(result, Err(Fail::Invalid), "{wrong:#x}");
    }
    let late = Instruction::Vmxon { pointer: Err(Exception::ss(0)) };
    assert_eq!(guest.run(late), fault(Exception::ss(0)));
    assert_eq!(vmxon(&mut guest), Ok(Then::Next));
    assert_eq!(vmxon(&mut guest), Err(Fail::Invalid), "no current VMCS to tell it in");
    guest.load(REGION).unwrap();
    assert_eq!(vmxon(&mut guest), valid(InstructionError::VmxonInRoot));
    assert_eq!(guest.read(0x4400), Ok(Then::Register(0, 15)));
}

#[test]
fn pointers_are_checked_in_the_manuals_order() {
    let mut guest = Guest::with_vmcs();
    assert_eq!(guest.load(0x2001), valid(InstructionError::VmptrldAddress));
    assert_eq!(guest.load(VMXON), valid(InstructionError::VmptrldVmxonPointer));
    assert_eq!(guest.load(0x9000), valid(InstructionError::VmptrldRevision));
    assert_eq!(guest.load(1 << 39), valid(InstructionError::VmptrldRevision));
    assert_eq!(guest.clear(0x2001), valid(InstructionError::VmclearAddress));
    assert_eq!(guest.clear(VMXON), valid(InstructionError::VmclearVmxonPointer));
    assert_eq!(guest.machine.current(), Some(Gpa(REGION)));
    let store = Instruction::Vmptrst { to: Ok(0x8000) };
    assert_eq!(guest.run(store), Ok(Then::Next));
    assert_eq!(guest.memory.read_u64(Gpa(0x8000)), Ok(REGION));
    guest.clear(REGION).unwrap();
    assert_eq!(guest.run(store), Ok(Then::Next));
    assert_eq!(guest.memory.read_u64(Gpa(0x8000)), Ok(u64::MAX));
    assert_eq!(guest.load(0x2001), Err(Fail::Invalid));
    guest.cpu.cpl = 3;
    assert_eq!(guest.load(REGION), fault(Exception::gp(0)));
    guest.cpu = Cpu { is_64_bit: false, ..CPU };
    assert_eq!(guest.load(REGION), fault(Exception::ud()));
}

#[test]
fn every_byte_of_a_region_is_read_once() {
    let mut guest = Guest::with_vmcs();
    guest.memory.forget_reads();
    guest.load(OTHER).unwrap();
    assert_eq!(guest.memory.most_reads(), 1);
}

#[test]
fn the_private_copy_goes_back_when_the_vmcs_is_left() {
    let rip = u64::from(field::GUEST_RIP.encoding());
    let lies = |g: &Guest| g.memory.read_u64(Gpa(REGION + 544)).unwrap();
    let leaving: [fn(&mut Guest); 3] = [
        |g| assert!(g.clear(REGION).is_ok()),
        |g| assert!(g.load(OTHER).is_ok()),
        |g| assert!(g.run(Instruction::Vmxoff).is_ok()),
    ];
    for leave in leaving {
        let mut guest = Guest::with_vmcs();
        guest.write(rip, 0x77).unwrap();
        assert_eq!(lies(&guest), 0x4000);
        leave(&mut guest);
        assert_eq!(lies(&guest), 0x77);
    }
    let mut guest = Guest::with_vmcs();
    guest.write(rip, 0x77).unwrap();
    guest.machine.reset();
    assert_eq!(lies(&guest), 0x4000, "INIT writes nothing back");
    assert_eq!(guest.read(rip), fault(Exception::ud()));
}

#[test]
fn fields_are_read_and_written_by_their_encodings() {
    let mut guest = Guest::with_vmcs();
    assert_eq!(guest.write(0x2010, 0x1_0000_0002), Ok(Then::Next));
    assert_eq!(guest.read(0x2010), Ok(Then::Register(0, 0x1_0000_0002)));
    assert_eq!(guest.read(0x2011), Ok(Then::Register(0, 1)));
    assert_eq!(guest.read(0x0001), valid(InstructionError::UnsupportedField));
    assert_eq!(guest.read(0x1_0000_2010), valid(InstructionError::UnsupportedField));
    assert_eq!(guest.write(0x7ffe, 0), valid(InstructionError::UnsupportedField));
    assert_eq!(guest.write(0x4402, 5), Ok(Then::Next), "MISC says that it may");
    guest.machine.capabilities.misc &= !(1 << 29);
    assert_eq!(guest.write(0x4402, 5), valid(InstructionError::ReadOnlyField));
    let to = Place::Memory(Ok(0x8000));
    assert_eq!(guest.run(Instruction::Vmread { field: 0x2010, to }), Ok(Then::Next));
    assert_eq!(guest.memory.read_u64(Gpa(0x8000)), Ok(0x1_0000_0002));
    let bad = Place::Memory(Ok(1 << 50));
    let result = guest.run(Instruction::Vmread { field: 0x2010, to: bad });
    assert_eq!(result, fault(Exception::pf(1 << 50, 2)));
    guest.cpu = Cpu { long_mode: false, is_64_bit: false, ..CPU };
    assert_eq!(guest.read(0x1_0000_2010), Ok(Then::Register(0, 2)));
    guest.clear(REGION).unwrap();
    assert_eq!(guest.read(0x2010), Err(Fail::Invalid));
}

#[test]
fn entries_fail_in_the_manuals_order() {
    let mut guest = Guest::with_vmcs();
    guest.cpu.blocked_by_mov_ss = true;
    assert_eq!(guest.run(Instruction::Vmresume), valid(InstructionError::EntryBlockedByMovSs));
    guest.cpu.blocked_by_mov_ss = false;
    assert_eq!(guest.run(Instruction::Vmresume), valid(InstructionError::VmresumeNotLaunched));
    guest.write(0x4000, 0).unwrap();
    guest.write(0x6c00, 0).unwrap();
    assert_eq!(guest.run(Instruction::Vmlaunch), valid(InstructionError::InvalidControls));
    guest.write(0x4000, 0x1f).unwrap();
    assert_eq!(guest.run(Instruction::Vmlaunch), valid(InstructionError::InvalidHostState));
    guest.write(0x6c00, 0x8005_0033).unwrap();
    let entry = Then::Enter(PendingEntry { by: EntryBy::Vmlaunch });
    assert_eq!(guest.run(Instruction::Vmlaunch), Ok(entry));
    guest.write(0x681e, 1 << 50).unwrap();
    assert_eq!(guest.run(Instruction::Vmlaunch), Ok(entry));
    let failed = guest.machine.finish_entry(&LIMITS, &guest.memory);
    assert_eq!(failed, Entered::Failed(crate::EntryFailure::GUEST));
    guest.machine.fail_entry(crate::EntryFailure::GUEST);
    assert_eq!(guest.machine.level(), Level::L1);
    assert_eq!(guest.read(0x4402), Ok(Then::Register(0, 0x8000_0021)));
    assert_eq!(guest.run(Instruction::Vmresume), valid(InstructionError::VmresumeNotLaunched));
    guest.clear(REGION).unwrap();
    assert_eq!(guest.run(Instruction::Vmlaunch), Err(Fail::Invalid));
}

/// Enters L2 on a hardware VMCS, and exits for CPUID.
fn round_trip(guest: &mut Guest, hardware: &mut Vmcs02, instruction: Instruction) {
    round_trip_of(guest, hardware, instruction, &KNOWN);
}

fn round_trip_of(
    guest: &mut Guest,
    hardware: &mut Vmcs02,
    instruction: Instruction,
    known: &Known,
) {
    let needs = guest.machine.needs(&instruction);
    guest.machine.fetch(hardware, known, needs);
    let Ok(Then::Enter(entry)) = guest.run(instruction) else { panic!("not entered") };
    let Entered::L2(dirty) = guest.machine.finish_entry(&LIMITS, &guest.memory) else {
        panic!("failed")
    };
    hardware.written.clear();
    merge::compose(&l0(), guest.machine.vmcs12(), dirty, hardware);
    guest.machine.entered(entry);
    assert_eq!(guest.machine.level(), Level::L2);
    hardware.put(field::EXIT_REASON, 10);
    hardware.put(field::INSTRUCTION_LENGTH, 2);
    let report = Report::of(hardware);
    guest.machine.leave(hardware, &report, known, &guest.memory);
}

/// What an exit has left in the hardware's VMCS comes before L1 reads or writes it, by whatever is in the upper half of the register
/// that names the field.
#[test]
fn a_32_bit_l1_names_a_field_by_half_a_register() {
    let mut guest = Guest::with_vmcs();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    hardware.put(field::GUEST_FS_BASE, 0x7777);
    guest.cpu = Cpu { long_mode: false, is_64_bit: false, ..CPU };
    let field = u64::from(field::GUEST_FS_BASE.encoding()) | 1 << 61;
    for instruction in [
        Instruction::Vmread { field, to: Place::Register(0) },
        Instruction::Vmwrite { field, from: Place::Register(0), value: 0 },
    ] {
        assert_eq!(guest.machine.needs(&instruction), Groups::of(Group::Segments));
    }
    let needs = guest.machine.needs(&Instruction::Vmread { field, to: Place::Register(0) });
    guest.machine.fetch(&hardware, &KNOWN, needs);
    assert_eq!(guest.read(field), Ok(Then::Register(0, 0x7777)));
}

/// Which PDPTEs an exit has saved does not depend on controls that L1 changes behind it.
#[test]
fn pdptes_are_what_they_were_at_the_exit() {
    let mut guest = Guest::with_vmcs();
    let mut hardware = Vmcs02::new();
    for (field, value) in [
        (0x4012, 0x91fb),
        (0x2806, 0x801),
        (0x4816, 0xc09b),
        (0x401e, 2),
        (0x201a, 0x501e),
        (0x280a, 0x7001),
    ] {
        guest.write(field, value).unwrap();
    }
    round_trip_of(&mut guest, &mut hardware, Instruction::Vmlaunch, &LEGACY);
    hardware.put(field::GUEST_PDPTE0, 0x8001);
    guest.write(0x401e, 0).unwrap();
    let read = Instruction::Vmread { field: 0x280a, to: Place::Register(0) };
    guest.machine.fetch(&hardware, &LEGACY, guest.machine.needs(&read));
    assert_eq!(guest.run(read), Ok(Then::Register(0, 0x8001)));
}

fn l0() -> merge::L0 {
    use x86::vmcs::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2};
    merge::L0 {
        pin: PinControls::from_bits_retain(0x3f),
        primary: ProcControls::SECONDARY,
        secondary: ProcControls2::EPT,
        exit: ExitControls::HOST_64,
        entry: EntryControls::LOAD_EFER,
        exceptions: 0,
        page_faults: false,
        cr0_ones: 0x20,
        cr0_mask: 0x20,
        cr4_ones: 0x2000,
        cr4_mask: 0x2000,
        tsc: merge::time::Tsc::SAME,
        preemption_timer: None,
        vpid: 9,
        pages: merge::Pages::default(),
        efer: 0xd01,
        dr7: 0x400,
        debugctl: 0,
        pat: KNOWN.pat,
    }
}

#[test]
fn a_second_entry_composes_what_has_changed_and_no_more() {
    let mut guest = Guest::with_vmcs();
    // As stock KVM: debug registers and PAT are loaded.
    guest.write(0x4012, 0x93ff | 1 << 14).unwrap();
    guest.write(0x400c, 0x23_6fff).unwrap();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    assert!(hardware.written.len() > 70);
    assert_eq!(guest.machine.dirty(), Groups::NONE);

    guest.write(u64::from(field::GUEST_RIP.encoding()), 0x4002).unwrap();
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), Groups::NONE);
    round_trip(&mut guest, &mut hardware, Instruction::Vmresume);
    assert_eq!(hardware.written.len(), 5, "{:x?}", hardware.written);
    assert_eq!(hardware.has(field::GUEST_RIP), 0x4002);

    round_trip(&mut guest, &mut hardware, Instruction::Vmresume);
    assert!(hardware.written.is_empty(), "{:x?}", hardware.written);
}

/// No VMWRITE tells of a table in L1's memory.
#[test]
fn every_entry_without_ept_loads_the_pdptes() {
    const TABLE: u64 = 0x5000;
    let mut guest = Guest::with_vmcs();
    let put = |g: &Guest, entry: u64| g.memory.put(TABLE + 8, &entry.to_le_bytes());
    put(&guest, 0x7001);
    for (field, value) in [(0x4012, 0x91fb), (0x2806, 0), (0x4816, 0xc09b), (0x6802, TABLE)] {
        guest.write(field, value).unwrap();
    }
    let mut hardware = Vmcs02::new();
    round_trip_of(&mut guest, &mut hardware, Instruction::Vmlaunch, &LEGACY);
    assert_eq!(hardware.has(field::GUEST_PDPTE1), 0x7001);
    put(&guest, 0x8001);
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), REST, "CR0, CR3 and CR4 as they are");
    round_trip_of(&mut guest, &mut hardware, Instruction::Vmresume, &LEGACY);
    assert_eq!(hardware.has(field::GUEST_PDPTE1), 0x8001);
    put(&guest, 0x8003);
    let needs = guest.machine.needs(&Instruction::Vmresume);
    guest.machine.fetch(&hardware, &LEGACY, needs);
    assert!(matches!(guest.run(Instruction::Vmresume), Ok(Then::Enter(_))));
    let failed = guest.machine.finish_entry(&LIMITS, &guest.memory);
    assert_eq!(
        failed,
        Entered::Failed(crate::EntryFailure { qualification: 2, ..crate::EntryFailure::GUEST })
    );
}

/// With EPT the fields count, and nothing of L1's memory.
#[test]
fn an_entry_with_ept_takes_the_pdptes_of_the_vmcs() {
    let mut guest = Guest::with_vmcs();
    guest.memory.put(0x5008, &0x8003u64.to_le_bytes());
    let secondary = u64::from(good().get(field::PROC_CONTROLS)) | 1 << 31;
    let values = [
        (0x4002, secondary),
        (0x401e, 2),
        (0x4012, 0x91fb),
        (0x2806, 0),
        (0x4816, 0xc09b),
        (0x6802, 0x5000),
        (0x201a, 0x601e),
        (0x280c, 0x7001),
    ];
    for (field, value) in values {
        guest.write(field, value).unwrap();
    }
    let mut hardware = Vmcs02::new();
    round_trip_of(&mut guest, &mut hardware, Instruction::Vmlaunch, &LEGACY);
    assert_eq!(hardware.has(field::GUEST_PDPTE1), 0x7001);
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), Groups::NONE);
}

/// A field that is composed by a word has to be composed anew when the word alone changes: L2 would run with its EFER, its
/// TSC or its PDPTEs of before, the hardware with another EFER than the one that L0 goes by.
#[test]
fn what_is_composed_by_a_word_follows_when_the_word_alone_changes() {
    let mut guest = Guest::with_vmcs();
    // As stock KVM: everything is loaded and saved, so that an exit leaves the MSRs clean.
    guest.write(0x4012, 0x93ff | 1 << 14).unwrap();
    guest.write(0x400c, 0x23_6fff).unwrap();
    let primary = guest.read(0x4002);
    let Ok(Then::Register(_, primary)) = primary else { panic!("{primary:?}") };
    guest.write(0x4002, primary | 1 << 3).unwrap();
    guest.write(0x2010, 0x5555).unwrap();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    let l0 = merge::L0 { efer: KNOWN.efer ^ 1, dr7: 0x401, pat: 0x77, ..l0() };
    for (field, value) in [
        // Without EFER, PAT and debug controls; without the offset.
        (0x4012, 0x13fb),
        (0x4002, primary),
        (0x4002, primary | 1 << 3),
        (0x4012, 0x93ff | 1 << 14),
    ] {
        let needs = Groups::ALL;
        guest.machine.fetch(&hardware, &KNOWN, needs);
        guest.write(field, value).unwrap();
        let Ok(Then::Enter(entry)) = guest.run(Instruction::Vmresume) else { panic!("{field:#x}") };
        let Entered::L2(dirty) = guest.machine.finish_entry(&LIMITS, &guest.memory) else {
            panic!("{field:#x} failed")
        };
        merge::compose(&l0, guest.machine.vmcs12(), dirty, &mut hardware);
        let mut whole = Vmcs02::new();
        merge::compose(&l0, guest.machine.vmcs12(), Groups::ALL, &mut whole);
        for name in [field::GUEST_EFER, field::GUEST_PAT, field::GUEST_DEBUGCTL, field::TSC_OFFSET]
        {
            assert_eq!(
                hardware.has(name),
                whole.has(name),
                "{:#x} behind {field:#x}",
                name.encoding()
            );
        }
        assert_eq!(hardware.has(field::GUEST_DR7), whole.has(field::GUEST_DR7));
        guest.machine.entered(entry);
        hardware.put(field::EXIT_REASON, 10);
        hardware.put(field::INSTRUCTION_LENGTH, 2);
        let report = Report::of(&hardware);
        guest.machine.leave(&hardware, &report, &KNOWN, &guest.memory);
    }
}

/// Whose PDPTEs are L2's follows from more than one word, and from none of their own group: each of them alone.
#[test]
fn pdptes_are_composed_anew_where_a_word_alone_makes_them_l2s() {
    let on = u64::from(good().get(field::PROC_CONTROLS)) | 1 << 31;
    let pae = [(0x4012, 0x91fb), (0x2806, 0), (0x4816, 0xc09b), (0x6802, 0x5000), (0x201a, 0x601e)];
    for (before, words) in [
        // EPT by the secondary controls, by their activation, and PAE paging by the entry controls.
        ([(0x4002, on), (0x401e, 0)], &[(0x401e, 2)][..]),
        ([(0x4002, on & !(1 << 31)), (0x401e, 2)], &[(0x4002, on)]),
        ([(0x4002, on), (0x401e, 2)], &[(0x4012, 0x11fb), (0x4816, 0xc09b)]),
    ] {
        let mut guest = Guest::with_vmcs();
        let legacy = words.len() == 1;
        let pae = pae.iter().filter(|_| legacy);
        for (field, value) in before.iter().chain(pae).chain(&[(0x201a, 0x601e)]) {
            guest.write(*field, *value).unwrap();
        }
        let known = if legacy { &LEGACY } else { &KNOWN };
        let mut hardware = Vmcs02::new();
        round_trip_of(&mut guest, &mut hardware, Instruction::Vmlaunch, known);
        // L1 has asked for a register of L2's; without EPT these are none of those that it gets.
        guest.machine.fetch(&hardware, known, guest.machine.behind());
        hardware.put(field::GUEST_PDPTE1, 0x9001);
        for (field, value) in words {
            guest.write(*field, *value).unwrap();
        }
        round_trip_of(&mut guest, &mut hardware, Instruction::Vmresume, &LEGACY);
        assert_eq!(hardware.has(field::GUEST_PDPTE1), 0, "{words:x?}");
    }
}

#[test]
fn what_l2_has_left_in_the_hardware_is_fetched_when_it_is_asked_for() {
    let mut guest = Guest::with_vmcs();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    assert_eq!(guest.machine.behind(), REST);
    hardware.set(field::GUEST_FS_BASE, 0x7777);
    let fs_base = u64::from(field::GUEST_FS_BASE.encoding());
    let read = |field: u64| Instruction::Vmread { field, to: Place::Register(0) };
    let write = |field: u64| Instruction::Vmwrite { field, from: Place::Register(0), value: 0 };
    let segments = Groups::of(Group::Segments);
    let rights = u64::from(field::GUEST_CS_RIGHTS.encoding());
    assert_eq!(guest.machine.needs(&read(rights)), Groups::NONE);
    assert_eq!(guest.machine.needs(&write(rights)), segments);
    assert_eq!(guest.machine.needs(&read(0x681e)), Groups::NONE);
    assert_eq!(guest.machine.needs(&read(fs_base)), segments);
    assert_eq!(guest.machine.needs(&Instruction::Vmxoff), REST);
    guest.machine.fetch(&hardware, &KNOWN, segments);
    assert_eq!(guest.read(fs_base), Ok(Then::Register(0, 0x7777)));
    assert_eq!(guest.machine.needs(&read(fs_base)), Groups::NONE);
    guest.write(fs_base, 1).unwrap();
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), guest.machine.behind());
    round_trip(&mut guest, &mut hardware, Instruction::Vmresume);
    assert_eq!(hardware.has(field::GUEST_FS_BASE), 1);
}

/// The first field that L1 asks for comes by itself, and all of its group with the second, or with another value.
#[test]
fn one_field_that_is_asked_for_is_fetched_by_itself() {
    let mut guest = Guest::with_vmcs();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    hardware.set(field::GUEST_ES_BASE, 0x7777);
    hardware.set(field::GUEST_DS_BASE, 0x8888);
    let [es, ds] = [field::GUEST_ES_BASE, field::GUEST_DS_BASE].map(|f| u64::from(f.encoding()));
    let segments = Groups::of(Group::Segments);
    let read = |field: u64| Instruction::Vmread { field, to: Place::Register(0) };
    let write = |field, value| Instruction::Vmwrite { field, from: Place::Register(0), value };
    // What is not in the hardware as L1 is to read it is not, nor what is written.
    let cr4 = u64::from(field::GUEST_CR4.encoding());
    let registers = Groups::of(Group::ControlRegisters);
    assert_eq!(guest.machine.asks_one(&read(cr4), registers), None);
    let cr3 = u64::from(field::GUEST_CR3.encoding());
    assert_eq!(guest.machine.asks_one(&read(cr3), registers).map(u64::from), Some(cr3));
    assert_eq!(guest.machine.asks_one(&write(es, 0x7777), segments), None);
    assert_eq!(guest.machine.asks_one(&read(es), Groups::NONE), None);
    let one = guest.machine.asks_one(&read(es), segments);
    assert_eq!(one.map(u64::from), Some(es));
    guest.machine.put_alone(es as u16, 0x7777);
    assert_eq!(guest.machine.needs(&read(es)), Groups::NONE);
    assert_eq!(guest.read(es), Ok(Then::Register(0, 0x7777)));
    // The same value changes nothing; another one is of a group that has to be whole.
    assert_eq!(guest.machine.needs(&write(es, 0x7777)), Groups::NONE);
    assert_eq!(guest.machine.needs(&write(es, 0x7778)), segments);
    // 32-bit code writes the lower half, which is another value.
    guest.machine.put_alone(es as u16, 0x1_0000_7777);
    assert_eq!(guest.machine.needs(&write(es, 0x1_0000_7777)), segments);
    assert_eq!(guest.machine.asks_one(&read(ds), segments), None);
    assert_eq!(guest.machine.needs(&read(ds)), segments);
    // The entry has nothing to compose of it, and the next exit leaves it anew.
    guest.machine.put_alone(es as u16, 0x7777);
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), Groups::NONE);
    round_trip(&mut guest, &mut hardware, Instruction::Vmresume);
    assert_eq!(guest.machine.needs(&read(es)), segments);
    assert!(guest.machine.asks_one(&read(ds), segments).is_some());
}

/// L2 that has set CR0.PE itself and gone on to virtual-8086 mode: CR0 is asked for before the entry looks at it.
#[test]
fn an_entry_asks_for_cr0_where_rflags_or_efer_depend_on_it() {
    let mut guest = Guest::with_vmcs();
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), Groups::NONE);
    let vmcs12 = guest.machine.vmcs12_mut();
    let flags = vmcs12.get(field::GUEST_RFLAGS);
    vmcs12.set(field::GUEST_RFLAGS, flags | Rflags::VM.bits());
    guest.machine.vm86 = true;
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), REST);
    guest.machine.vmcs12_mut().set(field::GUEST_RFLAGS, flags);
    guest.machine.vm86 = false;
    let entry = guest.machine.vmcs12().entry();
    let untold = entry.difference(EntryControls::LOAD_EFER | EntryControls::IA32E_GUEST);
    guest.machine.vmcs12_mut().set(field::ENTRY_CONTROLS, untold.bits());
    guest.machine.dirty = Groups::of(Group::Msrs);
    assert_eq!(guest.machine.needs(&Instruction::Vmresume), REST);
}

#[test]
fn vmx_operation_holds_bits_of_cr0_and_cr4() {
    let (cr0, cr4) = (0x8000_0031, 0x2020);
    let outside = Guest::new();
    assert!(outside.machine.takes_cr0(0x10) && outside.machine.takes_cr4(0));
    let mut guest = Guest::with_vmcs();
    assert!(guest.machine.takes_cr0(cr0) && guest.machine.takes_cr4(cr4));
    assert!(!guest.machine.takes_cr4(cr4 & !0x2000), "VMXE");
    for bit in [1, 0x20, 0x8000_0000] {
        assert!(!guest.machine.takes_cr0(cr0 & !bit), "{bit:#x}");
    }
    set!(guest.machine.vmcs12_mut(), PROC_CONTROLS = 1 << 31, PROC_CONTROLS2 = 1 << 7 | 1 << 1);
    guest.machine.enter_l2();
    assert!(guest.machine.takes_cr0(0x30) && !guest.machine.takes_cr0(0x10));
}

#[test]
fn l2_is_served_by_the_vmcs_that_the_link_names() {
    let mut guest = Guest::with_vmcs();
    let mut shadow = good();
    set!(shadow, GUEST_RIP = 0x5555);
    guest.memory.put(0x6000, shadow.as_bytes());
    guest.memory.put(0x6000, &0x91e5_7ed0u32.to_le_bytes());
    guest.write(0x401e, 1 << 14).unwrap();
    guest.write(0x2800, 0x6000).unwrap();
    let Ok(Then::Enter(entry)) = guest.run(Instruction::Vmlaunch) else { panic!() };
    assert!(matches!(guest.machine.finish_entry(&LIMITS, &guest.memory), Entered::L2(_)));
    guest.machine.entered(entry);
    assert_eq!(guest.read(0x681e), Ok(Then::Register(0, 0x5555)));
    assert_eq!(guest.write(0x681e, 0x6666), Ok(Then::Next));
    assert_eq!(guest.machine.vmcs12().get(field::GUEST_RIP), 0x4000);
    let hardware = Vmcs02::new();
    guest.machine.leave(&hardware, &Report::of(&hardware), &KNOWN, &guest.memory);
    assert_eq!(guest.memory.read_u64(Gpa(0x6000 + 544)), Ok(0x6666));
}

#[test]
fn invalidations_are_checked_by_kind_and_descriptor() {
    let mut guest = Guest::with_vmcs();
    let wrong = || valid(InstructionError::InvalidInvalidation);
    let mut run = |ept: bool, kind: u64, first: u64, second: u64| {
        guest.memory.put(OPERAND, &first.to_le_bytes());
        guest.memory.put(OPERAND + 8, &second.to_le_bytes());
        let descriptor = Ok(OPERAND);
        guest.run(if ept {
            Instruction::Invept { kind, descriptor }
        } else {
            Instruction::Invvpid { kind, descriptor }
        })
    };
    let does = |what| Ok(Then::Invalidate(what));
    assert_eq!(run(true, 0, 0, 0), wrong());
    assert_eq!(run(true, 3, 0, 0), wrong());
    assert_eq!(run(true, 1 << 32 | 1, 0x1e, 0), wrong());
    assert_eq!(run(true, 1, 0, 0), wrong());
    assert_eq!(run(true, 1, 0x501e, 0), does(Invalidation::Ept(0x501e)));
    assert_eq!(run(true, 2, 0, 0), does(Invalidation::AllEpt));
    assert_eq!(run(false, 4, 1, 0), wrong());
    assert_eq!(run(false, 0, 0, 0), wrong());
    assert_eq!(run(false, 0, 1, 1 << 50), wrong());
    assert_eq!(run(false, 0, 1, 9), does(Invalidation::Address { vpid: 1, address: 9 }));
    assert_eq!(run(false, 1, 7, 0), does(Invalidation::Vpid(7)));
    assert_eq!(run(false, 1, 0x1_0007, 0), wrong());
    assert_eq!(run(false, 2, 0, 0), does(Invalidation::AllVpids));
    assert_eq!(run(false, 3, 7, 0), does(Invalidation::NonGlobal(7)));
    guest.machine.capabilities.ept_vpid.0 = 0;
    let descriptor = Ok(OPERAND);
    assert_eq!(guest.run(Instruction::Invept { kind: 2, descriptor }), fault(Exception::ud()));
    assert_eq!(guest.run(Instruction::Invvpid { kind: 2, descriptor }), fault(Exception::ud()));
}

#[test]
fn vmfunc_switches_tables_or_exits() {
    let mut guest = Guest::with_vmcs();
    assert_eq!(guest.machine.vmfunc(0, 0, &LIMITS, &guest.memory), Switch::Undefined);
    guest.write(0x401e, 1 << 13 | 2).unwrap();
    guest.write(0x201a, 0x501e).unwrap();
    guest.write(0x2024, 0x7000).unwrap();
    let memory = &guest.memory;
    memory.put(0x7000, &0x501eu64.to_le_bytes());
    memory.put(0x7008, &0x601eu64.to_le_bytes());
    let machine = &mut guest.machine;
    assert_eq!(machine.vmfunc(0, 0, &LIMITS, memory), Switch::Exit, "the function is off");
    machine.vmcs12_mut().set(field::VM_FUNCTION_CONTROLS, 1);
    assert_eq!(machine.vmfunc(0, 0, &LIMITS, memory), Switch::Same);
    assert_eq!(machine.vmfunc(0, 1, &LIMITS, memory), Switch::Ept(0x601e));
    assert_eq!(machine.vmcs12().get(field::EPT_POINTER), 0x601e);
    assert_eq!(machine.vmfunc(0, 2, &LIMITS, memory), Switch::Exit, "no EPT pointer");
    assert_eq!(machine.vmfunc(0, 512, &LIMITS, memory), Switch::Exit);
    assert_eq!(machine.vmfunc(1, 0, &LIMITS, memory), Switch::Exit);
}

#[test]
fn flags_follow_the_result() {
    let before = Rflags::from_bits_retain(0x8d7);
    assert_eq!(Machine::rflags(&Ok(Then::Next), before), Some(Rflags::FIXED));
    assert_eq!(
        Machine::rflags(&Ok(Then::Enter(PendingEntry { by: EntryBy::Vmlaunch })), before),
        None
    );
    let invalid = Machine::rflags(&Err(Fail::Invalid), before);
    assert_eq!(invalid, Some(Rflags::FIXED | Rflags::CF));
    assert_eq!(Machine::rflags(&fault(Exception::ud()), before), None);
}

#[test]
fn every_entry_looks_at_the_priority() {
    let mut guest = Guest::with_vmcs();
    let primary = u64::from(good().get(field::PROC_CONTROLS)) | 1 << 21;
    for (encoding, value) in [(0x4002, primary), (0x2012, 0x8000), (0x401c, 6)] {
        guest.write(encoding, value).unwrap();
    }
    guest.memory.put(0x8080, &[0x6f]);
    let mut hardware = Vmcs02::new();
    round_trip(&mut guest, &mut hardware, Instruction::Vmlaunch);
    // No VMWRITE tells of it.
    guest.memory.put(0x8080, &[0x5f]);
    assert_eq!(guest.run(Instruction::Vmresume), valid(InstructionError::InvalidControls));
    guest.memory.put(0x8080, &[0x60]);
    round_trip(&mut guest, &mut hardware, Instruction::Vmresume);
}
