use x86::vmcs::{ExitReason, field};

use super::{controls, guest, host, lists, *};
use crate::testing::{LIMITS, Memory, capabilities, good, set};
use crate::{EntryFailure, GuestMemory, Vmcs12};
use x86::Gpa;

fn controls_of(v: &Vmcs12) -> Result<(), controls::Broken> {
    controls::check(v, &capabilities(), &LIMITS)
}

fn host_of(v: &Vmcs12) -> Result<(), host::Broken> {
    host::check(v, &capabilities(), &LIMITS)
}

fn guest_of(v: &Vmcs12) -> Result<(), guest_rules::Broken> {
    guest::check(v, &capabilities(), &LIMITS, Some(Gpa(0x3000)), &Memory::new()).map(|_| ())
}

macro_rules! expected {
    ($b:ident ok) => {
        Ok(())
    };
    ($b:ident $rule:ident) => {
        Err($b::$rule)
    };
}

/// Each line: what is changed, and which rule that breaks, or `ok`.
macro_rules! table {
    ($check:ident $broken:path: $([$($name:ident = $value:expr),*] => $rule:tt;)*) => {
        use $broken as B;
        $({
            let mut v = good();
            set!(v, $($name = $value),*);
            let line = stringify!($($name = $value),*);
            assert_eq!($check(&v), expected!(B $rule), "{line}");
        })*
    };
}

#[test]
fn a_good_vmcs_passes() {
    assert_eq!(controls_of(&good()), Ok(()));
    assert_eq!(host_of(&good()), Ok(()));
    assert_eq!(guest_of(&good()), Ok(()));
}

const P: u32 = 0x0400_6172 | 1 << 31;

#[test]
fn control_words_and_pages() {
    table! { controls_of controls::Broken:
        [PIN_CONTROLS = 0x17 & !2] => Pin;
        [PIN_CONTROLS = 0x16 | 1 << 8] => Pin;
        [PROC_CONTROLS = P & !2] => Primary;
        [PROC_CONTROLS = P | 1 << 17] => Primary;
        [PROC_CONTROLS2 = 1 << 15] => Secondary;
        [PROC_CONTROLS = P & !(1 << 31), PROC_CONTROLS2 = 1 << 15] => ok;
        [CR3_TARGET_COUNT = 1] => Cr3Targets;
        [PROC_CONTROLS = P | 1 << 25, IO_BITMAP_B = 0x1000] => ok;
        [PROC_CONTROLS = P | 1 << 25, IO_BITMAP_B = 0x1001] => IoBitmaps;
        [PROC_CONTROLS = P | 1 << 25, IO_BITMAP_A = 1 << 40] => IoBitmaps;
        [PROC_CONTROLS = P | 1 << 28, MSR_BITMAP = 8] => MsrBitmaps;
        [PROC_CONTROLS = P | 1 << 21, VIRTUAL_APIC_ADDR = 8] => VirtualApic;
        [PROC_CONTROLS = P | 1 << 21, TPR_THRESHOLD = 16] => TprThreshold;
        [PROC_CONTROLS = P | 1 << 21, TPR_THRESHOLD = 0x10] => TprThreshold;
        [PROC_CONTROLS = P | 1 << 21, PROC_CONTROLS2 = 1, TPR_THRESHOLD = 1] => ok;
        [PROC_CONTROLS = P | 1 << 21, VIRTUAL_APIC_ADDR = 1 << 39, TPR_THRESHOLD = 1] => ok;
        [PROC_CONTROLS2 = 1 << 4] => TprShadow;
        [PROC_CONTROLS2 = 1 << 8] => TprShadow;
        [PROC_CONTROLS2 = 1 << 9] => TprShadow;
        [PROC_CONTROLS2 = 1, APIC_ACCESS_ADDR = 1] => ApicAccess;
        [PROC_CONTROLS = P | 1 << 21, PROC_CONTROLS2 = 1 | 1 << 4] => X2Apic;
        [PROC_CONTROLS = P | 1 << 21, PROC_CONTROLS2 = 1 << 9, PIN_CONTROLS = 0x16] => VirtualInterrupts;
        [PIN_CONTROLS = 0x97] => PostedInterrupts;
        [PIN_CONTROLS = 0x16 | 1 << 5] => Nmi;
        [PIN_CONTROLS = 0x16 | 1 << 3, PROC_CONTROLS = P | 1 << 22] => Nmi;
    }
}

