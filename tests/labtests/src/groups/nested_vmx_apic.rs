//! L2's accesses to the APIC-access page: exits that L1 sees, or accesses to L1's virtual-APIC page.
//!
//! SDM vol. 3C §27.7.7, §30.4, table 28-6 (the qualification of an APIC-access exit).

use kvm_bindings::KVM_INTERNAL_ERROR_EMULATION;

use super::nested_vmx::{
    EXIT_CPUID, EXITED, Fields, L2_CODE, L2_CPUID, ZERO, fails, launch, program, set_fields,
};
use super::nested_vmx_ept::prepared;
use crate::kvm::exit::Exit;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{ARGUMENT, FREE};
use crate::machine::saved::Saved;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("nested_vmx_apic":
    an_access_to_the_page_is_an_exit,
    an_access_in_the_delivery_of_an_event_is_an_exit_that_says_so,
    l2s_own_tables_in_the_page_are_no_memory,
    the_priority_is_the_virtual_pages,
    registers_are_the_virtual_pages_where_l1_says_so,
    what_l1_does_not_virtualize_stays_an_exit,
    a_priority_below_the_threshold_is_an_exit_right_away,
    an_entry_checks_the_address,
    a_page_that_is_no_memory_is_told_to_the_vmm,
    neighbours_of_the_page_are_memory,
    each_vmcs_has_a_page_of_its_own,
    an_access_travels,
);

/// The page that stands for L2's local APIC, and the one that L1 keeps its registers in.
const ACCESSES: u64 = FREE + 0x1_0000;
const PAGE: u64 = FREE + 0x1_1000;
const OTHER: u64 = FREE + 0x1_2000;

const SHADOW: u64 = 1 << 21;
const CR8_EXITS: u64 = 3 << 19;
const VIRTUALIZE: u64 = 1;
const X2APIC: u64 = 1 << 4;
const REGISTERS: u64 = 1 << 8;

const EXIT_BELOW: u64 = 43;
const EXIT_ACCESS: u64 = 44;
const EXIT_WRITE: u64 = 56;

const READS: u64 = 0;
const WRITES: u64 = 1 << 12;
const FETCHES: u64 = 2 << 12;
const DELIVERS: u64 = 3 << 12;

const QUALIFICATION: u64 = 2;
const GUEST_RIP: u64 = 3;
const LOADED: u64 = 5;
const VECTORING: u64 = 7;
const LENGTH: u64 = 9;

guest_code!(
    // What R8 points at to RESULT[5], CPUID.
    loads,
    64,
    "mov (%r8), %eax",
    "mov %rax, RESULT + 40",
    "cpuid",
    "hlt",
);

guest_code!(
    // R9 to what R8 points at, CPUID.
    stores,
    64,
    "mov %r9d, (%r8)",
    "cpuid",
    "hlt",
);
const STORE: u64 = 3;

guest_code!(
    // Neither a load nor a store.
    adds,
    64,
    "addl $1, (%r8)",
    "cpuid",
    "hlt",
);

guest_code!(
    // Eight bytes.
    loads_much,
    64,
    "mov (%r8), %rax",
    "mov %rax, RESULT + 40",
    "cpuid",
    "hlt",
);

guest_code!(jumps, 64, "jmp *%r8",);

guest_code!(raises, 64, "ud2",);

guest_code!(
    // Loads again and again, each time behind a mark.
    loads_slowly,
    64,
    "0: out %al, $PORT_MARK",
    "mov ARGUMENT, %r8",
    "mov (%r8), %eax",
    "mov %rax, RESULT + 40",
    "jmp 0b",
);

/// A guest whose L2 is this program: with tables of L1's, or without.
struct L1 {
    guest: Guest,
    fields: Vec<(u64, u64)>,
}

impl L1 {
    fn new(l2: &[u8], ept: bool) -> Outcome<Self> {
        let (guest, [primary, secondary, pointer]) = prepared(program())?;
        if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & VIRTUALIZE == 0 {
            return skip("no APIC-access page in VMX_PROCBASED_CTLS2");
        }
        guest.memory.write_bytes(L2_CODE, l2);
        let mut fields = vec![
            (primary.0, primary.1 & !(SHADOW | CR8_EXITS) | CR8_EXITS),
            (secondary.0, VIRTUALIZE),
            (0x2014, ACCESSES),
            (0x2012, PAGE),
            (0x401c, 0),
        ];
        if ept {
            fields[1].1 |= secondary.1;
            fields.push(pointer);
        }
        Ok(Self { guest, fields })
    }

