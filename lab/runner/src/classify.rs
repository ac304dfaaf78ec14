//! Which instructions the lab counts, told from their bytes (APM vol. 3, opcode maps; SDM vol. 3, chapter 31), and the two markers between which it
//! counts. Used by the emulators' plugins while they translate, so it allocates nothing.

/// A kind of instruction that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// VMRUN
    Vmrun,
    /// VMLOAD
    Vmload,
    /// VMSAVE
    Vmsave,
    /// STGI
    Stgi,
    /// CLGI
    Clgi,
    /// INVLPGA
    Invlpga,
    /// VMLAUNCH
    Vmlaunch,
    /// VMRESUME
    Vmresume,
    /// VMREAD
    Vmread,
    /// VMWRITE
    Vmwrite,
    /// VMPTRLD
    Vmptrld,
    /// VMCLEAR
    Vmclear,
    /// INVEPT
    Invept,
    /// INVVPID
    Invvpid,
    /// INVLPG
    Invlpg,
    /// RDMSR
    Rdmsr,
    /// WRMSR
    Wrmsr,
    /// CPUID
    Cpuid,
    /// RDTSC, RDTSCP
    Rdtsc,
    /// MOV from a control register
    MovFromCr,
    /// MOV to a control register other than CR3
    MovToCr,
    /// MOV to CR3
    MovToCr3,
    /// MOV to or from a debug register
    MovDr,
    /// XGETBV
    Xgetbv,
    /// XSETBV
    Xsetbv,
    /// XSAVE, XSAVEC, XSAVEOPT, XSAVES, XRSTOR, XRSTORS, FXSAVE, FXRSTOR
    Xstate,
    /// STI
    Sti,
    /// CLI
    Cli,
    /// POPF
    Popf,
    /// MOV or POP to a segment register, LFS, LGS, LSS
    Segment,
    /// LGDT, LIDT, LLDT, LTR
    Table,
    /// RDFSBASE, RDGSBASE, WRFSBASE, WRGSBASE
    FsGsBase,
    /// SWAPGS
    Swapgs,
    /// SYSCALL, SYSRET, SYSENTER, SYSEXIT, IRET
    Syscall,
    /// MFENCE, LFENCE, SFENCE
    Fence,
    /// An instruction with a LOCK prefix, or XCHG with memory
    Locked,
}

/// Every kind, in the order of its number.
pub const KINDS: [Kind; 36] = [
    Kind::Vmrun,
    Kind::Vmload,
    Kind::Vmsave,
    Kind::Stgi,
    Kind::Clgi,
    Kind::Invlpga,
    Kind::Vmlaunch,
    Kind::Vmresume,
    Kind::Vmread,
    Kind::Vmwrite,
    Kind::Vmptrld,
    Kind::Vmclear,
    Kind::Invept,
    Kind::Invvpid,
    Kind::Invlpg,
    Kind::Rdmsr,
    Kind::Wrmsr,
    Kind::Cpuid,
    Kind::Rdtsc,
    Kind::MovFromCr,
    Kind::MovToCr,
    Kind::MovToCr3,
    Kind::MovDr,
    Kind::Xgetbv,
    Kind::Xsetbv,
    Kind::Xstate,
    Kind::Sti,
    Kind::Cli,
    Kind::Popf,
    Kind::Segment,
    Kind::Table,
    Kind::FsGsBase,
    Kind::Swapgs,
    Kind::Syscall,
    Kind::Fence,
    Kind::Locked,
];

