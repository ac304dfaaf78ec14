//! Exit reasons; named as in the manual, where each is explained.
#![allow(missing_docs)]

/// Why the guest exited (SDM vol. 3C appendix C): the basic reason, bits 15:0 of the field. Any
/// value can be held, known or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ExitReason(pub u16);

/// Bit of the exit-reason field: the guest was not entered.
pub const ENTRY_FAILURE: u32 = 1 << 31;

#[allow(non_upper_case_globals)] // Read like the variants of an enum.
impl ExitReason {
    pub const ExceptionOrNmi: Self = Self(0);
    pub const ExternalInterrupt: Self = Self(1);
    pub const TripleFault: Self = Self(2);
    pub const Init: Self = Self(3);
    pub const Sipi: Self = Self(4);
    pub const IoSmi: Self = Self(5);
    pub const OtherSmi: Self = Self(6);
    pub const InterruptWindow: Self = Self(7);
    pub const NmiWindow: Self = Self(8);
    pub const TaskSwitch: Self = Self(9);
    pub const Cpuid: Self = Self(10);
    pub const Getsec: Self = Self(11);
    pub const Hlt: Self = Self(12);
    pub const Invd: Self = Self(13);
    pub const Invlpg: Self = Self(14);
    pub const Rdpmc: Self = Self(15);
    pub const Rdtsc: Self = Self(16);
    pub const Rsm: Self = Self(17);
    pub const Vmcall: Self = Self(18);
    pub const Vmclear: Self = Self(19);
    pub const Vmlaunch: Self = Self(20);
    pub const Vmptrld: Self = Self(21);
    pub const Vmptrst: Self = Self(22);
    pub const Vmread: Self = Self(23);
    pub const Vmresume: Self = Self(24);
    pub const Vmwrite: Self = Self(25);
    pub const Vmxoff: Self = Self(26);
    pub const Vmxon: Self = Self(27);
    pub const CrAccess: Self = Self(28);
    pub const DrAccess: Self = Self(29);
    pub const Io: Self = Self(30);
    pub const Rdmsr: Self = Self(31);
    pub const Wrmsr: Self = Self(32);
    pub const InvalidGuestState: Self = Self(33);
    pub const MsrLoading: Self = Self(34);
    pub const Mwait: Self = Self(36);
    pub const MonitorTrap: Self = Self(37);
    pub const Monitor: Self = Self(39);
    pub const Pause: Self = Self(40);
    pub const MachineCheck: Self = Self(41);
    pub const TprBelowThreshold: Self = Self(43);
    pub const ApicAccess: Self = Self(44);
    pub const VirtualizedEoi: Self = Self(45);
    pub const GdtrIdtr: Self = Self(46);
    pub const LdtrTr: Self = Self(47);
    pub const EptViolation: Self = Self(48);
    pub const EptMisconfiguration: Self = Self(49);
    pub const Invept: Self = Self(50);
    pub const Rdtscp: Self = Self(51);
    pub const PreemptionTimer: Self = Self(52);
    pub const Invvpid: Self = Self(53);
    pub const Wbinvd: Self = Self(54);
    pub const Xsetbv: Self = Self(55);
    pub const ApicWrite: Self = Self(56);
    pub const Rdrand: Self = Self(57);
    pub const Invpcid: Self = Self(58);
    pub const Vmfunc: Self = Self(59);
    pub const Encls: Self = Self(60);
    pub const Rdseed: Self = Self(61);
    pub const PmlFull: Self = Self(62);
    pub const Xsaves: Self = Self(63);
    pub const Xrstors: Self = Self(64);
    pub const Umwait: Self = Self(67);
    pub const Tpause: Self = Self(68);
    pub const BusLock: Self = Self(74);
    pub const Notify: Self = Self(75);

    /// The basic reason in the exit-reason field.
    #[inline]
    pub const fn of(field: u32) -> Self {
        // The upper half has flags, of which that of a failed entry is looked at before.
        Self(field as u16)
    }
}