    /// With a TPR shadow, and these secondary controls beside.
    fn shadowed(l2: &[u8], ept: bool, second: u64) -> Outcome<Self> {
        let mut new = Self::new(l2, ept)?;
        if new.guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & second != second {
            return skip("no virtualization of APIC registers in VMX_PROCBASED_CTLS2");
        }
        new.fields[0].1 = new.fields[0].1 & !CR8_EXITS | SHADOW;
        new.fields[1].1 |= second;
        Ok(new)
    }

    fn registers(&self, r8: u64, r9: u64) -> Outcome {
        let mut regs = self.guest.vcpu().regs()?;
        (regs.r8, regs.r9) = (r8, r9);
        self.guest.vcpu().set_regs(&regs)?;
        Ok(())
    }

    /// The exit that L1 sees of an L2 with these registers.
    fn exit(&self, r8: u64, r9: u64) -> Outcome<u64> {
        self.registers(r8, r9)?;
        launch(&self.guest, &self.fields)?;
        equal("an exit", self.guest.result(0), EXITED)?;
        Ok(self.guest.result(1))
    }

    fn told(&self, what: &str, reason: u64, qualification: u64, rip: u64) -> Outcome {
        equal(what, self.guest.result(1), reason)?;
        equal(what, self.guest.result(QUALIFICATION), qualification)?;
        equal("RIP", self.guest.result(GUEST_RIP), rip)
    }
}

fn an_access_to_the_page_is_an_exit() -> Outcome {
    for ept in [false, true] {
        for (what, l2, kind, length) in [
            ("a load", loads(), READS, 3),
            ("a store", stores(), WRITES, STORE),
            ("another", adds(), READS, 4),
        ] {
            let l1 = L1::new(l2, ept)?;
            for offset in [0, 0x80, 0xb0, 0x300, 0xffc] {
                l1.exit(ACCESSES + offset, 7)?;
                let told = l1.guest.result(QUALIFICATION);
                // What reads and writes may be told as either.
                let kind = if what == "another" { told & 0x1000 } else { kind };
                l1.told(what, EXIT_ACCESS, kind | offset, L2_CODE)?;
                equal("no event", l1.guest.result(VECTORING) >> 31, 0)?;
                // KVM and Xen go on behind an end of interrupt by it.
                equal("the instruction's length", l1.guest.result(LENGTH), length)?;
            }
            equal("the page", l1.guest.memory.read(ACCESSES + 0x80), 0)?;
        }
        if is_stock() {
            // The emulated CPU ends with such a fetch.
            continue;
        }
        let l1 = L1::new(jumps(), ept)?;
        l1.exit(ACCESSES + 0x123, 0)?;
        l1.told("a fetch", EXIT_ACCESS, FETCHES | 0x123, ACCESSES + 0x123)?;
    }
    Ok(())
}

fn an_access_in_the_delivery_of_an_event_is_an_exit_that_says_so() -> Outcome {
    for ept in [false, true] {
        let mut l1 = L1::new(raises(), ept)?;
        // The table of gates lies in the page.
        l1.fields.extend([(0x6818, ACCESSES), (0x4812, 0xfff), (0x4004, 0)]);
        l1.exit(0, 0)?;
        l1.told("#UD", EXIT_ACCESS, DELIVERS | 0x60, L2_CODE)?;
        equal("the event", l1.guest.result(VECTORING), 0x8000_0306)?;
    }
    Ok(())
}

fn l2s_own_tables_in_the_page_are_no_memory() -> Outcome {
    for ept in [false, true] {
        let mut l1 = L1::new(&L2_CPUID, ept)?;
        l1.fields.push((0x6802, ACCESSES));
        let exit = l1.exit(0, 0)?;
        // A CPU may let such an access be. What lies there maps nothing.
        let no_exit = exit == 2;
        let kind = l1.guest.result(QUALIFICATION) >> 12;
        // The emulated CPU knows no such accesses.
        let told = kind == 15 || is_stock();
        holds("a walk of L2's tables", no_exit || exit == EXIT_ACCESS && told, (exit, kind))?;
    }
    Ok(())
}