impl Kind {
    /// Whether it is an instruction of VMX, which nothing executes under SVM.
    pub fn is_vmx(self) -> bool {
        (Kind::Vmlaunch as usize..=Kind::Invvpid as usize).contains(&(self as usize))
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Vmrun => "vmrun",
            Kind::Vmload => "vmload",
            Kind::Vmsave => "vmsave",
            Kind::Stgi => "stgi",
            Kind::Clgi => "clgi",
            Kind::Invlpga => "invlpga",
            Kind::Vmlaunch => "vmlaunch",
            Kind::Vmresume => "vmresume",
            Kind::Vmread => "vmread",
            Kind::Vmwrite => "vmwrite",
            Kind::Vmptrld => "vmptrld",
            Kind::Vmclear => "vmclear",
            Kind::Invept => "invept",
            Kind::Invvpid => "invvpid",
            Kind::Invlpg => "invlpg",
            Kind::Rdmsr => "rdmsr",
            Kind::Wrmsr => "wrmsr",
            Kind::Cpuid => "cpuid",
            Kind::Rdtsc => "rdtsc",
            Kind::MovFromCr => "mov_from_cr",
            Kind::MovToCr => "mov_to_cr",
            Kind::MovToCr3 => "mov_to_cr3",
            Kind::MovDr => "mov_dr",
            Kind::Xgetbv => "xgetbv",
            Kind::Xsetbv => "xsetbv",
            Kind::Xstate => "xstate",
            Kind::Sti => "sti",
            Kind::Cli => "cli",
            Kind::Popf => "popf",
            Kind::Segment => "segment",
            Kind::Table => "table",
            Kind::FsGsBase => "fs_gs_base",
            Kind::Swapgs => "swapgs",
            Kind::Syscall => "syscall",
            Kind::Fence => "fence",
            Kind::Locked => "locked",
        }
    }
}

/// Where counting begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Counting starts after this instruction.
    Start,
    /// Counting stops before this instruction.
    Stop,
}

/// The markers are `nopl disp32(%rax)` with a displacement that spells `GNT` and a number.
pub fn marker(bytes: &[u8]) -> Option<Marker> {
    match bytes {
        [0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x01] => Some(Marker::Start),
        [0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x02] => Some(Marker::Stop),
        _ => None,
    }
}

