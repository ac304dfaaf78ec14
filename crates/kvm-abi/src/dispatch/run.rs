//! KVM_RUN (KVM API §4.10, §5, §6 on KVM_CAP_SYNC_REGS).

use super::Reply;
use super::ops::{VcpuOps, has_lapic};
use super::state;
use crate::errno::Errno;
use crate::exit::UserExit;
use crate::run_page::{RunPage, SYNC_EVENTS, SYNC_REGS, SYNC_SREGS};
use crate::uapi::registers::{KvmRegs, KvmSregs};
use crate::uapi::run::*;
use crate::uapi::vcpu_state::KvmVcpuEvents;

/// Runs the guest and shows in the page why it stopped.
pub fn run<V: VcpuOps>(vcpu: &mut V, page: RunPage<'_>, io_page: RunPage<'_>, arg: u64) -> Reply {
    if arg != 0 {
        return Err(Errno::EINVAL);
    }
    let (wanted, changed) = page.shared_registers();
    if wanted | changed != 0 {
        take_registers(vcpu, page, wanted, changed)?;
    }
    let own_cr8 = !has_lapic(vcpu.irqchip());
    let Some(input) = page.input(own_cr8) else {
        return Err(Errno::EINVAL);
    };
    *vcpu.io_data() = io_page.first();
    vcpu.answer_msr(|| page.msr_answer());
    let exit = vcpu.run(&input);
    if let UserExit::Io { write: true, .. } = exit {
        io_page.set_first(*vcpu.io_data());
    }
    if wanted != 0 {
        show_registers(vcpu, page, wanted);
    }
    page.show(&exit, &vcpu.run_output(), vcpu.error_data());
    match exit {
        UserExit::Intr | UserExit::Immediate => Err(Errno::EINTR),
        UserExit::Again => Err(Errno::EAGAIN),
        UserExit::MemoryFault { .. } => Err(Errno::EFAULT),
        UserExit::Dead => Err(Errno::EIO),
        UserExit::Io { .. }
        | UserExit::Mmio { .. }
        | UserExit::Hlt
        | UserExit::Msr { .. }
        | UserExit::Shutdown
        | UserExit::FailEntry { .. }
        | UserExit::InternalError { .. }
        | UserExit::IrqWindowOpen
        | UserExit::SetTpr
        | UserExit::Exception { .. }
        | UserExit::Debug { .. }
        | UserExit::IoapicEoi { .. } => Ok(0),
    }
}

/// Takes the registers that the VMM changed in the page.
#[cold]
#[inline(never)]
fn take_registers<V: VcpuOps>(
    vcpu: &mut V,
    page: RunPage<'_>,
    wanted: u64,
    changed: u64,
) -> Result<(), Errno> {
    if (wanted | changed) & !SYNC_X86_VALID_FIELDS != 0 {
        return Err(Errno::EINVAL);
    }
    if changed & SYNC_X86_REGS != 0 {
        vcpu.set_regs(&page.read::<KvmRegs>(SYNC_REGS))?;
    }
    if changed & SYNC_X86_SREGS != 0 {
        let sregs = page.read::<KvmSregs>(SYNC_SREGS);
        state::set_sregs(vcpu, &sregs)?;
    }
    if changed & SYNC_X86_EVENTS != 0 {
        state::set_events(vcpu, page.read::<KvmVcpuEvents>(SYNC_EVENTS))?;
    }
    page.clear_dirty_registers();
    Ok(())
}

/// Puts the registers that the VMM wants to see into the page.
#[cold]
#[inline(never)]
fn show_registers<V: VcpuOps>(vcpu: &mut V, page: RunPage<'_>, wanted: u64) {
    if wanted & SYNC_X86_REGS != 0 {
        page.write(SYNC_REGS, &vcpu.regs());
    }
    if wanted & SYNC_X86_SREGS != 0 {
        page.write(SYNC_SREGS, &state::sregs(vcpu));
    }
    if wanted & SYNC_X86_EVENTS != 0 {
        page.write(SYNC_EVENTS, &vcpu.events());
    }
}
