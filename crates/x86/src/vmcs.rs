//! The VMCS: its fields with their width and access in the type, the control bits, the formats of
//! events, and why a guest exited. Capability MSRs are in [`capability`].
//!
//! SDM vol. 3C chapters 25 to 28, appendices A to C.

mod apic_access;
pub mod capability;
pub mod controls;
pub mod enlightened;
mod exit_reason;
pub mod field;
mod group;
mod instruction_error;
pub mod place;

pub use apic_access::ApicAccess;
pub use controls::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2};
pub use exit_reason::{ENTRY_FAILURE, ExitReason};
pub use field::{Field, Natural, ReadOnly, ReadWrite, Tagging, Width};
pub use group::{Group, Groups, Place, Shadow};
pub use instruction_error::InstructionError;

/// Format of the entry-interruption, exit-interruption and IDT-vectoring information
/// (SDM vol. 3C §25.8.3, §25.9.2, §25.9.3).
pub mod event {
    /// The vector, bits 7:0.
    pub const VECTOR: u32 = 0xff;
    /// Mask of the type, in place.
    pub const TYPE: u32 = 7 << 8;
    /// The type: an external interrupt.
    pub const INTR: u32 = 0 << 8;
    /// The type: an NMI.
    pub const NMI: u32 = 2 << 8;
    /// The type: a hardware exception.
    pub const EXCEPTION: u32 = 3 << 8;
    /// The type: INT n, a software interrupt.
    pub const SOFT: u32 = 4 << 8;
    /// The type: INT1, a privileged software exception.
    pub const PRIVILEGED_SOFT_EXCEPTION: u32 = 5 << 8;
    /// INT3 and INTO.
    pub const SOFT_EXCEPTION: u32 = 6 << 8;
    /// An error code is there.
    pub const ERROR_VALID: u32 = 1 << 11;
    /// Exit information: an IRET had ended the blocking of NMIs when it faulted.
    // The IRET that faulted has ended the mask already: it has to be put back before it is done
    // again.
    pub const NMI_UNBLOCKED: u32 = 1 << 12;
    /// The information is valid.
    pub const VALID: u32 = 1 << 31;
    /// What the three formats have in common.
    pub const WHOLE: u32 = VALID | ERROR_VALID | TYPE | VECTOR;
}

/// Bits of the guest's interruptibility state (SDM vol. 3C table 25-3).
pub mod interruptibility {
    /// Blocking by STI.
    pub const STI: u32 = 1 << 0;
    /// Blocking by MOV SS or POP SS.
    pub const MOV_SS: u32 = 1 << 1;
    /// Blocking by SMI.
    pub const SMI: u32 = 1 << 2;
    /// Blocking by NMI; with virtual NMIs, of virtual ones.
    pub const NMI: u32 = 1 << 3;
}

/// Exit qualification of a port access (SDM vol. 3C table 28-5).
pub mod io {
    /// Bytes less one.
    pub const SIZE: u64 = 7;
    /// IN rather than OUT.
    pub const IN: u64 = 1 << 3;
    /// INS or OUTS.
    pub const STRING: u64 = 1 << 4;
    /// The instruction has a REP prefix.
    pub const REP: u64 = 1 << 5;
    /// Shift of the port.
    pub const PORT_SHIFT: u32 = 16;
}

/// Exit qualification of a control-register access (SDM vol. 3C table 28-3).
pub mod cr {
    /// Number of the register.
    pub const NUMBER: u64 = 0xf;
    /// Shift of the type of access.
    pub const ACCESS_SHIFT: u32 = 4;
    /// Mask of the type, in place.
    pub const ACCESS: u64 = 3 << ACCESS_SHIFT;
    /// MOV to the register.
    pub const MOV_TO: u64 = 0 << ACCESS_SHIFT;
    /// MOV from the register.
    pub const MOV_FROM: u64 = 1 << ACCESS_SHIFT;
    /// CLTS, which clears CR0.TS.
    pub const CLTS: u64 = 2 << ACCESS_SHIFT;
    /// LMSW, which writes CR0's low bits.
    pub const LMSW: u64 = 3 << ACCESS_SHIFT;
    /// Shift of the general register.
    // The register is named by the exit: no instruction has to be fetched.
    pub const GPR_SHIFT: u32 = 8;
}

/// Exit qualification of a debug-register access (SDM vol. 3C table 28-4).
pub mod dr {
    /// Number of the register.
    pub const NUMBER: u64 = 7;
    /// MOV from the register rather than to it.
    pub const MOV_FROM: u64 = 1 << 4;
}

/// Exit qualification of an EPT violation (SDM vol. 3C table 28-7).
pub mod ept_violation {
    /// The access was a read.
    pub const READ: u64 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u64 = 1 << 1;
    /// An instruction fetch.
    pub const FETCH: u64 = 1 << 2;
    /// The entries allow reads.
    pub const READABLE: u64 = 1 << 3;
    /// The entries allow writes.
    pub const WRITABLE: u64 = 1 << 4;
    /// The entries allow fetches.
    pub const EXECUTABLE: u64 = 1 << 5;
    /// The guest linear address is valid.
    // Clear where no linear address led to the access, as for the PDPTEs of a MOV to CR3.
    pub const LINEAR_VALID: u64 = 1 << 7;
    /// With a valid linear address: the access was to its translation and not to a paging entry.
    pub const FINAL: u64 = 1 << 8;
    /// An IRET had ended the blocking of NMIs when it faulted.
    pub const NMI_UNBLOCKED: u64 = 1 << 12;
}

/// Access rights of a segment register (SDM vol. 3C table 25-2).
pub mod access_rights {
    /// The bits that lie where a descriptor's byte 5 has them: type, S, DPL, P.
    pub const LOW: u32 = 0xff;
    /// How far AVL, L, D/B and G lie above where [`crate::segment::attr`] has them.
    pub const HIGH_SHIFT: u32 = 4;
    /// The register cannot be used.
    // VMX has a bit for it where SVM takes P: a null segment may be present in its other bits.
    pub const UNUSABLE: u32 = 1 << 16;
}

/// Bits of an EPT pointer (SDM vol. 3C table 25-9).
pub mod eptp {
    /// Memory type of the tables: write-back.
    pub const WRITE_BACK: u64 = 6;
    /// The tables have four levels.
    pub const LEVELS_4: u64 = 3 << 3;
    /// Accessed and dirty flags.
    // With it the CPU's own walks of the guest's tables are writes to EPT.
    pub const ACCESSED_DIRTY: u64 = 1 << 6;
}

/// Kinds of INVEPT (SDM vol. 3C §31.3).
pub mod invept {
    /// One EPT pointer.
    pub const SINGLE: u64 = 1;
    /// The translations of all EPT pointers.
    // Of all roots: what is left to a CPU that cannot flush one alone.
    pub const ALL: u64 = 2;
}

/// Kinds of INVVPID (SDM vol. 3C §31.3).
pub mod invvpid {
    /// One address of one VPID.
    pub const ADDRESS: u64 = 0;
    /// All translations of one VPID.
    pub const SINGLE: u64 = 1;
    /// All but VPID 0.
    pub const ALL: u64 = 2;
    /// One VPID, but its global translations.
    pub const SINGLE_NON_GLOBAL: u64 = 3;
}
