//! What is made of the capability MSRs of real CPUs and of the lab's, and what is said where
//! something is missing.

use gannet_vmx::{Features, Unusable};
use x86::Cr4;

/// The MSRs 0x480 to 0x490, in their order, as read on one CPU.
#[derive(Clone, Copy)]
struct Recorded([u64; 17]);

/// Core 2 (Penryn): VMX without EPT, and without the exact capability MSRs.
const PENRYN: Recorded = Recorded([
    0x005a_0800_0000_000d,
    0x0000_003f_0000_0016,
    0xf7f9_fffe_0401_e172,
    0x0003_ffff_0003_6dff,
    0x0000_3fff_0000_11ff,
    0x0004_03c0,
    0x8000_0021,
    0xffff_ffff,
    0x2000,
    0x27ff,
    0x2c,
    0x0000_0041_0000_0000,
    0,
    0,
    0,
    0,
    0,
]);

/// What the CPUs from Sandy Bridge to Broadwell and Silvermont have in common.
const fn client(basic: u64, misc: u64, cr4: u64, secondary: u64, ept: u64) -> Recorded {
    Recorded([
        basic,
        0x0000_007f_0000_0016,
        0xfff9_fffe_0401_e172,
        0x007f_ffff_0003_6dff,
        0x0000_ffff_0000_11ff,
        misc,
        0x8000_0021,
        0xffff_ffff,
        0x2000,
        cr4,
        0x2a,
        secondary << 32,
        ept,
        0x0000_007f_0000_0016,
        0xfff9_fffe_0400_6172,
        0x007f_ffff_0003_6dfb,
        0x0000_ffff_0000_11fb,
    ])
}

const SANDY_BRIDGE: Recorded =
    client(0x00da_0400_0000_0010, 0x1004_01e5, 0x6_27ff, 0xff, 0xf01_0611_4141);
const IVY_BRIDGE: Recorded =
    client(0x00da_0400_0000_0010, 0x1004_01e5, 0x17_67ff, 0x8ff, 0xf01_0611_4141);
const SILVERMONT: Recorded =
    client(0x00da_0400_0000_0002, 0x0004_81e6, 0x10_27ff, 0x28ef, 0xf01_0611_4141);
const BROADWELL: Recorded =
    client(0x00da_0400_0000_0012, 0x3004_81e5, 0x37_67ff, 0x5_7cff, 0xf01_0633_4141);

/// Core i7-8700K.
const COFFEE_LAKE: Recorded = Recorded([
    0x00da_0400_0000_0004,
    0x0000_007f_0000_0016,
    0xfff9_fffe_0401_e172,
    0x01ff_ffff_0003_6dff,
    0x0003_ffff_0000_11ff,
    0x7004_c1e7,
    0x8000_0021,
    0xffff_ffff,
    0x2000,
    0x37_27ff,
    0x2e,
    0x005f_bcff_0000_0000,
    0xf01_0673_4141,
    0x0000_007f_0000_0016,
    0xfff9_fffe_0400_6172,
    0x01ff_ffff_0003_6dfb,
    0x0003_ffff_0000_11fb,
]);

/// The lab's `intel` machine: Bochs 2.7 as Skylake-X.
const LAB: Recorded = Recorded([
    0x00d8_1000_0000_002b,
    0x0000_007f_0000_0016,
    0xf7f9_fffe_0401_e172,
    0x007f_ffff_0003_6dff,
    0x0000_ffff_0000_11ff,
    0x6004_01e0,
    0x8000_0021,
    0xffff_ffff,
    0x2000,
    0x37_27ff,
    0x34,
    0x0217_7fff_0000_0000,
    0xf01_0633_4141,
    0x0000_007f_0000_0016,
    0xf7f9_fffe_0400_6172,
    0x007f_ffff_0003_6dfb,
    0x0000_ffff_0000_11fb,
]);

/// Pin-based controls: the VMX-preemption timer.
const TIMER: u32 = 1 << 6;

impl Recorded {
    fn msr(&self, index: u32) -> u64 {
        *self.0.get(index.wrapping_sub(0x480) as usize).expect("a capability MSR")
    }

    /// This CPU without some bits of the high half, in `index` and its exact twin.
    fn without(mut self, index: u32, bits: u32) -> Self {
        let twin = match index {
            0x481..=0x484 => Some(index + 0xc),
            _ => None,
        };
        for index in [Some(index), twin].into_iter().flatten() {
            self.0[(index - 0x480) as usize] &= !(u64::from(bits) << 32);
        }
        self
    }

    fn read(&self) -> Result<Features, Unusable> {
        Features::read(|index| self.msr(index), cpuid, Cr4::OSXSAVE, true)
    }

    fn missing(&self) -> &'static str {
        self.read().expect_err("usable").reason()
    }
}

/// A CPU with VMX, INVPCID, SPEC_CTRL, XSAVES and RDTSCP.
fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (0, _) => [0x16, 0, 0, 0],
        (1, _) => [0, 0, 1 << 5, 0],
        (7, 0) => [0, 1 << 10, 0, 1 << 26],
        (0xd, 1) => [0xf, 0, 0, 0],
        (0x8000_0000, _) => [0x8000_0008, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, 0, 1 << 27],
        _ => [0; 4],
    }
}

