//! The host CPU's own settings that a guest's run displaces: SPEC_CTRL, IA32_XSS, debug
//! registers, and what the kernel decided about mitigations.

#[cfg(target_os = "none")]
mod port {
    // Each reads what the kernel has on this CPU, or calls the kernel's own routine, in the context that its
    // wrapper names; what has an argument takes any.
    unsafe extern "C" {
        pub safe fn gnt_ibpb_on_switch() -> bool;
        pub safe fn gnt_refill_return_stack();
        pub safe fn gnt_host_spec_ctrl() -> u64;
        pub safe fn gnt_host_xss() -> u64;
        pub safe fn gnt_restore_debug_regs();
        pub safe fn gnt_host_debugctl() -> u64;
        pub safe fn gnt_machine_check();
        pub safe fn gnt_uses_ldt() -> bool;
        pub safe fn gnt_detects_split_locks() -> bool;
        pub safe fn gnt_guest_split_lock(rip: u64) -> bool;
        pub safe fn gnt_vmx_allowed() -> bool;
        pub safe fn gnt_kernel_features(leaf: u32, subleaf: u32, reg: u32) -> u32;
        pub safe fn gnt_vmx_left();
        pub safe fn gnt_perf_enter(global_ctrl: &mut u64) -> bool;
        pub safe fn gnt_perf_leave();
        pub safe fn gnt_watch_user_return() -> bool;
        pub safe fn gnt_host_tables(out: &mut super::HostTables);
        pub safe fn gnt_guest_ssbd(on: bool);
    }
}

#[cfg(not(target_os = "none"))]
mod port {
    pub fn gnt_ibpb_on_switch() -> bool {
        crate::std_port::test::ibpb_on_switch()
    }
    pub fn gnt_refill_return_stack() {
        crate::std_port::test::refill_return_stack();
    }
    pub fn gnt_host_spec_ctrl() -> u64 {
        0
    }
    pub fn gnt_host_xss() -> u64 {
        0
    }
    pub fn gnt_restore_debug_regs() {}
    pub fn gnt_host_debugctl() -> u64 {
        crate::std_port::test::host_debugctl()
    }
    pub fn gnt_machine_check() {}
    pub fn gnt_uses_ldt() -> bool {
        crate::std_port::test::uses_ldt()
    }
    pub fn gnt_detects_split_locks() -> bool {
        crate::std_port::test::split_locks().is_some()
    }
    pub fn gnt_guest_split_lock(_: u64) -> bool {
        crate::std_port::test::split_locks() == Some(true)
    }
    pub fn gnt_vmx_allowed() -> bool {
        true
    }
    pub fn gnt_kernel_features(_: u32, _: u32, _: u32) -> u32 {
        u32::MAX
    }
    pub fn gnt_vmx_left() {}
    pub fn gnt_perf_enter(global_ctrl: &mut u64) -> bool {
        let Some(value) = crate::std_port::test::perf_enter() else { return false };
        *global_ctrl = value;
        true
    }
    pub fn gnt_perf_leave() {
        crate::std_port::test::perf_leave();
    }
    pub fn gnt_watch_user_return() -> bool {
        crate::std_port::test::watch_user_return()
    }
    pub fn gnt_host_tables(_: &mut super::HostTables) {}
    pub fn gnt_guest_ssbd(on: bool) {
        crate::std_port::test::guest_ssbd(on);
    }
}

/// Whether this kernel wants an IBPB when another vCPU ran last on a CPU.
#[inline]
pub fn ibpb_on_switch() -> bool {
    port::gnt_ibpb_on_switch()
}

/// Behind an IBPB, where that leaves the return stack as it is (some AMD CPUs): fills it with what leads nowhere.
#[inline]
pub fn refill_return_stack() {
    port::gnt_refill_return_stack()
}

/// SPEC_CTRL as the kernel keeps it on this CPU. Interrupts are off.
#[inline]
pub fn host_spec_ctrl() -> u64 {
    port::gnt_host_spec_ctrl()
}

/// IA32_XSS as the kernel set it.
#[inline]
pub fn host_xss() -> u64 {
    port::gnt_host_xss()
}