/// The kinds that one instruction, given by all its bytes, counts for. At most two: a locked instruction may also be of another kind.
pub fn classify(bytes: &[u8]) -> [Option<Kind>; 2] {
    let (mut locked, mut repeated, mut short) = (false, false, false);
    let mut rest = bytes;
    // Legacy prefixes, then REX. In 16- and 32-bit code 40..4F are whole instructions of one byte, which nothing follows.
    while let [prefix, tail @ ..] = rest {
        match prefix {
            0xf0 => locked = true,
            0xf3 => repeated = true,
            0x66 => short = true,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x67 | 0xf2 => {}
            0x40..=0x4f if !tail.is_empty() => {}
            _ => break,
        }
        rest = tail;
    }
    let kind = match rest {
        [0x0f, 0x01, third, ..] => match third {
            0xc2 => Some(Kind::Vmlaunch),
            0xc3 => Some(Kind::Vmresume),
            0xd8 => Some(Kind::Vmrun),
            0xda => Some(Kind::Vmload),
            0xdb => Some(Kind::Vmsave),
            0xdc => Some(Kind::Stgi),
            0xdd => Some(Kind::Clgi),
            0xdf => Some(Kind::Invlpga),
            0xd0 => Some(Kind::Xgetbv),
            0xd1 => Some(Kind::Xsetbv),
            0xf8 => Some(Kind::Swapgs),
            0xf9 => Some(Kind::Rdtsc),
            // Group 7 with memory: /2 LGDT, /3 LIDT, /7 INVLPG.
            0..=0xbf => match (third >> 3) & 7 {
                2 | 3 => Some(Kind::Table),
                7 => Some(Kind::Invlpg),
                _ => None,
            },
            _ => None,
        },
        // Group 6: /2 LLDT, /3 LTR.
        [0x0f, 0x00, modrm, ..] if matches!((modrm >> 3) & 7, 2 | 3) => Some(Kind::Table),
        [0x0f, 0x78, ..] if !short => Some(Kind::Vmread),
        [0x0f, 0x79, ..] if !short => Some(Kind::Vmwrite),
        [0x0f, 0x38, 0x80, ..] if short => Some(Kind::Invept),
        [0x0f, 0x38, 0x81, ..] if short => Some(Kind::Invvpid),
        // Group 9 with memory: /6 VMPTRLD, 66: VMCLEAR, F3: VMXON.
        [0x0f, 0xc7, modrm, ..] if *modrm < 0xc0 && (modrm >> 3) & 7 == 6 && !repeated => {
            Some(if short { Kind::Vmclear } else { Kind::Vmptrld })
        }
        [0x0f, 0x31, ..] => Some(Kind::Rdtsc),
        [0x0f, 0x32, ..] => Some(Kind::Rdmsr),
        [0x0f, 0x30, ..] => Some(Kind::Wrmsr),
        [0x0f, 0xa2, ..] => Some(Kind::Cpuid),
        [0x0f, 0x20, ..] => Some(Kind::MovFromCr),
        // REX.R makes CR8 to CR15 of the register field, and so CR11, which there is not, of 3.
        [0x0f, 0x22, modrm, ..] if (modrm >> 3) & 7 == 3 => Some(Kind::MovToCr3),
        [0x0f, 0x22, ..] => Some(Kind::MovToCr),
        [0x0f, 0x21 | 0x23, ..] => Some(Kind::MovDr),
        [0x0f, 0x05 | 0x07 | 0x34 | 0x35, ..] | [0xcf] => Some(Kind::Syscall),
        // Group 15 with memory: /0 FXSAVE, /1 FXRSTOR, /4 XSAVE, /5 XRSTOR, /6 XSAVEOPT (66: CLWB). With a register: F3 /0 to /3 the
        // bases of FS and GS, /5 to /7 the fences. Group 9: /3 XRSTORS, /4 XSAVEC, /5 XSAVES.
        [0x0f, 0xae, modrm, ..] if *modrm < 0xc0 && matches!((modrm >> 3) & 7, 0 | 1 | 4..=6) => {
            Some(Kind::Xstate)
        }
        [0x0f, 0xae, 0xc0..=0xdf, ..] if repeated => Some(Kind::FsGsBase),
        [0x0f, 0xae, 0xe8..=0xff, ..] if !repeated => Some(Kind::Fence),
        [0x0f, 0xc7, modrm, ..] if *modrm < 0xc0 && matches!((modrm >> 3) & 7, 3..=5) => {
            Some(Kind::Xstate)
        }
        [0x8e, ..] | [0x0f, 0xa1 | 0xa9] | [0x0f, 0xb2 | 0xb4 | 0xb5, ..] => Some(Kind::Segment),
        [0x9d] => Some(Kind::Popf),
        [0xfb] => Some(Kind::Sti),
        [0xfa] => Some(Kind::Cli),
        [0x86 | 0x87, modrm, ..] if *modrm < 0xc0 => {
            locked = true;
            None
        }
        _ => None,
    };
    [kind, locked.then_some(Kind::Locked)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(bytes: &[u8]) -> Vec<Kind> {
        classify(bytes).into_iter().flatten().collect()
    }

    #[test]
    fn kinds_stand_at_their_number() {
        for (i, kind) in KINDS.iter().enumerate() {
            assert_eq!(*kind as usize, i, "{}", kind.name());
        }
    }

    #[test]
    fn svm_instructions_are_told_apart() {
        assert_eq!(kinds(&[0x0f, 0x01, 0xd8]), [Kind::Vmrun]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xd9]), [], "VMMCALL is the guest's");
        assert_eq!(kinds(&[0x0f, 0x01, 0xda]), [Kind::Vmload]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xdb]), [Kind::Vmsave]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xdc]), [Kind::Stgi]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xdd]), [Kind::Clgi]);
    }

    #[test]
    fn vmx_instructions_are_told_apart() {
        assert_eq!(kinds(&[0x0f, 0x01, 0xc1]), [], "VMCALL is the guest's");
        assert!(!Kind::Invlpga.is_vmx() && Kind::Vmlaunch.is_vmx() && !Kind::Invlpg.is_vmx());
        assert_eq!(kinds(&[0x0f, 0x01, 0xc2]), [Kind::Vmlaunch]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xc3]), [Kind::Vmresume]);
        assert_eq!(kinds(&[0x48, 0x0f, 0x78, 0xd0]), [Kind::Vmread], "vmread %rdx,%rax");
        assert_eq!(kinds(&[0x0f, 0x79, 0xc2]), [Kind::Vmwrite], "vmwrite %rdx,%rax");
        assert_eq!(kinds(&[0x66, 0x0f, 0x79, 0xc2]), [], "extrq %xmm2,%xmm0");
        assert_eq!(kinds(&[0x0f, 0xc7, 0x37]), [Kind::Vmptrld], "vmptrld (%rdi)");
        assert_eq!(kinds(&[0x66, 0x0f, 0xc7, 0x37]), [Kind::Vmclear], "vmclear (%rdi)");
        assert_eq!(kinds(&[0xf3, 0x0f, 0xc7, 0x37]), [], "vmxon (%rdi)");
        assert_eq!(kinds(&[0x48, 0x0f, 0xc7, 0xf0]), [], "rdrand %rax");
        assert_eq!(kinds(&[0x66, 0x0f, 0x38, 0x80, 0x37]), [Kind::Invept]);
        assert_eq!(kinds(&[0x66, 0x0f, 0x38, 0x81, 0x37]), [Kind::Invvpid]);
    }

    #[test]
    fn control_registers_are_told_apart_by_direction() {
        assert_eq!(kinds(&[0x0f, 0x20, 0xd8]), [Kind::MovFromCr], "mov %cr3,%rax");
        assert_eq!(kinds(&[0x0f, 0x22, 0xd8]), [Kind::MovToCr3], "mov %rax,%cr3");
        assert_eq!(kinds(&[0x0f, 0x22, 0xe0]), [Kind::MovToCr], "mov %rax,%cr4");
        assert_eq!(kinds(&[0x0f, 0x01, 0xd0]), [Kind::Xgetbv]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xd1]), [Kind::Xsetbv]);
    }

    #[test]
    fn the_groups_of_0f01_0f00_and_0fae_are_told_apart() {
        assert_eq!(kinds(&[0x0f, 0x01, 0x3f]), [Kind::Invlpg], "invlpg (%rdi)");
        assert_eq!(kinds(&[0x0f, 0x01, 0xdf]), [Kind::Invlpga]);
        assert_eq!(kinds(&[0x0f, 0x01, 0x10]), [Kind::Table], "lgdt (%rax)");
        assert_eq!(kinds(&[0x0f, 0x01, 0xca]), [], "clac");
        assert_eq!(kinds(&[0x0f, 0x00, 0xd0]), [Kind::Table], "lldt %ax");
        assert_eq!(kinds(&[0x0f, 0x00, 0xc8]), [], "str %eax");
        assert_eq!(kinds(&[0xf3, 0x48, 0x0f, 0xae, 0xd0]), [Kind::FsGsBase], "wrfsbase %rax");
        assert_eq!(kinds(&[0x0f, 0xae, 0xf0]), [Kind::Fence], "mfence");
        assert_eq!(kinds(&[0x0f, 0xae, 0xe8]), [Kind::Fence], "lfence");
        assert_eq!(kinds(&[0x0f, 0x01, 0xf8]), [Kind::Swapgs]);
        assert_eq!(kinds(&[0x0f, 0x01, 0xf9]), [Kind::Rdtsc], "rdtscp");
        assert_eq!(kinds(&[0x8e, 0xe0]), [Kind::Segment], "mov %eax,%fs");
        assert_eq!(kinds(&[0x48, 0xcf]), [Kind::Syscall], "iretq");
    }

    #[test]
    fn prefixes_do_not_hide_an_instruction() {
        assert_eq!(kinds(&[0x44, 0x0f, 0x20, 0xc0]), [Kind::MovFromCr], "mov %cr8,%rax");
        assert_eq!(kinds(&[0xf0, 0x48, 0x0f, 0xb1, 0x0f]), [Kind::Locked], "lock cmpxchg");
        assert_eq!(kinds(&[0x48, 0x87, 0x07]), [Kind::Locked], "xchg %rax,(%rdi)");
        assert_eq!(kinds(&[0x48, 0x87, 0xc7]), [], "xchg %rax,%rdi");
        assert_eq!(kinds(&[0x48, 0x0f, 0xae, 0x27]), [Kind::Xstate], "xsave64 (%rdi)");
    }

    #[test]
    fn one_byte_inc_of_32_bit_code_is_no_prefix() {
        assert_eq!(kinds(&[0x40]), []);
        assert_eq!(kinds(&[0xfa]), [Kind::Cli]);
    }

    #[test]
    fn markers_are_exact() {
        assert_eq!(marker(&[0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x01]), Some(Marker::Start));
        assert_eq!(marker(&[0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x02]), Some(Marker::Stop));
        assert_eq!(marker(&[0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x03]), None);
        assert_eq!(marker(&[0x0f, 0x1f, 0x80, 0, 0, 0, 0]), None, "an ordinary NOP");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_classify_without_panic(bytes in proptest::collection::vec(0u8.., 0..16)) {
            let _ = (classify(&bytes), marker(&bytes));
        }
    }
}
