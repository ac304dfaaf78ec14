//! The real CPU: inline assembly, and the world switch of `linux/svm_enter.S`.
//!
//! The methods are safe to call because everything above this floor only reaches them where the
//! module has established what they need (SVM enabled, ring 0, the MSR exists). That contract is
//! the reason why this crate is one of the few that may hold `unsafe`.

use crate::{Cpu, Selectors, SpecCtrl};
use backend::Gprs;
use core::arch::asm;
use x86::{Cr4, Hpa, vmcb::Vmcb};

/// The CPU this code runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Native;

#[cfg(target_os = "none")]
unsafe extern "C" {
    fn gnt_svm_vmrun(vmcb: u64, gprs: *mut u64, guest_spec_ctrl: u64, host_spec_ctrl: u64);
    fn gnt_svm_on() -> i32;
    fn gnt_svm_off();
    fn gnt_host_selectors() -> u64;
    fn gnt_load_host_selectors(fs: u16, gs: u16, ldt: u16);
    pub(crate) fn gnt_load_data_selectors(ds: u16, es: u16);
    fn gnt_load_task_register();
}

/// Outside the kernel there is nothing to be read or loaded.
#[cfg(not(target_os = "none"))]
mod outside {
    pub unsafe fn gnt_svm_on() -> i32 {
        -1
    }
    pub unsafe fn gnt_svm_off() {}
    pub unsafe fn gnt_host_selectors() -> u64 {
        0
    }
    pub unsafe fn gnt_load_host_selectors(_: u16, _: u16, _: u16) {}
    pub(crate) unsafe fn gnt_load_data_selectors(_: u16, _: u16) {}
    pub unsafe fn gnt_load_task_register() {}
}
#[cfg(not(target_os = "none"))]
pub(crate) use outside::gnt_load_data_selectors;
#[cfg(not(target_os = "none"))]
use outside::{
    gnt_host_selectors, gnt_load_host_selectors, gnt_load_task_register, gnt_svm_off, gnt_svm_on,
};