const USABLE: [(&str, Recorded); 6] = [
    ("the lab's machine", LAB),
    ("Sandy Bridge", SANDY_BRIDGE),
    ("Ivy Bridge", IVY_BRIDGE),
    ("Silvermont", SILVERMONT),
    ("Broadwell", BROADWELL),
    ("Coffee Lake", COFFEE_LAKE),
];

#[test]
fn every_word_that_is_put_together_is_one_that_the_cpu_takes() {
    for (name, cpu) in USABLE {
        let features = cpu.read().unwrap_or_else(|why| panic!("{name}: {}", why.reason()));
        let words = [
            (features.pin.base.bits(), 0x48d),
            (features.primary.base.bits(), 0x48e),
            (features.exit.base.bits(), 0x48f),
            (features.entry.base.bits(), 0x490),
            (features.secondary.base.bits(), 0x48b),
        ];
        for (word, msr) in words {
            let (must, may) = (cpu.msr(msr) as u32, (cpu.msr(msr) >> 32) as u32);
            assert_eq!(word & must, must, "{name}: {msr:#x} lacks what must be set");
            assert_eq!(word & !may, 0, "{name}: {msr:#x} has what must not be set");
        }
    }
}

#[test]
fn guests_own_cr3_and_exit_where_they_must() {
    for (name, cpu) in USABLE {
        let f = cpu.read().unwrap();
        assert_eq!(f.primary.base.bits() & 0x0001_8200, 0, "{name}: CR3 or INVLPG exits");
        // HLT, MWAIT, RDPMC, MOV DR, I/O, MONITOR; TSC offset, TPR shadow, MSR bitmap, secondary.
        let needed = 0x2180_0c80 | 0x9020_0008;
        assert_eq!(f.primary.base.bits() & needed, needed, "{name}");
        // EPT and unrestricted guests; interrupts and NMIs exit, NMIs are virtual.
        assert_eq!(
            (f.secondary.base.bits() & 0x82, f.pin.base.bits() & 0x29),
            (0x82, 0x29),
            "{name}"
        );
        // The host is 64-bit; both sides have PAT, EFER and the debug registers of their own.
        assert_eq!(
            (f.exit.base.bits() & 0x28_0204, f.entry.base.bits() & 0xc004),
            (0x28_0204, 0xc004),
            "{name}"
        );
    }
}

#[test]
fn what_is_there_is_taken() {
    let f = SANDY_BRIDGE.read().unwrap();
    assert!(f.vpid && f.ept_2m && !f.ept_1g && !f.ept_dirty && !f.pml && !f.ple && !f.xsaves);
    assert!(!f.invpcid, "CPUID has it, but it cannot be given to guests");
    assert_eq!(f.preemption_timer, Some(5));
    let f = IVY_BRIDGE.read().unwrap();
    assert!(!f.ple && f.rdtscp);
    let f = BROADWELL.read().unwrap();
    assert!(f.ept_1g && f.ept_dirty && f.ple && f.invpcid && !f.pml && !f.tsc_scaling);
    let f = COFFEE_LAKE.read().unwrap();
    assert!(f.pml && f.xsaves && f.zero_length_injection && !f.tsc_scaling);
    assert_eq!(f.to_string(), "EPT, VPID, EPT dirty bits, 1 GiB pages, PML, PLE, preemption timer");
    assert_eq!((f.revision, f.preemption_timer), (4, Some(7)));
    assert_eq!(f.pin.base.bits() & TIMER, TIMER);
    let f = f.without_preemption_timer();
    assert_eq!((f.preemption_timer, f.pin.base.bits() & TIMER), (None, 0));
    let f = LAB.read().unwrap();
    assert!(f.vpid && f.tsc_scaling && f.pml && f.ept_1g && f.xsaves);
    assert_eq!(f.ept_pointer(0x1234_5000), 0x1234_505e);
    assert_eq!(SILVERMONT.read().unwrap().ept_pointer(0x1000), 0x101e);
}

#[test]
fn umip_is_made_by_exits_where_the_cpu_has_none() {
    const DESCRIPTOR_TABLES: u32 = 1 << 2;
    for (name, cpu) in USABLE {
        let f = cpu.read().unwrap();
        assert!(f.umip_by_exits, "{name}");
        assert_eq!(f.secondary.base.bits() & DESCRIPTOR_TABLES, 0, "{name}: not from the start");
    }
    assert!(!COFFEE_LAKE.without(0x48b, DESCRIPTOR_TABLES).read().unwrap().umip_by_exits);
    let with_umip = |leaf, subleaf| {
        let [eax, ebx, ecx, edx] = cpuid(leaf, subleaf);
        [eax, ebx, if leaf == 7 { ecx | 1 << 2 } else { ecx }, edx]
    };
    let f = Features::read(|index| COFFEE_LAKE.msr(index), with_umip, Cr4::empty(), true).unwrap();
    assert!(!f.umip_by_exits, "the CPU's own");
}

