//! What VMX keeps per physical CPU: the VMXON region, the address-space ids, which VMCSs are active
//! there, who ran last, and what of the host's state never changes there.
//!
//! Every field is touched only on its own CPU with interrupts off (or, at a crash, by an NMI there): another CPU asks by an
//! interrupt. Kernels from 6.5 on switch CPUs on and off with interrupts on, so [`enable`] and [`disable`] turn them off,
//! so plain relaxed atomics do: they cost what an ordinary load or store costs.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use cpu::Cpu;
use guest_live::UserReturn;
use host::{NoMemory, hostcpu, irq, once::Once, page::Page};
use x86::vmcs::capability::{FEATURE_CONTROL, feature_control as control};
use x86::{Cr4, Hpa};

use crate::{
    features::{Features, Unusable},
    host_registers::{HostConstants, Words},
};

/// In SMX, VMX has an enable bit of its own.
const SMX: u32 = x86::cpuid::feature::SMX.mask();
/// VMCSs that can be active on a CPU at once: a page of notes. One more is cleared whenever the loop is left. A vCPU that sleeps
/// keeps its note, whosever it is: there have to be more than one CPU has vCPUs come by.
pub const ACTIVE: usize = 512;
/// VPIDs have sixteen bits; 0 is the host's.
const VPIDS: u32 = 1 << 16;

/// One physical CPU.
#[derive(Debug)]
pub struct PerCpu {
    /// Its number.
    at: usize,
    region: Page,
    /// The CPU is in VMX operation, by VMXON and not only by CR4.VMXE, which is set before and cleared behind it.
    on: AtomicBool,
    /// Counts how often VMX was switched on.
    generation: AtomicU64,
    /// Counts how often VPIDs began anew.
    vpid_generation: AtomicU64,
    next_vpid: AtomicU32,
    /// The VMCS that is current; 0: none.
    current: AtomicU64,
    /// Physical addresses of the VMCSs that are active; 0: free.
    active: Page,
    /// The vCPU that ran last here, for IBPB.
    pub(crate) last_vcpu: AtomicU64,
    constants: Words,
    /// MSRs that may hold a guest's value between its runs.
    pub(crate) user_return: UserReturn,
}

/// State shared by all virtual machines on this host.
#[derive(Debug)]
struct Machine {
    features: Features,
    cpus: alloc::vec::Vec<PerCpu>,
}

static MACHINE: Once<Machine> = Once::new();

impl PerCpu {
    fn new(at: usize, revision: u32) -> Result<Self, NoMemory> {
        // Zeroed: bit 31, which marks a shadow VMCS, is no bit of a VMXON region.
        let region = Page::zeroed()?;
        // The CPU recognises the region by its first four bytes.
        if let Some(first) = region.table().first() {
            first.store(u64::from(revision), Relaxed);
        }
        Ok(Self {
            at,
            region,
            on: AtomicBool::new(false),
            // 1, so that a VMCS of generation 0 is active nowhere.
            generation: AtomicU64::new(1),
            vpid_generation: AtomicU64::new(1),
            next_vpid: AtomicU32::new(1),
            current: AtomicU64::new(0),
            active: Page::zeroed()?,
            last_vcpu: AtomicU64::new(0),
            constants: [const { AtomicU64::new(0) }; 9],
            user_return: UserReturn::new(),
        })
    }

    /// The number of the CPU.
    #[inline]
    pub fn number(&self) -> usize {
        self.at
    }

    /// The generation of VMX operation: a VMCS that became active in another is active no more.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// The generation in which VPIDs given out here are valid.
    #[inline]
    pub fn vpid_generation(&self) -> u64 {
        self.vpid_generation.load(Relaxed)
    }

    fn renew_vpids(&self, next: u32) -> u64 {
        // Wraps after more than any machine lives through.
        let generation = self.vpid_generation().wrapping_add(1);
        self.vpid_generation.store(generation, Relaxed);
        self.next_vpid.store(next, Relaxed);
        generation
    }

