//! From EXITCODE and EXITINFO to the neutral [`Exit`].
//!
//! APM vol. 2 appendix C. The comparison chain is ordered by how often an exit is seen, because
//! kernel code is built without jump tables. The inner loop has one of its own, in
//! [`dispatch`](backend::Turn::dispatch).

use backend::{
    CrAccess, DrAccess, Event, Exit, Exits, Gprs, IoExit, PageFault, TableAccess, TaskSource,
    TaskSwitchExit, TdpFault,
};
use cpu::Cpu;
use x86::{
    Direction, Exception, Gpa, Gva, Vector,
    vmcb::{self, Clean, Control, ExitCode, event, ioio, npf},
};

use crate::{features::Features, inject, state::Svm};

/// The last of the EXITCODEs that are accesses of control registers, the first being 0.
pub(crate) const LAST_OF_CR: u64 = ExitCode::WriteCr15.0;

/// Decodes the exit in `control`, made by a CPU with these features.
pub fn decode(control: &Control, features: &Features) -> Exit {
    let code = ExitCode(control.exit_code);
    match code {
        ExitCode::Intr => Exit::Interrupt,
        ExitCode::Cpuid => Exit::Cpuid,
        ExitCode::Msr if control.exit_info_1 & 1 == 0 => Exit::Rdmsr,
        ExitCode::Msr => Exit::Wrmsr,
        ExitCode::Npf => npf(control),
        ExitCode::Ioio => io(control),
        ExitCode::Hlt => Exit::Hlt,
        ExitCode::Vmmcall => Exit::Hypercall,
        ExitCode::ExcpPf => page_fault(control),
        _ => rare(control, code, features),
    }
}

#[inline(always)]
pub(crate) fn npf(control: &Control) -> Exit {
    let info = control.exit_info_1;
    Exit::TdpFault(TdpFault {
        gpa: Gpa(control.exit_info_2),
        present: info & 1 != 0,
        write: info & 2 != 0,
        reserved: info & 8 != 0,
        fetch: info & 16 != 0,
        final_access: info & npf::TABLE == 0,
    })
}

#[inline(always)]
pub(crate) fn io(control: &Control) -> Exit {
    let info = control.exit_info_1;
    Exit::Io(IoExit {
        port: (info >> ioio::PORT_SHIFT) as u16,
        // One bit of three is set, and its value is the number of bytes.
        size: ((info >> ioio::SIZE_SHIFT) & 7) as u8,
        input: info & ioio::IN != 0,
        string: info & ioio::STRING != 0,
        rep: info & ioio::REP != 0,
        // Told for I/O by every CPU, with NRIP save or not (APM vol. 2 §15.10.2).
        next_rip: control.exit_info_2,
    })
}

#[inline(always)]
pub(crate) fn page_fault(control: &Control) -> Exit {
    let (address, code) = (Gva(control.exit_info_2), control.exit_info_1 as u32);
    Exit::PageFault(PageFault { address, code })
}

/// An access of a control register, by MOV or otherwise.
#[inline(always)]
pub(crate) fn cr_access<C: Cpu>(svm: &Svm<C>) -> Exit {
    let control = &svm.vmcb().control;
    let raw = match ExitCode(control.exit_code) {
        ExitCode::Cr0SelWrite => ExitCode::WriteCr0.0,
        ExitCode(raw) => raw,
    };
    cr(control, (raw & 0xf) as u8, Direction::write_if(raw >= 0x10), &svm.features)
}

