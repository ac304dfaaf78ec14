//! KVM_GET_CPUID2 and KVM_SET_CPUID2 while the bits that follow the machine state move under them: OSXSAVE
//! and the APIC flag in leaf 1, the sizes in leaf 0xD (KVM API §4.20, §4.44).

use kvm_bindings::*;

use crate::kvm::file::{Commands, CpuidTable};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;

tests!("cpuid_table":
    what_the_guest_switches_on_is_read_back,
    what_the_vmm_sets_is_read_back,
    the_flag_of_the_local_apic_follows_its_base,
    a_table_read_before_a_change_may_be_set_after_it,
    bits_that_follow_the_machine_are_not_compared,
    another_table_is_refused_and_nothing_changes,
    a_table_set_before_the_first_run_takes_the_machine_state,
    sizes_are_those_of_the_manual_for_every_set_of_components,
);

guest_code!(
    toggle,
    64,
    "0: mov %cr4, %rax",
    "btc $18, %rax",
    "mov %rax, %cr4",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

guest_code!(
    set_all,
    64,
    "mov %cr4, %rax",
    "bts $18, %rax",
    "mov %rax, %cr4",
    "0: xor %ecx, %ecx",
    "xor %edx, %edx",
    "mov ARGUMENT, %eax",
    "xsetbv",
    "out %al, $PORT_MARK",
    "mov $0xd, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %rbx, RESULT",
    "mov $0xd, %eax",
    "mov $1, %ecx",
    "cpuid",
    "mov %rbx, RESULT + 8",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

guest_code!(nothing, 64, done!());

fn table(guest: &Guest) -> Outcome<Box<CpuidTable>> {
    let mut table = CpuidTable::empty();
    guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    Ok(table)
}

fn entry(guest: &Guest, function: u32, index: u32) -> Outcome<kvm_cpuid_entry2> {
    match table(guest)?.find(function, index) {
        Some(entry) => Ok(*entry),
        None => skip(format!("no leaf {function:#x}.{index}")),
    }
}

fn osxsave(guest: &Guest) -> Outcome<u32> {
    Ok(entry(guest, 1, 0)?.ecx >> 27 & 1)
}

fn set_xcr0(guest: &Guest, value: u64) -> Outcome {
    let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    xcrs.xcrs[0] = kvm_xcr { xcr: 0, value, ..Default::default() };
    guest.vcpu().send(ioctl::SET_XCRS, &xcrs).granted("KVM_SET_XCRS").map(drop)
}

/// The components that the guest may enable.
fn components(guest: &Guest) -> Outcome<u32> {
    match entry(guest, 0xd, 0)?.eax {
        with_avx if with_avx & 7 == 7 => Ok(with_avx),
        _ => skip("no AVX"),
    }
}

fn what_the_guest_switches_on_is_read_back() -> Outcome {
    let guest = Guest::new(Chip::Kernel, toggle())?;
    for turn in 0..6 {
        guest.reach_mark()?;
        equal("OSXSAVE", osxsave(&guest)?, (turn + 1) % 2)?;
        // Reading it again changes nothing.
        equal("OSXSAVE again", osxsave(&guest)?, (turn + 1) % 2)?;
    }
    let guest = Guest::new(Chip::Kernel, set_all())?;
    components(&guest)?;
    for (xcr0, size) in [(1u64, 576), (7, 832), (3, 576), (7, 832)] {
        guest.memory.write(crate::machine::layout::ARGUMENT, xcr0);
        guest.reach_mark()?;
        equal("size", entry(&guest, 0xd, 0)?.ebx, size)?;
        guest.reach_mark()?;
        equal("size for the guest", guest.result(0), size.into())?;
    }
    Ok(())
}

fn what_the_vmm_sets_is_read_back() -> Outcome {
    let guest = Guest::new(Chip::Kernel, nothing())?;
    components(&guest)?;
    for run in [false, true] {
        if run {
            guest.finish()?;
        }
        for (xcr0, size) in [(7, 832), (1, 576), (7, 832), (3, 576)] {
            set_xcr0(&guest, xcr0)?;
            equal("size", entry(&guest, 0xd, 0)?.ebx, size)?;
        }
        for on in [1, 0, 1, 0] {
            let mut sregs = guest.vcpu().sregs()?;
            sregs.cr4 = sregs.cr4 & !(1 << 18) | on << 18;
            guest.vcpu().set_sregs(&sregs)?;
            equal("OSXSAVE", u64::from(osxsave(&guest)?), on)?;
        }
    }
    Ok(())
}

fn the_flag_of_the_local_apic_follows_its_base() -> Outcome {
    const APIC_BASE: u32 = 0x1b;
    let guest = Guest::new(Chip::Kernel, nothing())?;
    for on in [0, 1, 0, 1] {
        equal("taken", guest.vcpu().set_msr(APIC_BASE, 0xfee0_0100 | on << 11)?, true)?;
        equal("the flag", u64::from(entry(&guest, 1, 0)?.edx >> 9 & 1), on)?;
    }
    Ok(())
}

/// Some versions of the stock module for 6.1 compare the bits that follow the machine, too.
fn stock_compares_all() -> bool {
    oracle::is_stock() && oracle::kernel() < (6, 12)
}

fn a_table_read_before_a_change_may_be_set_after_it() -> Outcome {
    let guest = Guest::new(Chip::Kernel, toggle())?;
    components(&guest)?;
    guest.reach_mark()?;
    let mut tables = vec![table(&guest)?];
    for xcr0 in [7, 1, 3, 7] {
        guest.reach_mark()?;
        set_xcr0(&guest, xcr0)?;
        for old in &tables {
            if guest.vcpu().set_cpuid(old).is_err() && stock_compares_all() {
                return skip("this version of the stock module refuses the table that it gave");
            }
            guest.vcpu().set_cpuid(old)?;
        }
        let size = if xcr0 == 7 { 832 } else { 576 };
        equal("size after all of them", entry(&guest, 0xd, 0)?.ebx, size)?;
        tables.push(table(&guest)?);
    }
    let shown = osxsave(&guest)?;
    guest.reach_mark()?;
    equal("OSXSAVE at last", osxsave(&guest)?, 1 - shown)
}

fn bits_that_follow_the_machine_are_not_compared() -> Outcome {
    let guest = Guest::new(Chip::Kernel, toggle())?;
    components(&guest)?;
    guest.reach_mark()?;
    let before = table(&guest)?;
    let mut other = before.clone();
    let leaf = |t: &mut CpuidTable, f, i, change: fn(&mut kvm_cpuid_entry2)| {
        t.find(f, i).into_iter().for_each(change);
    };
    leaf(&mut other, 1, 0, |e| e.ecx ^= 1 << 27);
    leaf(&mut other, 1, 0, |e| e.edx ^= 1 << 9);
    leaf(&mut other, 0xd, 0, |e| e.ebx = 12345);
    leaf(&mut other, 7, 0, |e| e.ecx &= !(1 << 4));
    if guest.vcpu().set_cpuid(&other).is_err() && stock_compares_all() {
        return skip("this version of the stock module compares all bits");
    }
    guest.vcpu().set_cpuid(&other)?;
    let mut after = table(&guest)?;
    for (f, i) in [(1, 0), (7, 0), (0xd, 0), (0xd, 1)] {
        let was = before.clone().find(f, i).copied();
        equal(&format!("leaf {f:#x}.{i}"), after.find(f, i).copied(), was)?;
    }
    Ok(())
}

fn another_table_is_refused_and_nothing_changes() -> Outcome {
    let guest = Guest::new(Chip::Kernel, toggle())?;
    components(&guest)?;
    for _ in 0..2 {
        guest.reach_mark()?;
        let before = table(&guest)?;
        let changes: [fn(&mut CpuidTable); 6] = [
            |t| t.find(1, 0).into_iter().for_each(|e| e.ecx ^= 1),
            |t| t.find(1, 0).into_iter().for_each(|e| e.ebx ^= 1 << 8),
            |t| t.find(0xd, 0).into_iter().for_each(|e| e.eax ^= 4),
            |t| t.find(0xd, 0).into_iter().for_each(|e| e.ecx ^= 64),
            |t| t.find(0xd, 2).into_iter().for_each(|e| e.ebx ^= 64),
            |t| t.nent -= 1,
        ];
        for (n, change) in changes.into_iter().enumerate() {
            let mut other = before.clone();
            change(&mut other);
            guest
                .vcpu()
                .send(ioctl::SET_CPUID2, &*other)
                .refused(&format!("change {n}"), libc::EINVAL)?;
        }
        let mut after = table(&guest)?;
        equal("the table", after.used(), before.clone().used())?;
    }
    Ok(())
}

fn a_table_set_before_the_first_run_takes_the_machine_state() -> Outcome {
    let guest = Guest::new(Chip::Kernel, nothing())?;
    components(&guest)?;
    set_xcr0(&guest, 7)?;
    let mut other = table(&guest)?;
    other.find(0xd, 0).into_iter().for_each(|e| e.ebx = 1);
    other.find(1, 0).into_iter().for_each(|e| e.ecx |= 1 << 27);
    guest.vcpu().set_cpuid(&other)?;
    equal("size", entry(&guest, 0xd, 0)?.ebx, 832)?;
    equal("OSXSAVE", osxsave(&guest)?, 0)
}

/// The size that the manual gives for `components` (SDM vol. 1 §13.4.3), from subleaves 2 and on.
fn expected(t: &mut CpuidTable, components: u32, compacted: bool) -> u32 {
    (2..32).filter(|n| components >> n & 1 != 0).fold(576, |size, n| {
        let Some(e) = t.find(0xd, n) else { return size };
        let start = match compacted {
            true if e.ecx & 2 != 0 => size.next_multiple_of(64),
            true => size,
            false => e.ebx,
        };
        size.max(start + e.eax)
    })
}

fn sizes_are_those_of_the_manual_for_every_set_of_components() -> Outcome {
    let guest = Guest::new(Chip::Kernel, set_all())?;
    let all = components(&guest)?;
    let mut table = table(&guest)?;
    let compacts = table.find(0xd, 1).is_some_and(|e| e.eax & 0xa != 0);
    // AVX-512 comes as a whole and with AVX.
    let avx512 = 0xe0;
    for xcr0 in (1..=all).filter(|x| x & !all == 0 && x & 1 != 0) {
        if xcr0 & 4 != 0 && xcr0 & 2 == 0
            || xcr0 & avx512 != 0 && (xcr0 & avx512 != avx512 || xcr0 & 4 == 0)
            || xcr0 & 0x18 != 0 && xcr0 & 0x18 != 0x18
        {
            continue;
        }
        guest.memory.write(crate::machine::layout::ARGUMENT, u64::from(xcr0));
        guest.reach_mark()?;
        guest.reach_mark()?;
        let what = format!("XCR0 {xcr0:#x}");
        equal(&what, guest.result(0), expected(&mut table, xcr0, false).into())?;
        if compacts {
            equal(&what, guest.result(1), expected(&mut table, xcr0, true).into())?;
        }
    }
    Ok(())
}
