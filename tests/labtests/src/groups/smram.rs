//! The two address spaces of a VM: which memory a guest sees in system-management mode and which
//! outside it, and that what changes in one is seen there and only there (KVM API §4.35, §4.8).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::Chip;
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::machine::smram::*;
use crate::outcome::{Answer, Outcome, equal, fail};
use crate::runner::tests;

tests!("smram":
    each_mode_sees_its_own_memory,
    memory_of_one_space_is_a_device_in_the_other,
    the_same_root_means_other_tables_in_each_mode,
    slots_of_the_spaces_are_independent,
    a_slot_of_space_1_can_be_taken_away_and_given_back,
    the_dirty_log_of_each_space_is_its_own,
    memory_withdrawn_from_the_vmm_leaves_both_spaces,
    an_emulated_access_sees_the_space_of_its_mode,
);

const IN_HANDLER: u8 = 0x55;

/// Runs to the next mark and takes what `al` says.
fn next_mark(smm: &SmmGuest) -> Outcome<u8> {
    match smm.guest.exit()? {
        Exit::Io { write: true, port: PORT_MARK, data, .. } => Ok(data[0]),
        exit => fail(format!("expected a mark got {exit:x?}")),
    }
}

// An address where SMRAM lies over other memory.
const SHARED: u64 = SMBASE + 0x100;
const _: () = assert!(SHARED == 0x3_0100);

guest_code!(
    read_shared,
    64,
    "0: mov 0x30100, %rax",
    "mov %rax, RESULT",
    "incq 0x30108",
    "mov $0x11, %al",
    "out %al, $PORT_MARK",
    "jmp 0b"
);
guest_code!(
    handler_reads_shared,
    16,
    "mov $0x30100, %esi",
    "mov (%esi), %eax",
    "mov %eax, (RESULT + 8)",
    "incl 8(%esi)",
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "rsm"
);

fn each_mode_sees_its_own_memory() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_reads_shared())?;
    let (memory, smram) = (&smm.guest.memory, &smm.smram);
    memory.write(SHARED, 0xaaaa);
    smram.write(SHARED - SMBASE, 0xbbbb);
    equal("mark", next_mark(&smm)?, 0x11)?;
    for round in 1..20 {
        smm.smi()?;
        equal("mark", next_mark(&smm)?, IN_HANDLER)?;
        equal("mark", next_mark(&smm)?, 0x11)?;
        equal("outside", smm.guest.result(0), 0xaaaa)?;
        equal("inside", smm.guest.result(1), 0xbbbb)?;
        equal("written outside", memory.read(SHARED + 8), round + 1)?;
        equal("written inside", smram.read(SHARED + 8 - SMBASE), round)?;
    }
    Ok(())
}

guest_code!(
    read_nowhere,
    64,
    "mov $0x11, %al",
    "out %al, $PORT_MARK",
    "mov $NOWHERE, %edx",
    "mov (%rdx), %eax",
    "mov %rax, RESULT",
    done!()
);
guest_code!(
    handler_reads_nowhere,
    16,
    "mov $NOWHERE, %edx",
    "mov (%edx), %eax",
    "mov %eax, (RESULT + 8)",
    "rsm"
);

fn memory_of_one_space_is_a_device_in_the_other() -> Outcome {
    for id in [9, SPACE_1 | 9] {
        let smm = SmmGuest::new(Chip::None, read_nowhere(), handler_reads_nowhere())?;
        let extra = Memory::new(0x1000)?;
        extra.write(0, 0x1234_5678);
        smm.guest.vm.set_slot(id, 0, NOWHERE, 0x1000, extra.hva()).granted("slot")?;
        equal("mark", next_mark(&smm)?, 0x11)?;
        smm.smi()?;
        let device = smm.guest.exit()?;
        equal("exit", device, Exit::mmio(false, NOWHERE, &[0; 4]))?;
        equal("in the mode", in_smm(smm.guest.vcpu()), id == 9)?;
        smm.guest.vcpu().answer(&0x9abc_def0_u32.to_le_bytes());
        smm.guest.finish()?;
        let results = [smm.guest.result(0), smm.guest.result(1)];
        let expected =
            if id == 9 { [0x1234_5678, 0x9abc_def0] } else { [0x9abc_def0, 0x1234_5678] };
        equal("outside, inside", results, expected)?;
    }
    Ok(())
}