/// Gives the host its debug registers back, where it has breakpoints. Interrupts are off.
#[inline]
pub fn restore_debug_regs() {
    port::gnt_restore_debug_regs()
}

/// The host's DEBUGCTL, where it may be anything but 0: the kernel detects bus locks by it, and steps its own thread from branch
/// to branch. Interrupts are off.
#[inline]
pub fn host_debugctl() -> u64 {
    port::gnt_host_debugctl()
}

/// Before guests of VMX run on this CPU, with interrupts off: stops the host's performance counters that are not
/// to count them, and sampling into the host's memory. What IA32_PERF_GLOBAL_CTRL has to be at every
/// entry then; [`perf_leave`] undoes it.
#[inline]
pub fn perf_enter() -> Option<u64> {
    let mut global_ctrl = 0;
    port::gnt_perf_enter(&mut global_ctrl).then_some(global_ctrl)
}

/// Starts again what [`perf_enter`] stopped. On the same CPU.
pub fn perf_leave() {
    port::gnt_perf_leave()
}

/// Whether the kernel makes the CPU raise #AC for a locked access of two cache lines, its guests' as well.
pub fn detects_split_locks() -> bool {
    port::gnt_detects_split_locks()
}

/// The guest of this thread made a locked access of two cache lines at `rip`. True: the kernel has warned, and
/// lets this task go on without the detection; else the task gets a signal. May sleep.
pub fn guest_split_lock(rip: u64) -> bool {
    port::gnt_guest_split_lock(rip)
}

/// Lets the kernel handle a machine check that an exit reported. Interrupts are off.
pub fn machine_check() {
    port::gnt_machine_check()
}

/// A guest that wants no speculative store bypass is about to run on this CPU, or has run: does what
/// this CPU has for it, if that is not SPEC_CTRL, and gives the thread back what it had. Interrupts
/// are off.
pub fn guest_ssbd(on: bool) {
    port::gnt_guest_ssbd(on)
}

/// Whether the current process has a local descriptor table, which another of its threads may
/// replace at any time (modify_ldt). Interrupts are off: from here on a change comes with an IPI.
#[inline]
pub fn uses_ldt() -> bool {
    port::gnt_uses_ldt()
}

/// Where this CPU's descriptor tables and task-state segment lie: what a VM exit loads. Constant
/// while the CPU is online. Mirrors `struct gnt_host_tables`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HostTables {
    /// Base of the GDT.
    pub gdt: u64,
    /// Base of the IDT.
    pub idt: u64,
    /// Base of the task-state segment.
    pub task: u64,
    /// The selector in CS.
    pub cs: u16,
    /// The selector in SS.
    pub ss: u16,
    /// The selector in TR.
    pub tr: u16,
    /// Fills the struct up to eight bytes.
    pub reserved: u16,
}

const _: () = assert!(size_of::<HostTables>() == 32);

/// The tables of the CPU this runs on, which the caller keeps the task on.
pub fn host_tables() -> HostTables {
    let mut tables = HostTables::default();
    port::gnt_host_tables(&mut tables);
    tables
}

/// Whether the kernel found VMX allowed by the firmware, which it looks at when a CPU comes up:
/// outside SMX, or inside where it was launched by Intel TXT.
pub fn vmx_allowed() -> bool {
    port::gnt_vmx_allowed()
}

/// Brings back what every VM exit changes: the limits of GDT and TSS, which become the widest ones
/// (SDM vol. 3C §28.5.2), and DR7, where the host has breakpoints. Interrupts are off; before user
/// space or another task runs.
#[inline]
pub fn left_vmx() {
    port::gnt_vmx_left()
}

/// Has the kernel call `gannet_user_return` before this CPU runs user space again. `false`: it cannot.
/// Interrupts are off.
#[inline]
pub fn watch_user_return() -> bool {
    port::gnt_watch_user_return()
}

/// CPUID's answer `answer` without the features that the kernel has found, or was told, not to use.
pub fn without_unused_features(leaf: u32, subleaf: u32, answer: [u32; 4]) -> [u32; 4] {
    let kept = |reg| port::gnt_kernel_features(leaf, subleaf, reg);
    let [eax, ebx, ecx, edx] = answer;
    [eax & kept(0), ebx & kept(1), ecx & kept(2), edx & kept(3)]
}