#[test]
fn posted_interrupts_need_all_that_they_use() {
    let base = || {
        let mut v = good();
        set!(v, PIN_CONTROLS = 0x97, PROC_CONTROLS = P | 1 << 21, PROC_CONTROLS2 = 1 << 9);
        set!(v, EXIT_CONTROLS = 0x3_6dfb | 1 << 9 | 1 << 15, POSTED_INTR_DESC = 0x40);
        v
    };
    assert_eq!(controls_of(&base()), Ok(()));
    let bad = Err(controls::Broken::PostedInterrupts);
    let mut v = base();
    set!(v, POSTED_INTR_VECTOR = 0x100);
    assert_eq!(controls_of(&v), bad);
    let mut v = base();
    set!(v, POSTED_INTR_DESC = 0x20);
    assert_eq!(controls_of(&v), bad);
    let mut v = base();
    set!(v, EXIT_CONTROLS = 0x3_6dfb | 1 << 9);
    assert_eq!(controls_of(&v), bad);
}

#[test]
fn translation_controls() {
    table! { controls_of controls::Broken:
        [PROC_CONTROLS2 = 1 << 5] => Vpid;
        [PROC_CONTROLS2 = 1 << 5, VPID = 1] => ok;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x1e] => ok;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x5e] => ok;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x18] => EptPointer;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x19] => EptPointer;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x26] => EptPointer;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 0x9e] => EptPointer;
        [PROC_CONTROLS2 = 2, EPT_POINTER = 1 << 40 | 0x1e] => EptPointer;
        [PROC_CONTROLS2 = 1 << 17] => PageLog;
        [PROC_CONTROLS2 = 2 | 1 << 17, EPT_POINTER = 0x1e, PML_ADDRESS = 1] => PageLog;
        [PROC_CONTROLS2 = 1 << 7] => NeedsEpt;
        [PROC_CONTROLS2 = 1 << 13, VM_FUNCTION_CONTROLS = 2] => Functions;
        [PROC_CONTROLS2 = 1 << 13, VM_FUNCTION_CONTROLS = 1] => Functions;
        [PROC_CONTROLS2 = 1 << 14, VMREAD_BITMAP = 1] => ShadowBitmaps;
        [PROC_CONTROLS2 = 1 << 25] => TscMultiplier;
    }
}

#[test]
fn exit_and_entry_controls() {
    const X: u32 = 0x3_6dfb | 1 << 9;
    table! { controls_of controls::Broken:
        [EXIT_CONTROLS = X & !1] => Exit;
        [EXIT_CONTROLS = X | 1 << 31] => Exit;
        [EXIT_CONTROLS = X | 1 << 22] => PreemptionTimer;
        [EXIT_CONTROLS = X | 1 << 22, PIN_CONTROLS = 0x16 | 1 << 6] => ok;
        [EXIT_MSR_LOAD_COUNT = 1, EXIT_MSR_LOAD_ADDR = 8] => ExitLists;
        [EXIT_MSR_LOAD_COUNT = 0, EXIT_MSR_LOAD_ADDR = 8] => ok;
        [EXIT_MSR_STORE_COUNT = 2, EXIT_MSR_STORE_ADDR = (1 << 40) - 16] => ExitLists;
        [EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_STORE_ADDR = (1 << 40) - 16] => ok;
        [EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_STORE_ADDR = !15] => ExitLists;
        [ENTRY_CONTROLS = 0x11fa] => Entry;
        [ENTRY_CONTROLS = 0x11fb | 1 << 10] => Entry;
        [ENTRY_MSR_LOAD_COUNT = 1, ENTRY_MSR_LOAD_ADDR = 1] => EntryList;
    }
}