// Turns paging on with the CR3 that it finds, reads through it, turns paging off. The root's frame
// holds other tables in this space: one of 4 MiB pages, whose second entry maps the first again.
guest_code!(
    handler_with_paging,
    16,
    "mov %cr4, %eax",
    "or $0x10, %eax",
    "mov %eax, %cr4",
    "mov %cr0, %eax",
    "or $0x80000001, %eax",
    "mov %eax, %cr0",
    "mov $0x400000 + ARGUMENT, %esi",
    "mov (%esi), %ebx",
    "mov %ebx, (RESULT + 8)",
    "and $0x7ffffffe, %eax",
    "mov %eax, %cr0",
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "rsm"
);
guest_code!(
    read_argument,
    64,
    "0: mov ARGUMENT, %rax",
    "mov %rax, RESULT",
    "mov $0x11, %al",
    "out %al, $PORT_MARK",
    "jmp 0b"
);

fn the_same_root_means_other_tables_in_each_mode() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_argument(), handler_with_paging())?;
    let vm = &smm.guest.vm;
    let hva = smm.guest.memory.hva();
    let root = ROOT;
    // Address space 1 has a page of its own where the root of the tables lies.
    let tables = Memory::new(0x1000)?;
    for (index, entry) in [0x83_u32, 0x83].into_iter().enumerate() {
        tables.write_bytes(index as u64 * 4, &entry.to_le_bytes());
    }
    vm.set_slot(SPACE_1, 0, 0, 0, 0).granted("delete")?;
    vm.set_slot(SPACE_1, 0, 0, root, hva).granted("below the root")?;
    vm.set_slot(SPACE_1 | 2, 0, root, 0x1000, tables.hva()).granted("the root")?;
    let above = root + 0x1000;
    vm.set_slot(SPACE_1 | 3, 0, above, SMBASE - above, hva + above).granted("above the root")?;
    equal("mark", next_mark(&smm)?, 0x11)?;
    for round in 1..30_u64 {
        smm.guest.memory.write(ARGUMENT, round);
        smm.smi()?;
        equal("mark", next_mark(&smm)?, IN_HANDLER)?;
        equal("inside", smm.guest.result(1) as u32, round as u32)?;
        equal("mark", next_mark(&smm)?, 0x11)?;
        equal("outside", smm.guest.result(0), round)?;
    }
    Ok(())
}

fn slots_of_the_spaces_are_independent() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_reads_shared())?;
    let vm = &smm.guest.vm;
    let memory = Memory::new(0x2000)?;
    let slot = |id, gpa, bytes| vm.set_slot(id, 0, gpa, bytes, memory.hva());
    slot(9, NOWHERE, 0x2000).granted("space 0")?;
    slot(SPACE_1 | 9, NOWHERE, 0x1000).granted("the same id and range in space 1")?;
    slot(SPACE_1 | 10, NOWHERE, 0x1000).refused("an overlap in space 1", libc::EEXIST)?;
    slot(10, NOWHERE + 0x1000, 0x1000).refused("an overlap in space 0", libc::EEXIST)?;
    slot(SPACE_1 | 10, NOWHERE + 0x1000, 0x1000).granted("a neighbour in space 1")?;
    slot(2 << 16 | 9, NOWHERE, 0x1000).refused("space 2", libc::EINVAL)?;
    slot(SPACE_1 | 0x7ffc, NOWHERE, 0x1000).refused("an id out of range", libc::EINVAL)?;
    slot(9, NOWHERE, 0).granted("deleted in space 0")?;
    slot(9, NOWHERE, 0).refused("deleted before", libc::EINVAL)?;
    slot(SPACE_1 | 9, NOWHERE, 0).granted("deleted in space 1").map(drop)
}

fn a_slot_of_space_1_can_be_taken_away_and_given_back() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_reads_shared())?;
    let vm = &smm.guest.vm;
    equal("mark", next_mark(&smm)?, 0x11)?;
    smm.smi()?;
    equal("mark", next_mark(&smm)?, IN_HANDLER)?;
    equal("mark", next_mark(&smm)?, 0x11)?;
    let other = Memory::new(SMRAM_BYTES)?;
    other.write_bytes(0, &smm.smram.read_bytes(0, SMRAM_BYTES as usize));
    other.write(SHARED - SMBASE, 0xcccc);
    vm.set_slot(SMRAM_SLOT, 0, SMBASE, 0, 0).granted("taken away")?;
    vm.set_slot(SMRAM_SLOT, 0, SMBASE, SMRAM_BYTES, other.hva()).granted("given back")?;
    smm.smi()?;
    equal("mark", next_mark(&smm)?, IN_HANDLER)?;
    equal("inside", smm.guest.result(1), 0xcccc)?;
    equal("mark", next_mark(&smm)?, 0x11)?;
    equal("outside", smm.guest.result(0), 0)
}