fn the_priority_is_the_virtual_pages() -> Outcome {
    for ept in [false, true] {
        let l1 = L1::shadowed(loads(), ept, 0)?;
        l1.guest.memory.write(PAGE + 0x80, 0xffff_ffff_0000_0073);
        equal("exit", l1.exit(ACCESSES + 0x80, 0)?, EXIT_CPUID)?;
        equal("loaded", l1.guest.result(LOADED), 0x73)?;

        let mut l1 = L1::shadowed(stores(), ept, 0)?;
        l1.guest.memory.write(PAGE + 0x80, 0xffff_ffff_0000_0073);
        l1.fields[4].1 = 6;
        equal("exit", l1.exit(ACCESSES + 0x80, 0x1234_5665)?, EXIT_CPUID)?;
        equal("the page", l1.guest.memory.read(PAGE + 0x80), 0xffff_ffff_0000_0065)?;
        equal("below", l1.exit(ACCESSES + 0x80, 0x5f)?, EXIT_BELOW)?;
        l1.told("below", EXIT_BELOW, 0, L2_CODE + STORE)?;
        equal("the page", l1.guest.memory.read(PAGE + 0x80), 0xffff_ffff_0000_005f)?;
        equal("L1's own", l1.guest.vcpu().sregs()?.cr8, 0)?;
        equal("not there", l1.guest.memory.read(ACCESSES + 0x80), 0)?;
    }
    Ok(())
}

fn registers_are_the_virtual_pages_where_l1_says_so() -> Outcome {
    for ept in [false, true] {
        let l1 = L1::shadowed(loads(), ept, REGISTERS)?;
        for offset in [0x20, 0x30, 0xb0, 0x100, 0x270, 0x300, 0x3e0] {
            l1.guest.memory.write(PAGE + offset, 0xffff_ffff_1234_0000 | offset);
            equal("exit", l1.exit(ACCESSES + offset, 0)?, EXIT_CPUID)?;
            equal("loaded", l1.guest.result(LOADED), 0x1234_0000 | offset)?;
        }
        for offset in [0x40, 0x390, 0x400, 0x84] {
            l1.exit(ACCESSES + offset, 0)?;
            l1.told("not virtualized", EXIT_ACCESS, READS | offset, L2_CODE)?;
        }
        let l1 = L1::shadowed(stores(), ept, REGISTERS)?;
        for offset in [0x20, 0xb0, 0x300, 0x380] {
            l1.exit(ACCESSES + offset, 0x4567)?;
            l1.told("a store", EXIT_WRITE, offset, L2_CODE + STORE)?;
            equal("the page", l1.guest.memory.read(PAGE + offset) as u32, 0x4567)?;
        }
        equal("ICR, high", l1.exit(ACCESSES + 0x310, 0x1234_5678)?, EXIT_CPUID)?;
        equal("the page", l1.guest.memory.read(PAGE + 0x310) as u32, 0x1200_0000)?;
        for offset in [0x30, 0x100, 0x390] {
            l1.exit(ACCESSES + offset, 1)?;
            l1.told("not virtualized", EXIT_ACCESS, WRITES | offset, L2_CODE)?;
        }
    }
    Ok(())
}

fn what_l1_does_not_virtualize_stays_an_exit() -> Outcome {
    let l1 = L1::shadowed(loads(), true, 0)?;
    for offset in [0xb0, 0x300] {
        l1.exit(ACCESSES + offset, 0)?;
        l1.told("another register", EXIT_ACCESS, READS | offset, L2_CODE)?;
    }
    let l1 = L1::shadowed(loads_much(), true, REGISTERS)?;
    l1.exit(ACCESSES + 0x80, 0)?;
    l1.told("eight bytes", EXIT_ACCESS, READS | 0x80, L2_CODE)?;
    l1.exit(ACCESSES + 0x82, 0)?;
    l1.told("between registers", EXIT_ACCESS, READS | 0x82, L2_CODE)
}

fn a_priority_below_the_threshold_is_an_exit_right_away() -> Outcome {
    for ept in [false, true] {
        let mut l1 = L1::shadowed(&L2_CPUID, ept, 0)?;
        l1.fields[4].1 = 6;
        for (priority, reason) in [(0x60, EXIT_CPUID), (0x5f, EXIT_BELOW), (0x70, EXIT_CPUID)] {
            l1.guest.memory.write(PAGE + 0x80, priority);
            equal("exit", l1.exit(0, 0)?, reason)?;
            equal("RIP", l1.guest.result(GUEST_RIP), L2_CODE)?;
        }
    }
    Ok(())
}