#[cold]
#[inline(never)]
fn rare(control: &Control, code: ExitCode, features: &Features) -> Exit {
    let raw = code.0;
    if raw <= LAST_OF_CR {
        return cr(control, (raw & 0xf) as u8, Direction::write_if(raw >= 0x10), features);
    }
    match code {
        ExitCode::Vintr => Exit::InterruptWindow,
        ExitCode::Cr0SelWrite => cr(control, 0, Direction::Write, features),
        ExitCode::Pause => Exit::Pause,
        ExitCode::Wbinvd | ExitCode::Invd => Exit::CacheFlush,
        ExitCode::Xsetbv => Exit::Xsetbv,
        ExitCode::Nmi => Exit::Nmi,
        // Both are the host's: it takes them as soon as GIF is set.
        ExitCode::Smi | ExitCode::Init => Exit::HostSignal,
        ExitCode::Iret => Exit::Iret,
        ExitCode::Rsm => Exit::Rsm,
        ExitCode::Rdpmc => Exit::Rdpmc,
        ExitCode::Invlpg => {
            Exit::Invlpg(features.decode_assists.then_some(Gva(control.exit_info_1)))
        }
        ExitCode::Invpcid => Exit::Invpcid,
        ExitCode::TaskSwitch => task_switch(control),
        ExitCode::Shutdown => Exit::Shutdown,
        ExitCode::Invalid => Exit::Refused,
        ExitCode::Monitor | ExitCode::Mwait | ExitCode::MwaitConditional => Exit::Mwait,
        ExitCode::Vmrun
        | ExitCode::Vmload
        | ExitCode::Vmsave
        | ExitCode::Stgi
        | ExitCode::Clgi
        | ExitCode::Skinit
        | ExitCode::Invlpga => Exit::Virtualization,
        // Instructions that exit only where the guest's CPUID lacks them, or that no guest is
        // offered.
        ExitCode::Rdtscp
        | ExitCode::Rdpru
        | ExitCode::Invlpgb
        | ExitCode::Mcommit
        | ExitCode::Tlbsync
        | ExitCode::InvlpgbIllegal => Exit::Undefined,
        // INT1 leaves DR6 as it is: no bit tells of it.
        ExitCode::Icebp => Exit::Exception(Exception::db(0)),
        _ => match raw {
            0x20..=0x3f => Exit::DebugReg(DrAccess { dr: (raw & 7) as u8, write: raw >= 0x30 }),
            // #MC, which is the host's whatever the guest has set up.
            0x52 => Exit::MachineCheck,
            0x40..=0x5f => Exit::Exception(Exception {
                vector: Vector((raw - 0x40) as u8),
                // EXITINFO1 means nothing for the others.
                error_code: matches!(raw - 0x40, 8 | 10..=14 | 17 | 21)
                    .then_some(control.exit_info_1 as u32),
                payload: None,
            }),
            // The emulator writes VMEXIT_INVALID with 32 bits.
            0xffff_ffff => Exit::Refused,
            _ => Exit::Unknown(raw),
        },
    }
}

/// APM vol. 2 §15.14.1: IRET and JMP have bits of their own, and an event says that it is one.
fn task_switch(control: &Control) -> Exit {
    let source = match control.exit_info_2 {
        info if info >> 36 & 1 != 0 => TaskSource::Iret,
        info if info >> 38 & 1 != 0 => TaskSource::Jmp,
        _ if control.exit_int_info & event::VALID != 0 => TaskSource::Gate,
        _ => TaskSource::Call,
    };
    Exit::TaskSwitch(TaskSwitchExit { selector: control.exit_info_1 as u16, source })
}

#[inline(always)]
fn cr(control: &Control, cr: u8, direction: Direction, features: &Features) -> Exit {
    // Bit 63 is set for MOV and clear for LMSW, CLTS and SMSW (APM vol. 2 §15.8.1).
    let tells = features.decode_assists && control.exit_info_1 >> 63 != 0;
    let gpr = tells.then_some((control.exit_info_1 & 0xf) as u8);
    Exit::Cr(CrAccess { cr, write: direction.is_write(), gpr })
}

impl<C: Cpu> Exits for Svm<C> {
    type Raw = ExitCode;

    /// The VMCB's registers are undefined after a shutdown (APM vol. 2 §15.14.3).
    const KEEPS_STATE_AT_SHUTDOWN: bool = false;
    const HYPERCALL: u8 = 0xd9;
    const HAS_LEGACY_SYSCALL: bool = true;

    #[inline(always)]
    fn raw(&self) -> ExitCode {
        ExitCode(self.vmcb().control.exit_code)
    }

    fn exit(&self) -> Exit {
        decode(&self.vmcb().control, &self.features)
    }

    fn exit_raw(&self) -> [u64; 3] {
        let c = &self.vmcb().control;
        [c.exit_code, c.exit_info_1, c.exit_info_2]
    }

    fn exit_record(&self) -> (u64, [u64; 2], u32, u32) {
        let c = &self.vmcb().control;
        let (event, error) = (c.exit_int_info as u32, (c.exit_int_info >> 32) as u32);
        (c.exit_code, [c.exit_info_1, c.exit_info_2], event, error)
    }

    fn table_access(&self, _: &Gprs) -> Option<TableAccess> {
        // None of them is intercepted.
        None
    }

    #[inline]
    fn was_delivering(&self) -> bool {
        self.vmcb().control.exit_int_info & vmcb::event::VALID != 0
    }

    fn interrupted_delivery(&self) -> Option<Event> {
        inject::decode(self.vmcb().control.exit_int_info)
    }

    fn forget_interrupted_delivery(&mut self) {
        self.vmcb_mut(Clean::empty()).control.exit_int_info = 0;
    }

    fn distrust_refused(&mut self) {
        self.block.mark(Clean::ALL);
    }

    /// A CPU with SVM runs guests in every mode.
    #[inline(always)]
    fn is_interpreted(&self) -> bool {
        false
    }
}
