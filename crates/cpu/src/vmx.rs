//! The VMX instructions, and what of the host's registers VMX alone has to know.
//!
//! Everything takes `&self`: a VMCS field that was not read yet is read where it is asked for.

use backend::Gprs;
use core::arch::{asm, global_asm};
use x86::{Cr0, Cr4, Hpa};

use crate::{Native, native::gnt_load_data_selectors};

/// What the world switch is told beside the general registers. `linux/vmx_enter.S` knows the
/// offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VmxSwitch {
    /// HOST_RSP as the VMCS has it: written only when the stack lies elsewhere. Set to 0 when the
    /// VMCS may have another.
    pub host_rsp: u64,
    /// The guest's SPEC_CTRL: written before entry when it differs from the host's.
    pub guest_spec_ctrl: u64,
    /// The host's value on this CPU, written after the exit when the guest's differs.
    pub host_spec_ctrl: u64,
    /// [`VmxSwitch::LAUNCHED`] and [`VmxSwitch::READ_SPEC_CTRL`].
    pub flags: u64,
}

impl VmxSwitch {
    /// The VMCS was launched since it was cleared: VMRESUME.
    pub const LAUNCHED: u64 = 1 << 0;
    /// The guest writes SPEC_CTRL without an exit: its value is read after the exit.
    pub const READ_SPEC_CTRL: u64 = 1 << 1;
}

/// VMX, and the host's registers that VM exits load from the VMCS.
pub trait VmxCpu {
    /// Sets CR4.VMXE, then VMXON with a region of one page that begins with the revision.
    /// IA32_FEATURE_CONTROL allows it. False: refused, and CR4.VMXE is clear.
    fn vmxon(&self, region: Hpa) -> bool;
    /// VMXOFF, and clears CR4.VMXE, which is set. NMI context, perhaps.
    fn vmxoff(&self);
    /// Executes VMPTRLD: makes a VMCS the current one.
    fn vmptrld(&self, vmcs: Hpa);
    /// Executes VMCLEAR: writes a VMCS back to its page.
    fn vmclear(&self, vmcs: Hpa);
    /// VMREAD of a field of the current VMCS by its encoding. A failure is counted
    /// ([`failures`]) and reads 0.
    fn vmread(&self, field: u32) -> u64;
    /// VMWRITE. A failure is counted.
    fn vmwrite(&self, field: u32, value: u64);
    /// Executes INVEPT: drops what was made from EPT tables.
    fn invept(&self, kind: u64, ept_pointer: u64);
    /// Executes INVVPID: drops translations of a VPID.
    fn invvpid(&self, kind: u64, vpid: u16, address: u64);
    /// Executes VERW, by which a CPU with such microcode clears its buffers. Right before an entry, with interrupts off.
    fn verw(&self);
    /// The world switch: loads `gprs` but RSP, VMLAUNCH or VMRESUME, saves them, with the
    /// mitigations of this host. False: the instruction failed and no guest was entered.
    fn vmx_enter(&mut self, gprs: &mut Gprs, switch: &mut VmxSwitch) -> bool;
    /// The address that HOST_RIP takes.
    fn vmx_exit_address(&self) -> u64;
    /// Runs the host's NMI handler, as the NMI that ended the guest's run would have.
    fn host_nmi(&mut self);
    /// MOV from CR0.
    fn cr0(&self) -> Cr0;
    /// MOV from CR2.
    fn cr2(&self) -> u64;
    /// MOV to CR2.
    fn set_cr2(&self, value: u64);
    /// MOV from CR3.
    fn cr3(&self) -> u64;
    /// MOV from CR4; for readers that have no exclusive access.
    fn cr4_now(&self) -> Cr4;
    /// DS and ES, which are user space's: the kernel leaves them alone.
    fn data_selectors(&self) -> (u16, u16);
    /// Loads DS and ES with null, or of this thread, which a VM exit has made null, with what [`data_selectors`](Self::data_selectors) said since
    /// interrupts went off. A selector whose descriptor has gone becomes null.
    fn load_data_selectors(&mut self, ds: u16, es: u16);
}