#[test]
fn injections() {
    const V: u32 = 1 << 31;
    table! { controls_of controls::Broken:
        [ENTRY_INTERRUPTION = 1 << 8] => ok;
        [ENTRY_INTERRUPTION = V | 0x30] => ok;
        [ENTRY_INTERRUPTION = V | 1 << 8] => Injection;
        [ENTRY_INTERRUPTION = V | 0x202] => ok;
        [ENTRY_INTERRUPTION = V | 0x203] => Injection;
        [ENTRY_INTERRUPTION = V | 0x306] => ok;
        [ENTRY_INTERRUPTION = V | 0x320] => Injection;
        [ENTRY_INTERRUPTION = V | 0x30e] => Injection;
        [ENTRY_INTERRUPTION = V | 0x30e | 1 << 11] => ok;
        [ENTRY_INTERRUPTION = V | 0x306 | 1 << 11] => Injection;
        [ENTRY_INTERRUPTION = V | 0x30e | 1 << 11, ENTRY_ERROR_CODE = 1 << 16] => Injection;
        [ENTRY_INTERRUPTION = V | 0x30e | 1 << 11 | 1 << 12] => Injection;
        [ENTRY_INTERRUPTION = V | 0x700] => ok;
        [ENTRY_INTERRUPTION = V | 0x701] => Injection;
        [ENTRY_INTERRUPTION = V | 0x480, ENTRY_INSTRUCTION_LENGTH = 2] => ok;
        [ENTRY_INTERRUPTION = V | 0x480, ENTRY_INSTRUCTION_LENGTH = 0] => Injection;
        [ENTRY_INTERRUPTION = V | 0x603, ENTRY_INSTRUCTION_LENGTH = 16] => Injection;
    }
}

#[test]
fn host_state() {
    const X: u32 = 0x3_6dfb | 1 << 9;
    table! { host_of host::Broken:
        [HOST_CR0 = 0x8005_0013] => Cr0;
        [HOST_CR0 = 0x1_8005_0033] => Cr0;
        [HOST_CR4 = 0x20] => Cr4;
        [HOST_CR4 = 0x2020 | 1 << 30] => Cr4;
        [HOST_CR3 = 1 << 40] => Cr3;
        [HOST_SYSENTER_ESP = 1 << 47] => Sysenter;
        [HOST_SYSENTER_EIP = 1 << 47] => Sysenter;
        [EXIT_CONTROLS = X | 1 << 12, HOST_PERF_GLOBAL_CTRL = 1 << 4] => PerfGlobalCtrl;
        [EXIT_CONTROLS = X | 1 << 19, HOST_PAT = 2] => Pat;
        [HOST_PAT = 2] => ok;
        [HOST_EFER = 0xc01] => Efer;
        [HOST_EFER = 0x901] => Efer;
        [HOST_EFER = 0x1d01] => Efer;
        [HOST_CS_SELECTOR = 0] => Selectors;
        [HOST_CS_SELECTOR = 9] => Selectors;
        [HOST_DS_SELECTOR = 4] => Selectors;
        [HOST_TR_SELECTOR = 0] => Selectors;
        [HOST_SS_SELECTOR = 0] => ok;
        [HOST_GDTR_BASE = 1 << 47] => Bases;
        [HOST_TR_BASE = 1 << 63] => Bases;
        [HOST_RIP = 1 << 47] => AddressSpace;
        [HOST_CR4 = 0x2000] => AddressSpace;
        [EXIT_CONTROLS = 0x3_6dfb] => AddressSpace;
    }
    let legacy = Limits { long_mode: false, ..LIMITS };
    let broken = Err(host::Broken::AddressSpace);
    assert_eq!(host::check(&good(), &capabilities(), &legacy), broken);
    let mut v = good();
    set!(v, EXIT_CONTROLS = 0x3_6dfb, ENTRY_CONTROLS = 0x11fb);
    assert_eq!(host::check(&v, &capabilities(), &legacy), Ok(()));
    set!(v, HOST_RIP = 1 << 32);
    assert_eq!(host::check(&v, &capabilities(), &legacy), broken);
    set!(v, HOST_RIP = 0, HOST_CR4 = 0x2_2020);
    assert_eq!(host::check(&v, &capabilities(), &legacy), broken);
}