fn an_entry_checks_the_address() -> Outcome {
    let l1 = L1::shadowed(&L2_CPUID, false, 0)?;
    let [primary, secondary, _, page, threshold] = l1.fields[..] else { return Ok(()) };
    for (what, address) in [("unaligned", ACCESSES + 8), ("beyond physical addresses", 1 << 60)] {
        fails(&l1.guest, what, &[primary, secondary, (0x2014, address), page, threshold], 7)?;
    }
    let both: Fields<'_> = &[primary, (0x401e, VIRTUALIZE | X2APIC), (0x2014, ACCESSES), page];
    fails(&l1.guest, "with virtual x2APIC mode", both, 7)?;
    let no_shadow = primary.1 & !SHADOW | CR8_EXITS;
    let registers: Fields<'_> =
        &[(0x4002, no_shadow), (0x401e, VIRTUALIZE | REGISTERS), (0x2014, ACCESSES), page];
    launch(&l1.guest, registers)?;
    equal("without a TPR shadow", (l1.guest.result(0), l1.guest.result(1)), (ZERO, 7))?;
    // Without the control the address means nothing.
    launch(&l1.guest, &[primary, (0x401e, 0), (0x2014, ACCESSES + 8), page])?;
    equal("not used", (l1.guest.result(0), l1.guest.result(1)), (EXITED, EXIT_CPUID))
}

fn a_page_that_is_no_memory_is_told_to_the_vmm() -> Outcome {
    for ept in [false, true] {
        let mut l1 = L1::new(&L2_CPUID, ept)?;
        l1.fields[2].1 = MISSING;
        set_fields(&l1.guest, &l1.fields);
        for _ in 0..2 {
            let exit = l1.guest.vcpu().run().granted("KVM_RUN")?;
            let Exit::Internal { suberror, .. } = exit else {
                return equal("exit", format!("{exit:?}"), "an internal error".into());
            };
            equal("suberror", suberror, KVM_INTERNAL_ERROR_EMULATION)?;
        }
        // The instruction is executed again: now there is memory.
        let memory = crate::machine::memory::Memory::new(0x1000)?;
        l1.guest.vm.set_slot(7, 0, MISSING, 0x1000, memory.hva()).granted("slot")?;
        l1.guest.reach_mark()?;
        equal("exit", (l1.guest.result(0), l1.guest.result(1)), (EXITED, EXIT_CPUID))?;
    }
    Ok(())
}
/// Where memory comes later.
const MISSING: u64 = 0x100_0000;

fn neighbours_of_the_page_are_memory() -> Outcome {
    for ept in [false, true] {
        let l1 = L1::new(stores(), ept)?;
        for page in [ACCESSES - 0x1000, ACCESSES + 0x1000, ACCESSES + 0x4000, ACCESSES - 4] {
            equal("exit", l1.exit(page, 0x5678)?, EXIT_CPUID)?;
            equal("memory", l1.guest.memory.read(page & !7) >> (8 * (page & 4)) & 0xffff, 0x5678)?;
        }
        equal("the page", l1.exit(ACCESSES, 1)?, EXIT_ACCESS)?;
    }
    Ok(())
}

fn each_vmcs_has_a_page_of_its_own() -> Outcome {
    for ept in [false, true] {
        let mut l1 = L1::new(stores(), ept)?;
        for round in 1..4 {
            l1.fields[2].1 = ACCESSES;
            equal("the one", l1.exit(ACCESSES, round)?, EXIT_ACCESS)?;
            equal("memory", l1.exit(OTHER, round)?, EXIT_CPUID)?;
            l1.fields[2].1 = OTHER;
            equal("the other", l1.exit(OTHER, round)?, EXIT_ACCESS)?;
            equal("memory", l1.exit(ACCESSES, round)?, EXIT_CPUID)?;
            // And none.
            let with = l1.fields[1].1;
            l1.fields[1].1 &= !VIRTUALIZE;
            equal("memory", l1.exit(OTHER, round + 7)?, EXIT_CPUID)?;
            l1.fields[1].1 = with;
            equal("stored", l1.guest.memory.read(ACCESSES), round)?;
            equal("stored", l1.guest.memory.read(OTHER), round + 7)?;
        }
    }
    Ok(())
}

fn an_access_travels() -> Outcome {
    for ept in [false, true] {
        for (second, reason) in [(0, EXIT_ACCESS), (REGISTERS, 0)] {
            let l1 = L1::shadowed(loads_slowly(), ept, second)?;
            l1.guest.memory.write(PAGE + 0x20, 0x1234);
            l1.guest.memory.write(ARGUMENT, ACCESSES + 0x20);
            launch(&l1.guest, &l1.fields)?;
            let saved = Saved::of(&l1.guest)?;
            for memory_last in [false, true] {
                let other = saved.restored(memory_last)?;
                other.reach_mark()?;
                if reason == 0 {
                    equal("loaded", other.result(LOADED), 0x1234)?;
                } else {
                    equal("exit", (other.result(0), other.result(1)), (EXITED, reason))?;
                    equal("told", other.result(QUALIFICATION), READS | 0x20)?;
                }
            }
        }
    }
    Ok(())
}
