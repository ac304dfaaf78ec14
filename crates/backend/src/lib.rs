//! The border between the run loop and a hardware backend: what floor 5 asks of SVM or VMX.
//!
//! The border has parts: [`Registers`], [`ControlRegisters`], [`LiveRegisters`], [`Msrs`], [`WorldSwitch`],
//! [`Turn`], [`Exits`], [`Injection`], [`Translation`], [`Clock`], [`Permissions`] and [`Nesting`]. [`Backend`] is all of them, is
//! implemented once per instruction set, and the run loop is monomorphised over it, so nothing on the
//! exit path is an indirect call. [`Exit`] is the neutral form of an exit.
//!
//! No method has an implementation that does nothing, but for some of [`Nested`] and its kin, which one
//! instruction set alone has a use for. What only some CPUs can do is an object that is there or not
//! ([`ability`]): who has it in hand can use it.
#![no_std]
#![forbid(unsafe_code)]

pub mod ability;
mod clock;
mod control;
pub mod exit;
mod exits;
mod inject;
mod l1;
mod live;
mod msrs;
mod nested;
mod nested_paging;
mod nested_state;
mod paging;
mod permission;
mod registers;
mod turn;
mod world_switch;

pub use ability::{Absent, DeadlineWatch, PageLog, PdpteRegisters, ServedApic};
pub use clock::{Clock, TSC_RATIO_ONE, compose_ratios, scale_offset, scale_tsc};
pub use control::{ControlRegisters, ControlRegs};
pub use exit::{
    CrAccess, DrAccess, Event, Exit, IoExit, PageFault, TableAccess, TaskSource, TaskSwitchExit,
    TdpFault,
};
pub use exits::Exits;
pub use inject::{Chosen, Injection, NmiWindow};
pub use l1::{Executed, L1Memory, ListAct, ListMsr, Outside, Reach, Sleep};
pub use live::LiveRegisters;
pub use msrs::{Msrs, NotMine};
pub use nested::{
    Asleep, Claim, Enlightenment, FlushTold, Gate, Level, MonitorTrap, Nested, Nesting, TellFlush,
    Waiting,
};
pub use nested_paging::{L1Flush, L1Tables, NestedPageFault, NestedPaging, TablesRefuse};
pub use nested_state::{NestedState, Unrestorable};
pub use paging::{Paging, Translation};
pub use permission::{DebuggerWants, FewerExits, GuestLimits, Permissions};
pub use registers::{
    Gprs, RAX, RBX, RCX, RDI, RDX, RSI, RSP, Registers, SegmentName, ShadowBy, reset_registers,
};
pub use turn::{Answer, Turn};
pub use world_switch::{Onward, WorldSwitch};

/// A hardware backend: one virtual CPU's control block and the world switch.
///
/// Between [`load`](WorldSwitch::load) and [`unload`](WorldSwitch::unload) interrupts are held off; while
/// the guest's segment state is loaded no per-CPU data of the host may be touched (see
/// [`host_segments`](WorldSwitch::host_segments)).
pub trait Backend:
    Registers
    + ControlRegisters
    + LiveRegisters
    + Msrs
    + WorldSwitch
    + Turn
    + Exits
    + Injection
    + Translation
    + Clock
    + Permissions
    + Nesting
    + Send
    + Sized
{
    /// Sets the state after INIT or power-up.
    fn reset(&mut self, reset: x86::Reset);
}