#[test]
fn guest_registers_and_msrs() {
    const N: u32 = 0x11fb | 1 << 9;
    table! { guest_of guest_rules::Broken:
        [GUEST_CR0 = 0x8005_0013] => Cr0;
        [GUEST_CR0 = 0xe005_0033] => ok;
        [GUEST_CR0 = 0x0005_0033] => Cr0;
        [PROC_CONTROLS2 = 0x82, GUEST_CR0 = 0x8005_0032] => Cr0;
        [GUEST_CR4 = 0x20] => Cr4;
        [GUEST_CR4 = 0x2000] => LongMode;
        [GUEST_CR3 = 1 << 40] => Cr3;
        [ENTRY_CONTROLS = 0x11ff | 1 << 9, GUEST_DEBUGCTL = 4] => Debug;
        [ENTRY_CONTROLS = 0x11ff | 1 << 9, GUEST_DR7 = 1 << 32] => Debug;
        [GUEST_DR7 = 1 << 32] => ok;
        [GUEST_SYSENTER_EIP = 1 << 50] => Sysenter;
        [ENTRY_CONTROLS = N | 1 << 13, GUEST_PERF_GLOBAL_CTRL = 1 << 35] => PerfGlobalCtrl;
        [ENTRY_CONTROLS = N | 1 << 14, GUEST_PAT = 8] => Pat;
        [GUEST_EFER = 0x901] => Efer;
        [GUEST_EFER = 0xc01] => Efer;
        [GUEST_EFER = 0x2d01] => Efer;
        [ENTRY_CONTROLS = N | 1 << 16, GUEST_BNDCFGS = 4] => Bndcfgs;
        [ENTRY_CONTROLS = N | 1 << 16, GUEST_BNDCFGS = 1 << 47] => Bndcfgs;
    }
}

#[test]
fn guest_segments() {
    table! { guest_of guest_rules::Broken:
        [GUEST_TR_SELECTOR = 0x44] => Selectors;
        [GUEST_LDTR_RIGHTS = 0x82, GUEST_LDTR_SELECTOR = 4] => Selectors;
        [GUEST_SS_SELECTOR = 17] => Selectors;
        [GUEST_FS_BASE = 1 << 47] => Bases;
        [GUEST_CS_BASE = 1 << 32] => Bases;
        [GUEST_SS_BASE = 1 << 32] => Bases;
        [GUEST_DS_BASE = 1 << 32] => ok;
        [GUEST_CS_RIGHTS = 0xa093] => Rights;
        [GUEST_CS_RIGHTS = 0xe09b] => Rights;
        [GUEST_CS_RIGHTS = 0x209b] => Rights;
        [GUEST_CS_RIGHTS = 0xa01b] => Rights;
        [GUEST_CS_RIGHTS = 0xa08b] => Rights;
        [GUEST_CS_RIGHTS = 0xa0fb] => Rights;
        [GUEST_CS_RIGHTS = 0xa09f] => ok;
        [GUEST_CS_RIGHTS = 0xa19b] => Rights;
        [GUEST_CS_RIGHTS = 0x1_a09b] => ok;
        [GUEST_CS_RIGHTS = 0x1_a01b] => Rights;
        [GUEST_CS_RIGHTS = 0x1_0000] => Rights;
        [GUEST_CS_LIMIT = 0] => Rights;
        [GUEST_SS_RIGHTS = 0xc0f3] => Rights;
        [GUEST_SS_RIGHTS = 0xc091] => Rights;
        [GUEST_SS_RIGHTS = 0x1_0000] => ok;
        [GUEST_DS_RIGHTS = 0x92] => Rights;
        [GUEST_DS_RIGHTS = 0x93] => ok;
        [GUEST_DS_RIGHTS = 0x99] => Rights;
        [GUEST_DS_RIGHTS = 0x93, GUEST_DS_SELECTOR = 3] => Rights;
        [GUEST_DS_RIGHTS = 0x9f, GUEST_DS_SELECTOR = 3] => ok;
        [GUEST_TR_RIGHTS = 0x83] => Rights;
        [GUEST_TR_RIGHTS = 0x1_008b] => Rights;
        [GUEST_TR_RIGHTS = 0x808b] => Rights;
        [GUEST_LDTR_RIGHTS = 0x83] => Rights;
        [GUEST_GDTR_LIMIT = 0x1_0000] => Tables;
        [GUEST_IDTR_BASE = 1 << 47] => Tables;
    }
}