// The count of failures is assembly's alone: no object of Rust's, and so no memory that the blocks below
// would have to say they change. What the compiler holds in registers then need not be loaded again
// after every VMREAD.
global_asm!(
    ".pushsection .bss.gnt_vmx_failures, \"aw\", @nobits",
    ".balign 8",
    ".weak gnt_vmx_failures",
    ".hidden gnt_vmx_failures",
    "gnt_vmx_failures: .zero 8",
    ".popsection",
);

/// VMREADs, VMWRITEs, VMPTRLDs, VMCLEARs and invalidations that failed since the module was loaded:
/// each is a bug.
pub fn failures() -> u64 {
    let count;
    // SAFETY: eight aligned bytes that nothing but the blocks of this file touches.
    unsafe {
        asm!("mov {}, [rip + gnt_vmx_failures]", out(reg) count,
             options(nostack, preserves_flags));
    }
    count
}

#[cfg(target_os = "none")]
unsafe extern "C" {
    fn gnt_vmx_enter(gprs: *mut u64, switch: *mut VmxSwitch) -> u64;
    fn gnt_vmx_exit();
    fn gnt_vmx_on(region: u64) -> i32;
    fn gnt_vmx_off();
    fn gnt_vmx_nmi();
}

/// Outside the kernel there is no VMX.
#[cfg(not(target_os = "none"))]
mod outside {
    pub unsafe fn gnt_vmx_on(_: u64) -> i32 {
        -1
    }
    pub unsafe fn gnt_vmx_off() {}
    pub unsafe fn gnt_vmx_nmi() {}
}
#[cfg(not(target_os = "none"))]
use outside::{gnt_vmx_nmi, gnt_vmx_off, gnt_vmx_on};

/// An instruction on `[{0}]`, whose failure is counted.
macro_rules! on_memory {
    ($insn:literal, $operand:expr $(, $kind:expr)?) => {
        asm!(
            concat!($insn, " [{operand}]"),
            "ja 2f",
            "lock inc qword ptr [rip + gnt_vmx_failures]",
            "2:",
            operand = in(reg) $operand,
            $(kind = in(reg) $kind,)?
            options(nostack)
        )
    };
}

impl VmxCpu for Native {
    fn vmxon(&self, region: Hpa) -> bool {
        // SAFETY: the region is a page of this module, kept until VMXOFF; a fault is taken.
        unsafe { gnt_vmx_on(region.0) == 0 }
    }

    fn vmxoff(&self) {
        // SAFETY: no guest runs on this CPU any more; a fault is taken.
        unsafe { gnt_vmx_off() };
    }

    #[inline]
    fn vmptrld(&self, vmcs: Hpa) {
        // SAFETY: VMX is on; the page is a VMCS of this module, active on no other CPU.
        unsafe { on_memory!("vmptrld", &raw const vmcs.0) };
    }

    #[inline]
    fn vmclear(&self, vmcs: Hpa) {
        // SAFETY: VMX is on; the page is a VMCS of this module, active on no other CPU.
        unsafe { on_memory!("vmclear", &raw const vmcs.0) };
    }

    #[inline(always)]
    fn vmread(&self, field: u32) -> u64 {
        let value: u64;
        // SAFETY: VMX is on and interrupts are off, so that it stays on; without a current VMCS or
        // without the field the instruction fails, and that is counted.
        unsafe {
            asm!("vmread {value}, {field}",
                 "ja 2f",
                 "lock inc qword ptr [rip + gnt_vmx_failures]",
                 "xor {value:e}, {value:e}",
                 "2:",
                 field = in(reg) u64::from(field), value = out(reg) value,
                 options(nomem, nostack));
        }
        value
    }

    #[inline(always)]
    fn vmwrite(&self, field: u32, value: u64) {
        // SAFETY: VMX is on and interrupts are off, so that it stays on; without a current VMCS the
        // instruction fails and is counted. What a field may hold the CPU checks at entry.
        unsafe {
            asm!("vmwrite {field}, {value}",
                 "ja 2f",
                 "lock inc qword ptr [rip + gnt_vmx_failures]",
                 "2:",
                 field = in(reg) u64::from(field), value = in(reg) value,
                 options(nomem, nostack));
        }
    }

