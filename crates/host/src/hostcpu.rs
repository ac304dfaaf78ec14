//! The host CPU's own settings that a guest's run displaces: SPEC_CTRL, IA32_XSS, debug
//! registers, and what the kernel decided about mitigations.

#[cfg(target_os = "none")]
mod port {
    unsafe extern "C" {
        pub fn gnt_ibpb_on_switch() -> bool;
        pub fn gnt_host_spec_ctrl() -> u64;
        pub fn gnt_host_xss() -> u64;
        pub fn gnt_restore_debug_regs();
        pub fn gnt_machine_check();
        pub fn gnt_uses_ldt() -> bool;
    }
}

#[cfg(not(target_os = "none"))]
mod port {
    pub unsafe fn gnt_ibpb_on_switch() -> bool {
        false
    }
    pub unsafe fn gnt_host_spec_ctrl() -> u64 {
        0
    }
    pub unsafe fn gnt_host_xss() -> u64 {
        0
    }
    pub unsafe fn gnt_restore_debug_regs() {}
    pub unsafe fn gnt_machine_check() {}
    pub unsafe fn gnt_uses_ldt() -> bool {
        crate::std_port::test::uses_ldt()
    }
}

/// Whether this kernel wants an IBPB when another vCPU ran last on a CPU.
#[inline]
pub fn ibpb_on_switch() -> bool {
    // SAFETY: reads a feature bit.
    unsafe { port::gnt_ibpb_on_switch() }
}

/// SPEC_CTRL as the kernel keeps it on this CPU. Interrupts are off.
#[inline]
pub fn host_spec_ctrl() -> u64 {
    // SAFETY: reads a per-CPU variable.
    unsafe { port::gnt_host_spec_ctrl() }
}

/// IA32_XSS as the kernel set it.
#[inline]
pub fn host_xss() -> u64 {
    // SAFETY: reads a value that was recorded at load.
    unsafe { port::gnt_host_xss() }
}

/// Gives the host its debug registers back, where it has breakpoints. Interrupts are off.
#[inline]
pub fn restore_debug_regs() {
    // SAFETY: the kernel's own routine, called where it calls it after a VM exit itself.
    unsafe { port::gnt_restore_debug_regs() }
}

/// Lets the kernel handle a machine check that an exit reported. Interrupts are off.
pub fn machine_check() {
    // SAFETY: the kernel's own handler, on the CPU where the machine check was raised.
    unsafe { port::gnt_machine_check() }
}

/// Whether the current process has a local descriptor table, which another of its threads may
/// replace at any time (modify_ldt). Interrupts are off: from here on a change comes with an IPI.
#[inline]
pub fn uses_ldt() -> bool {
    // SAFETY: reads a pointer of the current address space.
    unsafe { port::gnt_uses_ldt() }
}