#[test]
fn guest_flow() {
    table! { guest_of guest_rules::Broken:
        [GUEST_RIP = 1 << 47] => ok;
        [GUEST_RIP = 1 << 48] => Rip;
        [GUEST_RIP = 0xffff << 48] => ok;
        [GUEST_RIP = 0xfffe << 48] => Rip;
        [GUEST_CS_RIGHTS = 0xc09b, GUEST_RIP = 1 << 32] => Rip;
        [GUEST_RFLAGS = 0] => Rflags;
        [GUEST_RFLAGS = 0xa] => Rflags;
        [GUEST_RFLAGS = 2, ENTRY_INTERRUPTION = 1 << 31] => Rflags;
        [GUEST_ACTIVITY = 1] => ok;
        [GUEST_ACTIVITY = 2] => Activity;
        [GUEST_ACTIVITY = 3] => ok;
        [GUEST_ACTIVITY = 4] => Activity;
        [GUEST_ACTIVITY = 1, GUEST_INTERRUPTIBILITY = 1] => Activity;
        [GUEST_ACTIVITY = 1, ENTRY_INTERRUPTION = 1 << 31 | 0x20] => ok;
        [GUEST_ACTIVITY = 1, ENTRY_INTERRUPTION = 1 << 31 | 0x301] => ok;
        [GUEST_ACTIVITY = 1, ENTRY_INTERRUPTION = 1 << 31 | 0x306] => Activity;
        [GUEST_ACTIVITY = 3, ENTRY_INTERRUPTION = 1 << 31 | 0x202] => Activity;
        [GUEST_INTERRUPTIBILITY = 3] => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 1] => ok;
        [GUEST_INTERRUPTIBILITY = 1, GUEST_RFLAGS = 2] => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 16] => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 4] => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 2, ENTRY_INTERRUPTION = 1 << 31 | 0x202] => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 1, ENTRY_INTERRUPTION = 1 << 31 | 0x20] => Interruptibility;
        [PIN_CONTROLS = 0x3e, GUEST_INTERRUPTIBILITY = 8, ENTRY_INTERRUPTION = 1 << 31 | 0x202]
            => Interruptibility;
        [GUEST_INTERRUPTIBILITY = 8, ENTRY_INTERRUPTION = 1 << 31 | 0x202] => ok;
        [GUEST_PENDING_DEBUG = 1 << 4] => PendingDebug;
        [GUEST_PENDING_DEBUG = 1 << 14] => ok;
        [GUEST_PENDING_DEBUG = 1 << 14, GUEST_ACTIVITY = 1] => PendingDebug;
        [GUEST_RFLAGS = 0x302, GUEST_ACTIVITY = 1] => PendingDebug;
        [GUEST_RFLAGS = 0x302, GUEST_ACTIVITY = 1, GUEST_PENDING_DEBUG = 1 << 14] => ok;
        [VMCS_LINK = 0x3000] => Link;
        [VMCS_LINK = 0x3001] => Link;
        [VMCS_LINK = 0x4000] => Link;
        [VMCS_LINK = 1 << 40] => Link;
    }
}

