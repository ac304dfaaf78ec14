//! What SVM keeps per physical CPU: the save areas, the ASID allocator, who ran last.
//!
//! Every field is touched only on its own CPU with interrupts off, so plain relaxed atomics do:
//! they cost what an ordinary load or store costs. Kernels from 6.5 on switch CPUs on and off with interrupts on, so
//! [`enable`] and [`disable`] turn them off.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use cpu::Cpu;
use host::{NoMemory, irq, once::Once, page::Page};
use x86::{Efer, Hpa, msr};

use crate::{Unusable, features::Features, host_state::HostRegisters, permission::IoMap};

/// One physical CPU.
#[derive(Debug)]
pub struct PerCpu {
    /// Host save area: VMRUN's own fields and, in those it leaves alone, VMSAVE's
    /// (APM vol. 2 table B-2; the two sets do not overlap).
    save: Page,
    generation: AtomicU64,
    next_asid: AtomicU32,
    /// How often the host's state was saved here. Never goes back: no two savings have the same number.
    saves: AtomicU64,
    /// The save area holds the host's state, since SVM was switched on.
    saved: AtomicBool,
    /// SVM could not be switched on when the CPU came or woke: its instructions are #UD.
    absent: AtomicBool,
    /// The vCPU that ran last here, for IBPB.
    pub(crate) last_vcpu: AtomicU64,
    /// The host's TSC_AUX.
    pub(crate) tsc_aux: AtomicU64,
    /// The host's state where VMSAVE is not to be used for it.
    pub(crate) registers: HostRegisters,
}

/// One saving of a host's state, told from every other on any CPU: what a vCPU remembers of its own, so that
/// it never loads what another thread left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Saving {
    /// The CPU.
    at: usize,
    number: u64,
}

impl Saving {
    /// None: no CPU has that number.
    pub(crate) const NONE: Self = Self { at: usize::MAX, number: 0 };
}

/// State shared by all virtual machines on this host.
#[derive(Debug)]
pub struct Machine {
    features: Features,
    io_map: IoMap,
    cpus: alloc::vec::Vec<PerCpu>,
}

static MACHINE: Once<Machine> = Once::new();

impl PerCpu {
    fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            save: Page::zeroed()?,
            // From 1: a block's 0 is no CPU's generation, so that a new one gets a number.
            generation: AtomicU64::new(1),
            // 0 is the host's (APM vol. 2 §15.16).
            next_asid: AtomicU32::new(1),
            saves: AtomicU64::new(0),
            saved: AtomicBool::new(false),
            absent: AtomicBool::new(false),
            last_vcpu: AtomicU64::new(0),
            tsc_aux: AtomicU64::new(0),
            registers: HostRegisters::default(),
        })
    }

    /// The page VMSAVE and VMLOAD use for the host.
    #[inline]
    pub fn host_save(&self) -> Hpa {
        self.save.hpa()
    }

    /// The generation in which ASIDs given out here are valid.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// The last saving on this CPU, which is number `at`.
    #[inline]
    pub(crate) fn last_saving(&self, at: usize) -> Saving {
        Saving { at, number: self.saves.load(Relaxed) }
    }

    /// The one that is made now.
    #[inline]
    pub(crate) fn next_saving(&self, at: usize) -> Saving {
        // 2^64 take longer than any CPU runs.
        self.saves.store(self.saves.load(Relaxed).wrapping_add(1), Relaxed);
        self.saved.store(true, Relaxed);
        self.last_saving(at)
    }

    /// What the save area holds is nobody's any more.
    fn forget_saving(&self) {
        let _ = self.next_saving(0);
        self.saved.store(false, Relaxed);
    }

    /// Has the next ASID begin the numbers anew, with a flush of the whole TLB.
    pub(crate) fn exhaust_asids(&self) {
        self.next_asid.store(u32::MAX, Relaxed);
    }

    /// Whether no guest can run here, since SVM could not be switched on.
    #[inline]
    pub(crate) fn is_absent(&self) -> bool {
        self.absent.load(Relaxed)
    }

    /// Switches SVM on on this CPU, on which this runs with interrupts off.
    fn enable<C: Cpu>(&self, c: &mut C) -> Result<(), Unusable> {
        // Again: firmware or another module may have changed it since the CPU was looked at last.
        check(c)?;
        if !c.svm_on() {
            return Err(Unusable::InUse);
        }
        // Before the first VMRUN here, which writes the host's state there.
        c.wrmsr(msr::VM_HSAVE_PA, self.host_save().0);
        self.generation.store(self.generation().wrapping_add(1), Relaxed);
        // Whoever had SVM before, or this CPU before it went offline, left translations under any ASID.
        self.exhaust_asids();
        self.forget_saving();
        self.last_vcpu.store(0, Relaxed);
        // The kernel sets TSC_AUX once, when the CPU comes online.
        if features().rdtscp {
            self.tsc_aux.store(c.rdmsr(msr::TSC_AUX), Relaxed);
        }
        Ok(())
    }

    /// A fresh ASID and its generation; the third value asks for a flush of the whole TLB because
    /// the numbers began anew.
    pub fn new_asid(&self, limit: u32) -> (u32, u64, bool) {
        let next = self.next_asid.load(Relaxed);
        if next < limit {
            self.next_asid.store(next + 1, Relaxed);
            return (next, self.generation(), false);
        }
        // Blocks compare it at their next entry here, and take new numbers.
        let generation = self.generation().wrapping_add(1);
        self.generation.store(generation, Relaxed);
        // 1 is given out here.
        self.next_asid.store(2, Relaxed);
        (1, generation, true)
    }
}

