//! Registers that are live in the CPU beside the control block: debug registers and extended state.

/// Debug registers, XCR0, IA32_XSS and PKRU.
pub trait LiveRegisters {
    /// DR0 to DR3, DR6, DR7.
    fn debug_regs(&self) -> [u64; 6];
    /// Sets DR0 to DR3, DR6, DR7.
    fn set_debug_regs(&mut self, regs: [u64; 6]);
    /// The guest touched a debug register: lets it own them until the loop is left, or longer
    /// where it has a breakpoint.
    fn own_debug_regs(&mut self);
    /// Has the guest's access to its debug registers exit, though the hardware's hold something.
    fn watch_debug_regs(&mut self, on: bool);

    /// The guest's XCR0.
    fn xcr0(&self) -> u64;
    /// Sets the guest's XCR0; the value was validated.
    fn set_xcr0(&mut self, value: u64);
    /// The guest's IA32_XSS.
    fn xss(&self) -> u64;
    /// Sets the guest's IA32_XSS; the value was validated.
    fn set_xss(&mut self, value: u64);
    /// The guest's PKRU.
    fn pkru(&self) -> u32;
    /// Sets the guest's PKRU.
    fn set_pkru(&mut self, value: u32);
}