    /// A fresh VPID and its generation. The third value asks for an INVVPID of all contexts, because
    /// the numbers began anew.
    pub fn new_vpid(&self) -> (u16, u64, bool) {
        let next = self.next_vpid.load(Relaxed);
        // Never 0: an entry with VPID 0 is refused (SDM vol. 3C §27.2.1.1).
        if next < VPIDS {
            // Plain load and store: nobody else is on this CPU.
            self.next_vpid.store(next + 1, Relaxed);
            return (next as u16, self.vpid_generation(), false);
        }
        (1, self.renew_vpids(2), true)
    }

    /// Whether the VMCS at `vmcs` is current here, so that it need not be loaded.
    #[inline]
    pub fn is_current(&self, vmcs: Hpa) -> bool {
        self.current.load(Relaxed) == vmcs.0
    }

    /// The VMCS at `vmcs` was loaded here by VMPTRLD.
    #[inline]
    pub fn set_current(&self, vmcs: Hpa) {
        self.current.store(vmcs.0, Relaxed);
    }

    /// Notes, before the first VMPTRLD, that the VMCS at `vmcs` becomes active here. `false`: there
    /// is no room; it must be cleared whenever the loop is left.
    #[must_use]
    pub fn note_active(&self, vmcs: Hpa) -> bool {
        // A search among all: VMCSs become active seldom.
        let free = self.slots().iter().find(|slot| slot.load(Relaxed) == 0);
        free.inspect(|slot| slot.store(vmcs.0, Relaxed)).is_some()
    }

    /// Whether the instructions of VMX can be executed here. Interrupts are off.
    pub fn is_on<C: Cpu>(&self, c: &C) -> bool {
        self.is_on_by(c.cr4_now())
    }

    /// Whether the instructions of VMX can be executed here, by a CR4 that was read with interrupts off, as they still are.
    #[inline]
    pub fn is_on_by(&self, cr4: Cr4) -> bool {
        // CR4.VMXE alone says too little: it is set before VMXON, and cleared behind VMXOFF, and an instruction in between is #UD
        // in the kernel. By the CPU's own register too, as a crash may have switched VMX off without asking.
        self.on.load(Relaxed) && cr4.contains(Cr4::VMXE)
    }

    /// Clears the VMCS at `vmcs`, which is active here. Harmless where it is not any more: VMX may
    /// have been switched off meanwhile.
    pub fn clear<C: Cpu>(&self, c: &C, vmcs: Hpa) {
        if self.is_on(c) {
            c.vmclear(vmcs);
        }
        self.forget(vmcs);
    }

    fn slots(&self) -> &[AtomicU64] {
        self.active.table().get(..ACTIVE).unwrap_or(&[])
    }

    /// The VMCS at `vmcs` is not active here any more.
    fn forget(&self, vmcs: Hpa) {
        // The page may become another VMCS's, which must not pass for the one that is current.
        // Compared: another VMCS may be current by now.
        let _ = self.current.compare_exchange(vmcs.0, 0, Relaxed, Relaxed);
        for slot in self.slots() {
            // Read first: a locked access for each would take longer than VMCLEAR. No other note becomes this one meanwhile.
            if slot.load(Relaxed) == vmcs.0 {
                let _ = slot.compare_exchange(vmcs.0, 0, Relaxed, Relaxed);
            }
        }
    }

    /// Clears every VMCS that is active here. NMI context, perhaps.
    fn clear_all<C: Cpu>(&self, c: &C) {
        for slot in self.slots() {
            // Each once: an NMI may come by in between.
            let vmcs = slot.swap(0, Relaxed);
            if vmcs != 0 {
                c.vmclear(Hpa(vmcs));
            }
        }
        // No VMPTRLD is spared by what was current.
        self.current.store(0, Relaxed);
    }