/// What an exit leaves of a debug exception in a transactional region, which the next entry is to take.
#[test]
fn a_debug_exception_of_a_transactional_region_pends() {
    let rtm = Limits { debugctl: 1 << 15, ..LIMITS };
    for (pending, state, limits, good) in [
        (0x1_1000, 0, &rtm, true),
        (0x1_1000, 1, &rtm, true),
        (0x1_1000, 2, &rtm, false),
        (0x1_0000, 0, &rtm, false),
        (0x1_1001, 0, &rtm, false),
        (0x1_5000, 0, &rtm, false),
        (0x3_1000, 0, &rtm, false),
        (0x1_1000, 0, &LIMITS, false),
        (0x1001, 0, &LIMITS, true),
    ] {
        let mut v = crate::testing::good();
        set!(v, GUEST_PENDING_DEBUG = pending, GUEST_INTERRUPTIBILITY = state);
        let checked = guest::check(&v, &capabilities(), limits, None, &Memory::new());
        let expected = if good { Ok(None) } else { Err(guest_rules::Broken::PendingDebug) };
        assert_eq!(checked, expected, "{pending:#x} {state}");
    }
}

#[test]
fn virtual_8086_mode_has_its_own_segments() {
    let mut v = good();
    set!(v, ENTRY_CONTROLS = 0x11fb, GUEST_RFLAGS = 0x2_0202, GUEST_CR4 = 0x2000);
    macro_rules! real {
        ($($s:ident $b:ident $l:ident $r:ident;)*) => {
            $(set!(v, $s = 0x100, $b = 0x1000, $l = 0xffff, $r = 0xf3);)*
        };
    }
    real! {
        GUEST_ES_SELECTOR GUEST_ES_BASE GUEST_ES_LIMIT GUEST_ES_RIGHTS;
        GUEST_CS_SELECTOR GUEST_CS_BASE GUEST_CS_LIMIT GUEST_CS_RIGHTS;
        GUEST_SS_SELECTOR GUEST_SS_BASE GUEST_SS_LIMIT GUEST_SS_RIGHTS;
        GUEST_DS_SELECTOR GUEST_DS_BASE GUEST_DS_LIMIT GUEST_DS_RIGHTS;
        GUEST_FS_SELECTOR GUEST_FS_BASE GUEST_FS_LIMIT GUEST_FS_RIGHTS;
        GUEST_GS_SELECTOR GUEST_GS_BASE GUEST_GS_LIMIT GUEST_GS_RIGHTS;
    }
    assert_eq!(guest_of(&v), Ok(()));
    for (change, rule) in [
        (0, guest_rules::Broken::Bases),
        (1, guest_rules::Broken::Limits),
        (2, guest_rules::Broken::Rights),
    ] {
        let mut v = v.clone();
        match change {
            0 => v.set(field::GUEST_FS_BASE, 0x1001),
            1 => v.set(field::GUEST_GS_LIMIT, 0xfffe),
            _ => v.set(field::GUEST_ES_RIGHTS, 0x93),
        }
        assert_eq!(guest_of(&v), Err(rule));
    }
}