/// Allocates the per-CPU state for `cpus` CPUs. Called once at load.
pub fn set_up(features: Features, cpus: usize) -> Result<(), NoMemory> {
    let mut table = alloc::vec::Vec::new();
    // For all CPUs that may come online: nothing is allocated when one does.
    table.try_reserve_exact(cpus).map_err(|_| NoMemory)?;
    for _ in 0..cpus {
        table.push(PerCpu::new()?);
    }
    MACHINE.set(Machine { features, io_map: IoMap::all()?, cpus: table })
}

/// Frees it. Called at unload, after the last VM is gone and SVM is off everywhere.
#[allow(unsafe_code)]
pub fn tear_down() {
    // SAFETY: at unload no vCPU is left that could hold a reference, and no CPU has SVM on.
    unsafe { MACHINE.clear() };
}

/// The features found at load.
pub fn features() -> Features {
    MACHINE.get().map(|m| m.features).unwrap_or_default()
}

pub(crate) fn io_map() -> Hpa {
    MACHINE.get().map(|m| m.io_map.hpa()).unwrap_or_default()
}

/// The state of physical CPU `cpu`.
#[inline]
pub(crate) fn of(cpu: usize) -> Option<&'static PerCpu> {
    MACHINE.get()?.cpus.get(cpu)
}

/// Whether SVM can be used on the CPU this runs on, apart from what CPUID says.
pub fn check<C: Cpu>(c: &mut C) -> Result<(), Unusable> {
    if c.rdmsr(msr::VM_CR) & msr::vm_cr::SVMDIS != 0 {
        return Err(Unusable::DisabledByFirmware);
    }
    if c.rdmsr(msr::EFER) & Efer::SVME.bits() != 0 {
        return Err(Unusable::InUse);
    }
    Ok(())
}

/// Switches SVM on on the CPU this runs on.
pub fn enable<C: Cpu>(c: &mut C, cpu: usize) -> Result<(), Unusable> {
    let Some(this) = of(cpu) else { return Err(Unusable::Absent) };
    // What is noted of the CPU is for who has interrupts off.
    irq::undisturbed(|| {
        let enabled = this.enable(c);
        // Kernels before 6.5 have the CPU all the same, and any has the one that wakes.
        this.absent.store(enabled.is_err(), Relaxed);
        enabled
    })
}

/// Switches SVM off on the CPU this runs on; harmless where it is off.
pub fn disable<C: Cpu>(c: &mut C) {
    irq::undisturbed(|| {
        // The way to a reboot may come here twice.
        if c.rdmsr(msr::EFER) & Efer::SVME.bits() == 0 {
            return;
        }
        // The page is freed at unload: no CPU may be left with its address.
        c.wrmsr(msr::VM_HSAVE_PA, 0);
        // GIF must be set before SVME is cleared: a CPU that is stopped in the loop has it clear.
        c.stgi();
        c.svm_off();
    });
}

/// Leaves the loop on CPU `at` for good, from wherever in it: the host's state is loaded and GIF set, with
/// interrupts off. For a panic, behind which the guest's state is nobody's.
#[cold]
#[inline(never)]
pub fn rescue_host<C: Cpu>(cpu: &mut C, at: usize) {
    // Nothing was ever saved here: the CPU has the host's state.
    let Some(here) = of(at).filter(|here| here.saved.load(Relaxed)) else {
        return;
    };
    // An interrupt between STGI and the panic's own code would run with what was loaded half.
    cpu.cli();
    if here.registers.hold_it.load(Relaxed) {
        here.registers.restore_kernel(cpu);
        cpu.stgi();
        here.registers.restore_user(cpu);
    } else {
        cpu.vmload(here.host_save());
        cpu.stgi();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_saving_is_taken_for_another() {
        let cpus = [PerCpu::new().unwrap(), PerCpu::new().unwrap()];
        let mut all = alloc::vec![Saving::NONE, cpus[0].last_saving(0), cpus[1].last_saving(1)];
        for (at, cpu) in [0, 1, 1, 0, 1].map(|at| (at, &cpus[at])) {
            all.push(cpu.next_saving(at));
            assert_eq!(cpu.last_saving(at), all[all.len() - 1]);
            // The CPU went offline and came back.
            cpu.forget_saving();
            all.push(cpu.last_saving(at));
        }
        for (i, one) in all.iter().enumerate() {
            assert!(!all[..i].contains(one), "{all:?}");
        }
    }

    #[test]
    fn asids_run_out_into_a_new_generation_with_a_flush() {
        let cpu = PerCpu::new().unwrap();
        let first = cpu.new_asid(3);
        assert_eq!(first, (1, 1, false));
        assert_eq!(cpu.new_asid(3), (2, 1, false));
        assert_eq!(cpu.new_asid(3), (1, 2, true));
        assert_eq!(cpu.new_asid(3), (2, 2, false));
    }

    #[test]
    fn the_first_asid_after_enabling_flushes_what_others_left() {
        let cpu = PerCpu::new().unwrap();
        assert_eq!(cpu.new_asid(9), (1, 1, false));
        cpu.exhaust_asids();
        assert_eq!(cpu.new_asid(9), (1, 2, true));
        assert_eq!(cpu.new_asid(9), (2, 2, false));
    }

    #[test]
    fn enabling_twice_is_refused_and_disabling_is_complete() {
        let mut c = cpu::Model::default();
        assert_eq!(check(&mut c), Ok(()));
        c.msrs.insert(msr::EFER, Efer::SVME.bits());
        assert_eq!(check(&mut c), Err(Unusable::InUse));
        disable(&mut c);
        assert_eq!(c.msrs[&msr::EFER] & Efer::SVME.bits(), 0);
        c.msrs.insert(msr::VM_CR, msr::vm_cr::SVMDIS);
        assert_eq!(check(&mut c), Err(Unusable::DisabledByFirmware));
    }
}