    /// Switches VMX on on this CPU, on which this runs with interrupts off.
    fn enable<C: Cpu>(&self, c: &mut C) -> Result<(), Unusable> {
        check(c, hostcpu::vmx_allowed())?;
        unlock(c);
        HostConstants::read(c).store(&self.constants);
        self.user_return.read_host(c, features().rdtscp);
        // VMXON forgets what was current.
        self.current.store(0, Relaxed);
        // VMCSs that were active before VMX went off are so no more.
        self.generation.store(self.generation().wrapping_add(1), Relaxed);
        // Whoever had VMX before, or this CPU before it went offline, left translations under any VPID.
        self.renew_vpids(VPIDS);
        // Its predictors were somebody else's meanwhile.
        self.last_vcpu.store(0, Relaxed);
        if !c.vmxon(self.region.hpa()) {
            return Err(Unusable::Refused);
        }
        // Behind it: who is asked to clear a VMCS before has nothing to clear.
        self.on.store(true, Relaxed);
        Ok(())
    }

    /// Switches VMX off on this CPU, on which this runs with interrupts off, perhaps in an NMI.
    fn disable<C: Cpu>(&self, c: &C) {
        // VMCLEAR is undefined outside of VMX operation, and what the CPU keeps of an active VMCS is lost (SDM vol. 3C
        // §25.11.1).
        self.clear_all(c);
        // Before it: nobody clears a VMCS from here on, and none is active.
        self.on.store(false, Relaxed);
        c.vmxoff();
    }

    /// What of the host's state is constant here.
    pub fn constants(&self) -> HostConstants {
        HostConstants::load(&self.constants)
    }
}

/// Allocates the per-CPU state for `cpus` CPUs. Called once at load.
pub fn set_up(features: Features, cpus: usize) -> Result<(), NoMemory> {
    let mut table = alloc::vec::Vec::new();
    // No vCPU can be made yet: a failure leaves nothing behind.
    table.try_reserve_exact(cpus).map_err(|_| NoMemory)?;
    for at in 0..cpus {
        table.push(PerCpu::new(at, features.revision)?);
    }
    MACHINE.set(Machine { features, cpus: table })
}

/// Frees it. Called at unload, after the last VM is gone and VMX is off everywhere.
#[allow(unsafe_code)]
pub fn tear_down() {
    // SAFETY: at unload no vCPU is left that could hold a reference, and no CPU has VMX on.
    unsafe { MACHINE.clear() };
}

/// The features found at load.
pub fn features() -> Features {
    // Before the load, and behind the unload, there are none.
    MACHINE.get().map(|m| m.features).unwrap_or_default()
}

/// The state of physical CPU `cpu`.
#[inline]
pub(crate) fn of(cpu: usize) -> Option<&'static PerCpu> {
    MACHINE.get()?.cpus.get(cpu)
}

/// Whether VMX can be used on the CPU this runs on, apart from what the capability MSRs say.
/// `allowed`: what the kernel made of the firmware's choice.
pub fn check<C: Cpu>(c: &mut C, allowed: bool) -> Result<(), Unusable> {
    let firmware = c.rdmsr(FEATURE_CONTROL);
    // Either bit: which of them counts the kernel has found out.
    let enabled = firmware & (control::VMX_OUTSIDE_SMX | control::VMX_IN_SMX) != 0;
    // Inside SMX, which only the kernel knows of, the other of the two bits counts.
    if firmware & control::LOCKED != 0 && !(enabled && allowed) {
        return Err(Unusable::DisabledByFirmware);
    }
    // Somebody else's VMX: VMXON would fault, and to switch it off would end their guests.
    if c.cr4_now().contains(Cr4::VMXE) {
        return Err(Unusable::InUse);
    }
    Ok(())
}

/// Switches VMX on on the CPU this runs on.
pub fn enable<C: Cpu>(c: &mut C, cpu: usize) -> Result<(), Unusable> {
    let Some(this) = of(cpu) else { return Err(Unusable::Absent) };
    // What is noted of the CPU is for who has interrupts off.
    irq::undisturbed(|| this.enable(c))
}