#[test]
fn a_preemption_timer_that_counts_at_another_rate_is_not_used() {
    let clarkdale = |leaf, subleaf| {
        if leaf == 1 { [0x0002_0652, 0, 1 << 5, 0] } else { cpuid(leaf, subleaf) }
    };
    let f = Features::read(|index| COFFEE_LAKE.msr(index), clarkdale, Cr4::empty(), true).unwrap();
    assert_eq!((f.preemption_timer, f.pin.base.bits() & TIMER), (None, 0));
}

#[test]
fn what_is_masked_is_not_taken() {
    let cpu = COFFEE_LAKE.without(0x48b, 1 << 5 | 1 << 10 | 1 << 17 | 1 << 12 | 1 << 3 | 1 << 20);
    let f = cpu.without(0x481, 1 << 6).read().unwrap();
    assert!(!f.vpid && !f.ple && !f.pml && !f.invpcid && !f.rdtscp && !f.xsaves);
    assert_eq!((f.preemption_timer, f.pin.base.bits() & TIMER), (None, 0));
    assert_eq!(f.secondary.base.bits() & 0x0012_1428, 0);
    // Without dirty bits there is nothing to log; without an INVVPID of all there are no ids.
    let mut cpu = COFFEE_LAKE;
    cpu.0[12] &= !(1 << 21 | 1 << 42);
    let f = cpu.read().unwrap();
    assert!(!f.pml && !f.vpid && f.secondary.base.bits() & 0x20 == 0);
}

#[test]
fn without_ept_nothing_of_it_is_asked_for() {
    const EPT_AND_UNRESTRICTED: u32 = 1 << 1 | 1 << 7;
    for cpu in [COFFEE_LAKE, COFFEE_LAKE.without(0x48b, EPT_AND_UNRESTRICTED)] {
        let f = Features::read(|index| cpu.msr(index), cpuid, Cr4::OSXSAVE, false).unwrap();
        assert_eq!(f.secondary.base.bits() & EPT_AND_UNRESTRICTED, 0);
        assert!(!f.ept && !f.pml && !f.ept_dirty && !f.ept_1g);
        assert!(f.to_string().starts_with("no EPT, "), "{f}");
    }
}

#[test]
fn a_cpu_without_vmx_is_refused() {
    let none = |leaf, subleaf| if leaf == 1 { [0; 4] } else { cpuid(leaf, subleaf) };
    let refused = Features::read(|_| panic!("no capability MSR exists"), none, Cr4::empty(), true);
    assert_eq!(refused, Err(Unusable::Absent));
}

#[test]
fn each_thing_that_is_missing_is_named() {
    assert!(PENRYN.missing().contains("(EPT)"));
    for (what, index, bits) in [
        ("(EPT)", 0x482, 1 << 31),
        ("(EPT)", 0x48b, 1 << 1),
        ("unrestricted", 0x48b, 1 << 7),
        ("MSR bitmaps", 0x482, 1 << 28),
        ("TPR shadow", 0x482, 1 << 21),
        ("TSC offsetting", 0x482, 1 << 3),
        ("interrupts and NMIs", 0x481, 1 << 0),
        ("virtual NMIs", 0x481, 1 << 5),
        ("virtual NMIs", 0x482, 1 << 22),
        ("64-bit", 0x483, 1 << 9),
        ("EFER", 0x483, 1 << 21),
        ("EFER", 0x484, 1 << 15),
        ("PAT", 0x484, 1 << 14),
        ("every CPU", 0x482, 1 << 23),
    ] {
        let said = COFFEE_LAKE.without(index, bits).missing();
        assert!(said.contains(what), "{said}, for {what}");
    }
    for (what, bits) in [("write-back", 1 << 14), ("four levels", 1 << 6), ("INVEPT", 1 << 26)] {
        let mut cpu = COFFEE_LAKE;
        cpu.0[12] &= !bits;
        assert!(cpu.missing().contains(what), "{}, for {what}", cpu.missing());
    }
    // CR3 exits that cannot be switched off.
    let mut cpu = COFFEE_LAKE;
    cpu.0[14] |= 1 << 15;
    assert!(cpu.missing().contains("CR3"));
    // Structures in uncacheable memory.
    let mut cpu = COFFEE_LAKE;
    cpu.0[0] &= !(0xf << 50);
    assert!(cpu.missing().contains("write-back"));
}

#[test]
fn addresses_are_cut_to_the_width_that_the_cpu_has() {
    let narrow = COFFEE_LAKE.read().unwrap();
    assert_eq!(narrow.canonical(0x0000_7fff_ffff_ffff), 0x0000_7fff_ffff_ffff);
    assert_eq!(narrow.canonical(0x00ff_8000_0000_1000), 0xffff_8000_0000_1000);
    let mut wide = COFFEE_LAKE;
    wide.0[9] |= 1 << 12;
    let wide = wide.read().unwrap();
    assert_eq!(wide.canonical(0x00ff_8000_0000_1000), 0x00ff_8000_0000_1000);
    assert_eq!(wide.canonical(0x01ff_0000_0000_1000), 0xffff_0000_0000_1000);
}