impl Cpu for Native {
    #[inline]
    fn rdmsr(&mut self, msr: u32) -> u64 {
        let (low, high): (u32, u32);
        // SAFETY: ring 0; the caller names an MSR that exists on this CPU; RDMSR writes no memory.
        unsafe {
            asm!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high,
                 options(nomem, nostack, preserves_flags));
        }
        (u64::from(high) << 32) | u64::from(low)
    }

    #[inline]
    fn wrmsr(&mut self, msr: u32, value: u64) {
        // SAFETY: ring 0; the callers write only MSRs whose state they own and restore.
        unsafe {
            asm!("wrmsr", in("ecx") msr, in("eax") value as u32, in("edx") (value >> 32) as u32,
                 options(nostack, preserves_flags));
        }
    }

    #[inline]
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let r = core::arch::x86_64::__cpuid_count(leaf, subleaf);
        [r.eax, r.ebx, r.ecx, r.edx]
    }

    #[inline]
    fn rdtsc(&mut self) -> u64 {
        let (low, high): (u32, u32);
        // SAFETY: RDTSC has no effect but on its outputs.
        unsafe {
            asm!("rdtsc", out("eax") low, out("edx") high,
                 options(nomem, nostack, preserves_flags));
        }
        (u64::from(high) << 32) | u64::from(low)
    }

    #[inline]
    fn xcr0(&mut self) -> u64 {
        let (low, high): (u32, u32);
        // SAFETY: executed only where the kernel has set CR4.OSXSAVE.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
                 options(nomem, nostack, preserves_flags));
        }
        (u64::from(high) << 32) | u64::from(low)
    }

    #[inline]
    fn set_xcr0(&mut self, value: u64) {
        // SAFETY: ring 0; the value was validated against the CPU's features and the host's is
        // restored before any other host code uses extended state.
        unsafe {
            asm!("xsetbv", in("ecx") 0, in("eax") value as u32, in("edx") (value >> 32) as u32,
                 options(nostack, preserves_flags));
        }
    }

    #[inline]
    fn pkru(&mut self) -> u32 {
        let value: u32;
        // SAFETY: executed only where CR4.PKE is set.
        unsafe {
            asm!(".byte 0x0f, 0x01, 0xee", in("ecx") 0, out("eax") value, out("edx") _,
                 options(nomem, nostack, preserves_flags));
        }
        value
    }

    #[inline]
    fn set_pkru(&mut self, value: u32) {
        // SAFETY: executed only where CR4.PKE is set; PKRU does not bear on supervisor pages.
        unsafe {
            asm!(".byte 0x0f, 0x01, 0xef", in("eax") value, in("ecx") 0, in("edx") 0,
                 options(nostack, preserves_flags));
        }
    }

    #[inline]
    fn debug_reg(&mut self, n: u8) -> u64 {
        let value: u64;
        // SAFETY: ring 0, DR0 to DR3 or DR6, DR7.GD is clear in the host.
        unsafe {
            match n {
                0 => asm!("mov {}, dr0", out(reg) value, options(nomem, nostack)),
                1 => asm!("mov {}, dr1", out(reg) value, options(nomem, nostack)),
                2 => asm!("mov {}, dr2", out(reg) value, options(nomem, nostack)),
                6 => asm!("mov {}, dr6", out(reg) value, options(nomem, nostack)),
                _ => asm!("mov {}, dr3", out(reg) value, options(nomem, nostack)),
            }
        }
        value
    }

    #[inline]
    fn set_debug_reg(&mut self, n: u8, value: u64) {
        // SAFETY: ring 0; with DR7 disabled an address in DR0 to DR3 has no effect on the host, and
        // the kernel's DR7 is restored after the run.
        unsafe {
            match n {
                0 => asm!("mov dr0, {}", in(reg) value, options(nomem, nostack)),
                1 => asm!("mov dr1, {}", in(reg) value, options(nomem, nostack)),
                2 => asm!("mov dr2, {}", in(reg) value, options(nomem, nostack)),
                6 => asm!("mov dr6, {}", in(reg) value, options(nomem, nostack)),
                7 => asm!("mov dr7, {}", in(reg) value, options(nomem, nostack)),
                _ => asm!("mov dr3, {}", in(reg) value, options(nomem, nostack)),
            }
        }
    }

    #[inline]
    fn cr4(&mut self) -> Cr4 {
        let value: u64;
        // SAFETY: ring 0; reading CR4 has no effect.
        unsafe { asm!("mov {}, cr4", out(reg) value, options(nomem, nostack, preserves_flags)) };
        Cr4::from_bits_retain(value)
    }

    fn svm_on(&mut self) -> bool {
        // SAFETY: the save area that VMRUN needs is named before the first one.
        unsafe { gnt_svm_on() == 0 }
    }

    fn svm_off(&mut self) {
        // SAFETY: no guest runs on this CPU any more.
        unsafe { gnt_svm_off() };
    }

    #[inline]
    fn clgi(&mut self) {
        // SAFETY: EFER.SVME is set on this CPU; the caller pairs it with STGI.
        unsafe { asm!("clgi", options(nostack)) };
    }

    #[inline]
    fn stgi(&mut self) {
        // SAFETY: EFER.SVME is set on this CPU.
        unsafe { asm!("stgi", options(nostack)) };
    }

    #[inline]
    fn sti(&mut self) {
        // SAFETY: GIF is clear, so no interrupt is taken by the host; IF only lets VMRUN exit.
        unsafe { asm!("sti", options(nostack)) };
    }

    #[inline]
    fn cli(&mut self) {
        // SAFETY: the caller restores IF as the kernel expects.
        unsafe { asm!("cli", options(nostack)) };
    }

    #[inline]
    fn vmload(&mut self, state: Hpa) {
        // SAFETY: `state` is a page of this module in VMCB format; GIF is clear, and the caller
        // holds to the rule that no per-CPU data is used until the host's state is loaded again.
        unsafe { asm!("vmload rax", in("rax") state.0, options(nostack)) };
    }

    #[inline]
    fn vmsave(&mut self, state: Hpa) {
        // SAFETY: `state` is a page of this module in VMCB format.
        unsafe { asm!("vmsave rax", in("rax") state.0, options(nostack)) };
    }

    fn selectors(&mut self) -> Selectors {
        // SAFETY: reads registers.
        let packed = unsafe { gnt_host_selectors() };
        Selectors { fs: packed as u16, gs: (packed >> 16) as u16, ldt: (packed >> 32) as u16 }
    }

    fn load_selectors(&mut self, selectors: Selectors) {
        // SAFETY: the values were read on this CPU while the same thread ran. One that has become
        // invalid meanwhile is replaced by the null selector.
        unsafe { gnt_load_host_selectors(selectors.fs, selectors.gs, selectors.ldt) }
    }

    fn load_task_register(&mut self) {
        // SAFETY: loads what the kernel has in TR always.
        unsafe { gnt_load_task_register() }
    }

    #[inline]
    fn vmrun(&mut self, vmcb: &mut Vmcb, at: Hpa, gprs: &mut Gprs, spec: SpecCtrl) {
        #[cfg(target_os = "none")]
        // SAFETY: `at` is the physical address of `vmcb`, which is borrowed exclusively for the
        // call; `gprs` is 16 words; GIF is clear. The routine keeps the C calling convention.
        unsafe {
            // The block is named by its physical address; the compiler has to know that the memory
            // behind `vmcb` changes.
            asm!("/* {0} */", in(reg) core::ptr::from_mut(vmcb), options(nostack, preserves_flags));
            gnt_svm_vmrun(at.0, gprs.0.as_mut_ptr(), spec.guest, spec.host);
            asm!("/* {0} */", in(reg) core::ptr::from_mut(vmcb), options(nostack, preserves_flags));
        }
        #[cfg(not(target_os = "none"))]
        {
            let _ = (vmcb, at, gprs, spec);
            unreachable!("no world switch outside the kernel");
        }
    }
}