/// Where firmware left the choice open, VMX is enabled and the choice locked, as the kernel itself
/// does it. VMXON faults while the lock is open.
fn unlock<C: Cpu>(c: &mut C) {
    let firmware = c.rdmsr(FEATURE_CONTROL);
    // Locked: what firmware has chosen stands, and `check` has found it good.
    if firmware & control::LOCKED != 0 {
        return;
    }
    let smx = if c.cpuid(1, 0)[2] & SMX != 0 { control::VMX_IN_SMX } else { 0 };
    c.wrmsr(FEATURE_CONTROL, firmware | control::LOCKED | control::VMX_OUTSIDE_SMX | smx);
}

/// CPU `cpu`, on which this runs with interrupts off, is about to return to user space, or to go.
pub fn user_return<C: Cpu>(c: &mut C, cpu: usize) {
    if let Some(this) = of(cpu) {
        this.user_return.restore(c);
    }
}

/// Switches VMX off on the CPU this runs on; harmless where it is off. NMI context, perhaps.
pub fn disable<C: Cpu>(c: &mut C, cpu: usize) {
    irq::undisturbed(|| {
        // Set by nobody else as long as the module is loaded.
        if !c.cr4_now().contains(Cr4::VMXE) {
            return;
        }
        match of(cpu) {
            Some(this) => this.disable(c),
            None => c.vmxoff(),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::{Model, VmxCpu};
    use x86::msr::PAT;

    const OPEN: u64 = control::LOCKED | control::VMX_OUTSIDE_SMX;

    fn model(firmware: u64) -> Model {
        let mut c = Model::default();
        c.msrs.insert(FEATURE_CONTROL, firmware);
        c
    }

    #[test]
    fn vpids_run_out_into_a_new_generation_with_a_flush() {
        let cpu = PerCpu::new(0, 4).unwrap();
        let mut last = cpu.new_vpid();
        assert_eq!(last, (1, 1, false));
        for n in 2..=0xffff {
            last = cpu.new_vpid();
            assert_eq!(last, (n, 1, false));
        }
        let on = cpu.generation();
        assert_eq!(cpu.new_vpid(), (1, 2, true));
        assert_eq!(cpu.new_vpid(), (2, 2, false));
        assert_eq!(cpu.generation(), on, "a VMCS that is active stays so");
    }

    #[test]
    fn the_first_vpid_after_enabling_flushes_what_others_left() {
        let cpu = PerCpu::new(0, 4).unwrap();
        assert_eq!(cpu.new_vpid(), (1, 1, false));
        cpu.renew_vpids(VPIDS);
        let (vpid, generation, all) = cpu.new_vpid();
        assert_eq!((vpid, all), (1, true));
        assert_eq!(cpu.new_vpid(), (2, generation, false));
    }

    #[test]
    fn the_region_begins_with_the_revision() {
        let cpu = PerCpu::new(0, 0x1234).unwrap();
        assert_eq!(cpu.region.table()[0].load(Relaxed), 0x1234);
    }

    #[test]
    fn the_constants_come_back_as_they_were_stored() {
        let tables = hostcpu::HostTables {
            gdt: 1,
            idt: 2,
            task: 3,
            cs: 0x10,
            ss: 0x18,
            tr: 0xfff8,
            reserved: 0,
        };
        let constants = HostConstants {
            tables,
            sysenter_cs: 4,
            sysenter_esp: 5,
            sysenter_eip: 6,
            pat: 7,
            efer: 8,
        };
        let cpu = PerCpu::new(0, 4).unwrap();
        constants.store(&cpu.constants);
        assert_eq!(cpu.constants(), constants);
    }

    #[test]
    fn what_firmware_and_others_did_is_respected() {
        assert_eq!(check(&mut model(OPEN), true), Ok(()));
        assert_eq!(check(&mut model(0), true), Ok(()));
        let off = Err(Unusable::DisabledByFirmware);
        assert_eq!(check(&mut model(control::LOCKED), true), off);
        assert_eq!(check(&mut model(control::LOCKED | control::VMX_IN_SMX), true), Ok(()));
        // Launched by TXT without the bit for it: the kernel says no.
        assert_eq!(check(&mut model(OPEN), false), off);
        let mut used = model(OPEN);
        used.vmx.cr4.set(Cr4::VMXE);
        assert_eq!(check(&mut used, true), Err(Unusable::InUse));
    }

    #[test]
    fn an_open_lock_is_closed_with_the_bits_that_count() {
        let mut c = model(0);
        unlock(&mut c);
        assert_eq!(c.msrs[&FEATURE_CONTROL], OPEN);
        let mut c = model(1 << 20);
        c.cpuid = Some(|_, _| [0, 0, SMX, 0]);
        unlock(&mut c);
        assert_eq!(c.msrs[&FEATURE_CONTROL], OPEN | control::VMX_IN_SMX | 1 << 20);
        let mut c = model(OPEN | 1 << 18);
        unlock(&mut c);
        assert_eq!(c.msrs[&FEATURE_CONTROL], OPEN | 1 << 18);
    }

    #[test]
    fn going_offline_clears_every_active_vmcs_once() {
        let c = model(OPEN);
        let cpu = PerCpu::new(0, 4).unwrap();
        assert!(c.vmxon(cpu.region.hpa()));
        cpu.on.store(true, Relaxed);
        for n in 1..=ACTIVE as u64 {
            assert!(cpu.note_active(Hpa(n << 12)));
        }
        assert!(!cpu.note_active(Hpa(0xfff_f000)), "no room");
        cpu.set_current(Hpa(3 << 12));
        cpu.clear(&c, Hpa(3 << 12));
        assert!(!cpu.is_current(Hpa(3 << 12)));
        assert!(cpu.note_active(Hpa(0xfff_f000)));
        cpu.clear_all(&c);
        cpu.clear_all(&c);
        let mut cleared = c.vmx.cleared.take();
        let times = cleared.len();
        cleared.sort_unstable_by_key(|hpa| hpa.0);
        cleared.dedup();
        assert_eq!((cleared.len(), times), (ACTIVE + 1, ACTIVE + 1));
    }

    /// What another CPU asks for by an interrupt, were it to come where CR4.VMXE is set and VMX is off: the model CPU
    /// refuses VMCLEAR there.
    fn is_asked_to_clear(c: &Model) {
        assert!(!irq::enabled(), "an interrupt comes by");
        of(3).unwrap().clear(c, Hpa(0x6000));
    }

    #[test]
    fn vmx_goes_on_once_and_off_completely() {
        // Other tests of this program use CPUs 0 and 1.
        set_up(Features { revision: 7, ..Features::default() }, 4).unwrap();
        let mut c = model(OPEN);
        c.msrs.insert(PAT, 0x0407_0506_0007_0106);
        c.vmx.in_between = Some(is_asked_to_clear);
        assert_eq!(enable(&mut c, 3), Ok(()));
        assert_eq!(c.vmx.on.get(), of(3).map(|cpu| cpu.region.hpa()));
        assert_eq!(of(3).unwrap().constants().pat, 0x0407_0506_0007_0106);
        assert_eq!(enable(&mut c, 3), Err(Unusable::InUse));
        assert!(of(3).unwrap().note_active(Hpa(0x5000)));
        of(3).unwrap().clear(&c, Hpa(0x6000));
        assert_eq!(c.vmx.cleared.take(), [Hpa(0x6000)]);
        disable(&mut c, 3);
        assert_eq!((c.vmx.on.get(), c.vmx.cr4.get()), (None, Cr4::empty()));
        assert_eq!(c.vmx.cleared.take(), [Hpa(0x5000)]);
        disable(&mut c, 3);
        assert_eq!(enable(&mut c, 9), Err(Unusable::Absent));
        c.vmx.refuse_vmxon = true;
        assert_eq!(enable(&mut c, 2), Err(Unusable::Refused));
    }
}