/// The log of a slot of at most 64 pages.
fn dirty(smm: &SmmGuest, slot: u32) -> Outcome<u64> {
    let mut bitmap = [0_u64; 8];
    let mut log = kvm_dirty_log { slot, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    smm.guest.vm.send(ioctl::GET_DIRTY_LOG, &log).granted("KVM_GET_DIRTY_LOG")?;
    Ok(bitmap[0])
}

fn the_dirty_log_of_each_space_is_its_own() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_reads_shared())?;
    let vm = &smm.guest.vm;
    let log = KVM_MEM_LOG_DIRTY_PAGES;
    equal("mark", next_mark(&smm)?, 0x11)?;
    vm.set_slot(SMRAM_SLOT, log, SMBASE, SMRAM_BYTES, smm.smram.hva()).granted("log")?;
    vm.set_slot(0, log, 0, MEMORY_BYTES, smm.guest.memory.hva()).granted("log")?;
    equal("nothing yet", dirty(&smm, SMRAM_SLOT)?, 0)?;
    dirty(&smm, 0)?;
    equal("mark", next_mark(&smm)?, 0x11)?;
    equal("outside only", dirty(&smm, SMRAM_SLOT)?, 0)?;
    let page = SMBASE >> 12;
    equal("the page outside", dirty(&smm, 0)? >> page & 1, 1)?;
    smm.smi()?;
    equal("mark", next_mark(&smm)?, IN_HANDLER)?;
    // The word that the handler counts in, and the save area.
    let logged = dirty(&smm, SMRAM_SLOT)?;
    // The stock module logs a page when it maps it, so the handler's too.
    equal("inside", logged & !(1 << 8), 1 | 1 << 15)?;
    equal("the page outside", dirty(&smm, 0)? >> page & 1, 0)?;
    let ask = |slot| vm.send(ioctl::GET_DIRTY_LOG, &kvm_dirty_log { slot, ..Default::default() });
    ask(2 << 16).refused("space 2", libc::EINVAL)?;
    ask(SPACE_1 | 20).refused("no such slot", libc::ENOENT)
}

fn memory_withdrawn_from_the_vmm_leaves_both_spaces() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_reads_shared())?;
    smm.smram.write(SHARED - SMBASE, 0xbbbb);
    equal("mark", next_mark(&smm)?, 0x11)?;
    for round in 1..10_u64 {
        smm.smi()?;
        equal("mark", next_mark(&smm)?, IN_HANDLER)?;
        equal("inside", smm.guest.result(1), if round == 1 { 0xbbbb } else { 0 })?;
        equal("mark", next_mark(&smm)?, 0x11)?;
        smm.smram.advise(0, 0x1000, libc::MADV_DONTNEED).granted("madvise")?;
        smm.guest.memory.advise(SMBASE, 0x1000, libc::MADV_DONTNEED).granted("madvise")?;
        equal("a new page", smm.smram.read(SHARED - SMBASE + 8), 0)?;
        equal("mark", next_mark(&smm)?, 0x11)?;
        equal("counted on the new page", smm.guest.memory.read(SHARED + 8), 1)?;
    }
    Ok(())
}

// A string move from a device needs the emulator, which writes where the mode says.
guest_code!(
    handler_moves_from_a_device,
    16,
    "mov $NOWHERE, %esi",
    "mov $0x30200, %edi",
    "mov $2, %ecx",
    "cld",
    ".byte 0x67",
    "rep movsl",
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "rsm"
);

fn an_emulated_access_sees_the_space_of_its_mode() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_shared(), handler_moves_from_a_device())?;
    equal("mark", next_mark(&smm)?, 0x11)?;
    smm.smi()?;
    for word in [0x1111_2222_u32, 0x3333_4444] {
        match smm.guest.exit()? {
            Exit::Mmio { write: false, len: 4, .. } => {
                equal("in the mode", in_smm(smm.guest.vcpu()), true)?;
                smm.guest.vcpu().answer(&word.to_le_bytes());
            }
            exit => return fail(format!("expected a read of the device got {exit:x?}")),
        }
    }
    equal("mark", next_mark(&smm)?, IN_HANDLER)?;
    equal("in SMRAM", smm.smram.read(0x200), 0x3333_4444_1111_2222)?;
    equal("not below it", smm.guest.memory.read(SMBASE + 0x200), 0)?;
    equal("mark", next_mark(&smm)?, 0x11).map(drop)
}
