//! Commands of a vCPU file (KVM API §4, "vcpu ioctl").

use super::ops::{VcpuFile, VcpuOps};
use super::{Reply, UNKNOWN, lists, nested, run, state};
use crate::errno::Errno;
use crate::run_page::RunPage;
use crate::uapi::ioctl;

/// A command of a vCPU file. `EIO` from another process than the one that made the VM; two threads
/// on one vCPU wait for each other.
pub fn vcpu<F: VcpuFile>(file: &F, cmd: u32, arg: u64) -> Reply {
    if !file.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    // What is no command of KVM at all need not wait for a guest that runs.
    if ioctl::type_of(cmd) != ioctl::KVMIO {
        return Err(UNKNOWN);
    }
    let mut guard = file.lock()?;
    let vcpu = &mut *guard;
    if cmd == ioctl::RUN {
        let (page, io_page) = (RunPage::new(file.run_page()), RunPage::new(file.io_page()));
        return run::run(vcpu, page, io_page, arg);
    }
    locked(vcpu, cmd, arg)
}

/// Everything but KVM_RUN.
#[inline(never)]
fn locked<V: VcpuOps>(vcpu: &mut V, cmd: u32, arg: u64) -> Reply {
    let done = match cmd {
        ioctl::GET_MSRS => return lists::get_msrs(arg, |index| vcpu.msr(index)),
        ioctl::SET_MSRS => return lists::set_msrs(arg, |index, value| vcpu.set_msr(index, value)),
        ioctl::GET_CPUID2 => return lists::get_cpuid(arg, &vcpu.cpuid()?),
        ioctl::GET_STATS_FD => return vcpu.stats_file(),
        ioctl::GET_TSC_KHZ => return Ok(vcpu.tsc_khz() as i32),

        ioctl::GET_REGS => state::get_regs(vcpu, arg),
        ioctl::SET_REGS => state::set_regs(vcpu, arg),
        ioctl::GET_SREGS => state::get_sregs(vcpu, arg),
        ioctl::SET_SREGS => state::put_sregs(vcpu, arg),
        ioctl::GET_SREGS2 => state::get_sregs2(vcpu, arg),
        ioctl::SET_SREGS2 => state::set_sregs2(vcpu, arg),
        ioctl::GET_FPU => state::get_fpu(vcpu, arg),
        ioctl::SET_FPU => state::set_fpu(vcpu, arg),
        ioctl::GET_XSAVE => state::get_xsave(vcpu, arg),
        ioctl::GET_XSAVE2 => state::get_xsave2(vcpu, arg),
        ioctl::SET_XSAVE => state::set_xsave(vcpu, arg),
        ioctl::GET_XCRS => state::get_xcrs(vcpu, arg),
        ioctl::SET_XCRS => state::set_xcrs(vcpu, arg),
        ioctl::GET_DEBUGREGS => state::get_debugregs(vcpu, arg),
        ioctl::SET_DEBUGREGS => state::set_debugregs(vcpu, arg),
        ioctl::GET_VCPU_EVENTS => state::get_events(vcpu, arg),
        ioctl::SET_VCPU_EVENTS => state::put_events(vcpu, arg),
        ioctl::GET_MP_STATE => state::get_mp_state(vcpu, arg),
        ioctl::SET_MP_STATE => state::set_mp_state(vcpu, arg),
        ioctl::GET_LAPIC => state::get_lapic(vcpu, arg),
        ioctl::SET_LAPIC => state::set_lapic(vcpu, arg),

        ioctl::SET_CPUID => lists::read_cpuid(arg).and_then(|table| state::set_cpuid(vcpu, table)),
        ioctl::SET_CPUID2 => {
            lists::read_cpuid2(arg).and_then(|table| state::set_cpuid(vcpu, table))
        }
        ioctl::SET_TSC_KHZ => state::set_tsc_khz(vcpu, arg),
        ioctl::KVMCLOCK_CTRL => vcpu.kvmclock_ctrl(),
        ioctl::INTERRUPT => state::interrupt(vcpu, arg),
        ioctl::NMI => {
            vcpu.nmi();
            Ok(())
        }
        ioctl::SMI => {
            vcpu.smi();
            Ok(())
        }
        ioctl::SET_SIGNAL_MASK => state::set_signal_mask(vcpu, arg),
        ioctl::TRANSLATE => state::translate(vcpu, arg),
        ioctl::SET_GUEST_DEBUG => state::set_guest_debug(vcpu, arg),
        ioctl::TPR_ACCESS_REPORTING => state::tpr_access_reporting(vcpu, arg),
        ioctl::SET_VAPIC_ADDR => state::set_vapic_addr(vcpu, arg),
        ioctl::X86_SETUP_MCE => state::setup_mce(vcpu, arg),
        ioctl::X86_SET_MCE => state::set_mce(vcpu, arg),
        ioctl::HAS_DEVICE_ATTR | ioctl::GET_DEVICE_ATTR | ioctl::SET_DEVICE_ATTR
            if vcpu.offer().tsc_offset =>
        {
            state::attribute(vcpu, cmd, arg)
        }
        ioctl::ENABLE_CAP => state::enable_cap(vcpu, arg),
        ioctl::GET_NESTED_STATE => nested::get(vcpu.offer().nested_format, arg),
        ioctl::SET_NESTED_STATE => nested::set(vcpu.offer().nested_format, arg),
        _ => Err(UNKNOWN),
    };
    done.map(|()| 0)
}
