//! The commands of each kind of file, from the table.

use host::file::Pointers;

use super::ops::{SystemOps, VcpuFile, VcpuOps, VmOps};
use super::state::Attribute;
use super::system::{
    attribute, create_vm, emulated_cpuid, get_attribute, hyperv_cpuid, without_argument,
};
use super::vm::{
    create_device, create_vcpu, set_boot_cpu_id, set_clock, set_identity_map_addr,
    set_nr_mmu_pages, set_tsc_khz, set_tss_addr, vm_extension,
};
use super::{Done, Reply, interrupts, lists, memory, msr_filter, nested, run, setting, state};
use crate::caps::{API_VERSION, check_extension};
use crate::errno::Errno;
use crate::run_page::RunPage;
use crate::uapi::ioctl;
use crate::uapi::irqchip::PIT_SPEAKER_DUMMY;
use crate::uapi::registers::{KvmFpu, KvmRegs};
use crate::uapi::run::VCPU_MMAP_SIZE;
use crate::uapi::vcpu_state::KvmMpState;
use crate::user::{gives, takes};

/// What an unknown command gets.
// Of all files alike, where stock KVM differs; see the head of `dispatch`.
const UNKNOWN: Errno = Errno::ENOTTY;

/// What a handler can end with.
trait Answer {
    fn reply(self) -> Reply;
}

impl Answer for Reply {
    #[inline]
    fn reply(self) -> Reply {
        self
    }
}

impl Answer for Done {
    #[inline]
    fn reply(self) -> Reply {
        self.map(|()| 0)
    }
}

impl Answer for () {
    #[inline]
    fn reply(self) -> Reply {
        Ok(0)
    }
}

macro_rules! dispatch {
    (
        (system: $kvm:ident, $s_arg:ident)
        $($s:ident [$($s_number:tt)*] [$($s_cap:ident),*] => $s_do:expr, $s_note:literal;)*
        (vm: $vm:ident, $v_arg:ident)
        $($v:ident [$($v_number:tt)*] [$($v_cap:ident),*] => $v_do:expr, $v_note:literal;)*
        (vm_compat: $compat:ident, $m_arg:ident)
        $($m:ident [$($m_number:tt)*] [$($m_cap:ident),*] => $m_do:expr, $m_note:literal;)*
        (run: $run:ident, $page:ident, $io_page:ident, $r_arg:ident)
        $r:ident [$($r_number:tt)*] [$($r_cap:ident),*] => $r_do:expr, $r_note:literal;
        (vcpu: $vcpu:ident, $c_arg:ident)
        $($c:ident [$($c_number:tt)*] [$($c_cap:ident),*] => $c_do:expr, $c_note:literal;)*
        (unknown)
        $($u:ident [$($u_number:tt)*] $u_note:literal;)*
    ) => {
        /// A command of /dev/kvm (KVM API §4, "system ioctl").
        pub fn system<S: SystemOps>($kvm: &S, cmd: u32, $s_arg: u64) -> Reply {
            match cmd {
                $(ioctl::$s => Answer::reply($s_do),)*
                _ => Err(UNKNOWN),
            }
        }

        fn of_vm<V: VmOps>($vm: &V, cmd: u32, $v_arg: u64) -> Reply {
            match cmd {
                $(ioctl::$v => Answer::reply($v_do),)*
                _ => Err(UNKNOWN),
            }
        }

        fn of_compat<V: VmOps>($compat: &V, cmd: u32, $m_arg: u64) -> Reply {
            match cmd {
                $(ioctl::$m => Answer::reply($m_do),)*
                // What looks alike in both worlds has one handler.
                _ => of_vm($compat, cmd, $m_arg),
            }
        }

        const RUN: u32 = ioctl::$r;

        #[inline]
        fn run_command<V: VcpuOps>(
            $run: &mut V,
            $page: RunPage<'_>,
            $io_page: RunPage<'_>,
            $r_arg: u64,
        ) -> Reply {
            $r_do
        }

        /// Everything but KVM_RUN.
        #[inline(never)]
        fn of_vcpu<V: VcpuOps>($vcpu: &mut V, cmd: u32, $c_arg: u64) -> Reply {
            match cmd {
                $(ioctl::$c => Answer::reply($c_do),)*
                _ => Err(UNKNOWN),
            }
        }
    };
}

commands!(dispatch);

/// A command of a VM file (KVM API §4, "vm ioctl"). `EIO` from another process than the one that made
/// the VM.
pub fn vm<V: VmOps>(file: &V, cmd: u32, arg: u64) -> Reply {
    // Before the command is looked at: in a forked child an unknown one is EIO, too, as on stock
    // KVM.
    if !file.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    of_vm(file, cmd, arg)
}

/// A command on a VM of a 32-bit process, whose pointers make other structures: a command with a number of
/// its own, or one of which only half of a pointer is user space's.
pub fn vm_compat<V: VmOps>(file: &V, cmd: u32, arg: u64) -> Reply {
    if !file.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    of_compat(file, cmd, arg)
}

/// A command of a vCPU file (KVM API §4, "vcpu ioctl"). `EIO` from another process than the one that
/// made the VM; two threads on one vCPU wait for each other.
pub fn vcpu<F: VcpuFile>(file: &F, cmd: u32, arg: u64) -> Reply {
    if !file.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    // What is no command of KVM at all need not wait for a guest that runs.
    if ioctl::type_of(cmd) != ioctl::KVMIO {
        return Err(UNKNOWN);
    }
    // Before the command is looked at: a vCPU's commands are in order with each other.
    let mut guard = file.lock()?;
    let vcpu = &mut *guard;
    // Apart from the others: it is called for ever, and has the two pages besides.
    if cmd == RUN {
        let (page, io_page) = (RunPage::new(file.run_page()), RunPage::new(file.io_page()));
        return run_command(vcpu, page, io_page, arg);
    }
    of_vcpu(vcpu, cmd, arg)
}