    fn invept(&self, kind: u64, ept_pointer: u64) {
        let descriptor = [ept_pointer, 0];
        // SAFETY: VMX is on; dropping translations has no effect on what they mean.
        unsafe { on_memory!("invept {kind},", &raw const descriptor, kind) };
    }

    fn invvpid(&self, kind: u64, vpid: u16, address: u64) {
        let descriptor = [u64::from(vpid), address];
        // SAFETY: VMX is on; dropping translations has no effect on what they mean.
        unsafe { on_memory!("invvpid {kind},", &raw const descriptor, kind) };
    }

    fn verw(&self) {
        // The kernel's data segment: any that can be written would do.
        static SELECTOR: u16 = 0x18;
        // SAFETY: reads a selector, and changes ZF alone.
        unsafe {
            core::arch::asm!("verw word ptr [{}]", in(reg) &raw const SELECTOR, options(nostack, readonly));
        }
    }

    #[inline]
    fn vmx_enter(&mut self, gprs: &mut Gprs, switch: &mut VmxSwitch) -> bool {
        #[cfg(target_os = "none")]
        // SAFETY: a VMCS whose host state is this CPU's is current, interrupts are off, `gprs` is
        // 16 words. The routine keeps the C calling convention.
        unsafe {
            gnt_vmx_enter(gprs.0.as_mut_ptr(), switch) == 0
        }
        #[cfg(not(target_os = "none"))]
        {
            let _ = (gprs, switch);
            unreachable!("no world switch outside the kernel");
        }
    }

    fn vmx_exit_address(&self) -> u64 {
        #[cfg(target_os = "none")]
        {
            gnt_vmx_exit as *const () as u64
        }
        #[cfg(not(target_os = "none"))]
        0
    }

    fn host_nmi(&mut self) {
        // SAFETY: the kernel's own handler by its own gate: the exit has blocked NMIs, so it is
        // entered as by an NMI, and its IRET ends the blocking.
        unsafe { gnt_vmx_nmi() };
    }

    #[inline]
    fn cr0(&self) -> Cr0 {
        let value: u64;
        // SAFETY: ring 0; reading has no effect.
        unsafe { asm!("mov {}, cr0", out(reg) value, options(nomem, nostack, preserves_flags)) };
        Cr0::from_bits_retain(value)
    }

    #[inline]
    fn cr2(&self) -> u64 {
        let value: u64;
        // SAFETY: ring 0; reading has no effect.
        unsafe { asm!("mov {}, cr2", out(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    }

    #[inline]
    fn set_cr2(&self, value: u64) {
        // SAFETY: ring 0; the kernel reads CR2 only in its fault handlers, which set it first.
        unsafe { asm!("mov cr2, {}", in(reg) value, options(nomem, nostack, preserves_flags)) };
    }

    #[inline]
    fn cr3(&self) -> u64 {
        let value: u64;
        // SAFETY: ring 0; reading has no effect.
        unsafe { asm!("mov {}, cr3", out(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    }

    #[inline]
    fn cr4_now(&self) -> Cr4 {
        let value: u64;
        // SAFETY: ring 0; reading has no effect.
        unsafe { asm!("mov {}, cr4", out(reg) value, options(nomem, nostack, preserves_flags)) };
        Cr4::from_bits_retain(value)
    }

    #[inline]
    fn data_selectors(&self) -> (u16, u16) {
        let (ds, es): (u32, u32);
        // SAFETY: reads registers.
        unsafe {
            asm!("mov {:e}, ds", "mov {:e}, es", out(reg) ds, out(reg) es,
                 options(nomem, nostack, preserves_flags));
        }
        (ds as u16, es as u16)
    }

    fn load_data_selectors(&mut self, ds: u16, es: u16) {
        // SAFETY: the values were read on this CPU while the same thread ran. They are user space's, for the kernel leaves them
        // alone: one that has become invalid meanwhile is replaced by the null selector.
        unsafe { gnt_load_data_selectors(ds, es) }
    }
}