#[test]
fn pae_guests_have_good_pdptes() {
    let mut v = good();
    set!(v, ENTRY_CONTROLS = 0x11fb, GUEST_CS_RIGHTS = 0xc09b);
    assert_eq!(guest_of(&v), Ok(()), "four absent entries in memory");
    let memory = Memory::new();
    memory.put(0x2008, &0x1003u64.to_le_bytes());
    let checked = guest::check(&v, &capabilities(), &LIMITS, None, &memory);
    assert_eq!(checked, Err(guest_rules::Broken::Pdptes));
    assert_eq!(guest_rules::Broken::Pdptes.exit().qualification, 2);
    set!(v, PROC_CONTROLS2 = 2, GUEST_PDPTE3 = 1 << 41 | 1);
    assert_eq!(guest_of(&v), Err(guest_rules::Broken::Pdptes));
    set!(v, GUEST_PDPTE3 = 1 << 39 | 1);
    assert_eq!(guest::check(&v, &capabilities(), &LIMITS, None, &memory), Ok(None));
}

#[test]
fn the_link_points_at_a_region_of_the_right_kind() {
    let memory = Memory::new();
    memory.put(0x6000, &0x11e5_7ed0u32.to_le_bytes());
    memory.put(0x7000, &0x91e5_7ed0u32.to_le_bytes());
    let mut v = good();
    let c = capabilities();
    let check = |v: &Vmcs12| guest::check(v, &c, &LIMITS, None, &memory).map(|_| ());
    set!(v, VMCS_LINK = 0x6000);
    assert_eq!(check(&v), Ok(()));
    set!(v, PROC_CONTROLS2 = 1 << 14);
    assert_eq!(check(&v), Err(guest_rules::Broken::Link));
    set!(v, VMCS_LINK = 0x7000);
    assert_eq!(check(&v), Ok(()));
    assert_eq!(guest_rules::Broken::Link.exit(), EntryFailure::LINK);
    assert_eq!(EntryFailure::LINK.reason, ExitReason::InvalidGuestState);
}

#[test]
fn lists_are_read_entry_by_entry() {
    let memory = Memory::new();
    let put = |n: u64, msr: u32, reserved: u32, value: u64| {
        let at = 0x1000 + n * 16;
        memory.put(at, &msr.to_le_bytes());
        memory.put(at + 4, &reserved.to_le_bytes());
        memory.put(at + 8, &value.to_le_bytes());
    };
    put(0, 0x174, 0, 7);
    put(1, 0xc000_0100, 0, 1);
    put(2, 0x174, 1, 1);
    put(3, 0x79, 0, 1);
    put(4, 0x808, 0, 1);
    put(5, 0x9e, 0, 1);
    put(6, 0x9b, 0, 1);
    let list = lists::List { at: 0x1000, count: 8, limit: 7 };
    let first = list.load(0, &LIMITS, &memory).unwrap().unwrap();
    assert_eq!((first.number, first.msr, first.value, first.slot), (1, 0x174, 7, Gpa(0x1008)));
    let bad = |n| Some(Err(lists::Bad(n)));
    assert_eq!(list.load(1, &LIMITS, &memory), bad(2));
    assert!(list.store(1, &LIMITS, &memory).unwrap().is_ok());
    assert_eq!(list.load(2, &LIMITS, &memory), bad(3));
    assert_eq!(list.load(3, &LIMITS, &memory), bad(4));
    assert!(list.load(4, &LIMITS, &memory).unwrap().is_ok());
    let x2apic = Limits { x2apic: true, ..LIMITS };
    assert_eq!(list.load(4, &x2apic, &memory), bad(5));
    assert!(list.load(5, &LIMITS, &memory).unwrap().is_ok());
    assert_eq!(list.store(5, &LIMITS, &memory), bad(6));
    assert_eq!(list.load(6, &LIMITS, &memory), bad(7));
    assert_eq!(list.load(7, &LIMITS, &memory), bad(8), "past what the CPU takes");
    assert_eq!(list.load(8, &LIMITS, &memory), None);
    let outside = lists::List { at: 1 << 39, count: 1, limit: 512 };
    assert_eq!(outside.load(0, &LIMITS, &memory), bad(1));
    assert!(memory.read_u8(Gpa(0x1000)).is_ok());
}
