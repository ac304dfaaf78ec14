//! What is kept of a guest that is a hypervisor.

use backend::L1Flush;
use host::{KBox, NoMemory};
use nested_vmx::{Capabilities, Machine, merge::time::Deadline};
use x86::vmcs::{ExitControls, field};
use x86::{Cr0, Cr4, Efer, Gpa};

use crate::{
    features::Features,
    host_words::HostWords,
    nested::{
        exit_tsc::ExitTsc,
        list::Lists,
        seconds::{Made, Seconds},
    },
    passed::Passed,
    shadow_vmcs::Shadow,
    vmcs::Vmcs,
};

/// What L1 asks of L2 in words that L0 changes while L2 runs: it stays as L1 wants it. All zero with L1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OfL1 {
    /// L2 runs.
    pub(crate) runs: bool,
    /// Primary processor-based controls.
    pub(crate) primary: u32,
    /// Secondary processor-based controls.
    pub(crate) secondary: u32,
    /// The exception bitmap.
    pub(crate) exceptions: u32,
    /// An event of L1's whose delivery was interrupted, and that is to be injected again, as L1 has it; 0: there is none.
    pub(crate) repeated: u32,
    /// The length of the instruction that it stands for, where the last exit does not tell it: it was taken back, or restored. 0: that of the exit.
    pub(crate) length: u32,
    /// What the vCPU has injected last, an event of L1's among it that a restored state has had among the vCPU's.
    pub(crate) injected: u32,
    /// CR0 bits that are L1's own in L2.
    pub(crate) cr0: Cr0,
    /// CR4 bits that are L1's own in L2.
    pub(crate) cr4: Cr4,
    /// When L1's preemption timer has run down, on L1's TSC; 0: there is none.
    pub(crate) timer: u64,
}

/// MSRs of L2's that are in VMCS12 only where L1 has them saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OtherMsrs {
    pub(crate) pat: u64,
    pub(crate) debugctl: u64,
    /// A save area of 32 bits has no place for it.
    pub(crate) efer: Efer,
}

/// No EPT pointer: see [`Nested::told`].
const SEVERAL: u64 = u64::MAX;

/// A vCPU whose guest may be a hypervisor.
#[derive(Debug)]
pub(crate) struct Nested {
    pub(crate) machine: KBox<Machine>,
    /// The VMCS that is not current: vmcs02 while L1 runs, vmcs01 while L2 does.
    pub(crate) other: Vmcs,
    /// What serves L1's VMREAD and VMWRITE, where the CPU can.
    pub(crate) shadow: Option<KBox<Shadow>>,
    /// The vCPU's VMCS gave way to the shadow VMCS, in the loop.
    pub(crate) set_aside: bool,
    /// The host's words of this run are in the other VMCS too: those that are the thread's ([`Vmx::load`]).
    ///
    /// [`Vmx::load`]: backend::WorldSwitch::load
    pub(crate) has_host: bool,
    /// What an exit of L2 writes into vmcs01's segments.
    pub(crate) host: HostWords,
    /// The capabilities before the VMM took some away.
    pub(crate) whole: KBox<Capabilities>,
    /// IA32_FEATURE_CONTROL.
    pub(crate) feature_control: u64,
    /// What is known of vmcs02.
    pub(crate) made: Made,
    /// The vmcs02s of other VMCSs of L1's.
    pub(crate) seconds: Seconds,
    /// What the map of an L1 with an enlightened VMCS let L2 have when it was read last; see
    /// [`Machine::keeps_msr_bitmap`].
    pub(crate) msrs_kept: Option<Passed>,
    /// The VP assist page that an entry did not find inside the loop.
    pub(crate) missed: Option<Gpa>,
    /// The root by which an access of L2's was refused, of which L1 was told, since another vCPU ran here last; 0: none.
    /// [`SEVERAL`]: more than one.
    pub(crate) told: u64,
    /// What L1 has flushed of those tables since an entry looked.
    pub(crate) flushed: L1Flush,
    /// The TSC at L2's last exit, for a list of L1's to store.
    pub(crate) exit_tsc: ExitTsc,
    /// What lists of MSRs leave to the vCPU.
    pub(crate) lists: Lists,
    /// When L1's preemption timer runs down, while L2 runs with one.
    pub(crate) timer: Option<Deadline>,
    /// Everything is composed at each entry: nothing is known to be unchanged.
    pub(crate) without_tracking: bool,
}

type Parts = (KBox<Machine>, Vmcs, Option<KBox<Shadow>>, ExitTsc, KBox<Capabilities>);

#[inline(never)]
fn machine_of(capabilities: &Capabilities, features: &Features) -> Result<KBox<Machine>, NoMemory> {
    // In place: 2 KiB are not to pass by way of a stack.
    let mut machine = KBox::new(Machine::OUTSIDE)?;
    machine.offer(*capabilities);
    // By this CPU, once: the fields are the same on all.
    machine.serve(|encoding| features.has_field(encoding));
    Ok(machine)
}

impl Nested {
    /// Outside VMX operation, with a vmcs02 that nothing is known of.
    #[inline(never)]
    pub(crate) fn new(features: &Features, whole: &Capabilities) -> Result<KBox<Self>, NoMemory> {
        // All or none: a guest without one of them is no hypervisor.
        let (machine, vmcs) = (machine_of(whole, features)?, Vmcs::new(features.revision)?);
        let parts = (machine, vmcs, Shadow::new(features)?, ExitTsc::new()?, KBox::new(*whole)?);
        KBox::make(|| Self::place(parts))
    }

    #[inline(never)]
    fn place((machine, other, shadow, exit_tsc, whole): Parts) -> Self {
        Self {
            machine,
            other,
            shadow,
            set_aside: false,
            has_host: false,
            host: HostWords::NONE,
            whole,
            // Zero until firmware, or the VMM, writes it: VMXON is #GP until then, as on a CPU.
            feature_control: 0,
            made: Made::NONE,
            seconds: Seconds::NONE,
            msrs_kept: None,
            missed: None,
            told: 0,
            flushed: L1Flush::None,
            exit_tsc,
            lists: Lists::default(),
            timer: None,
            without_tracking: !host::params::nested_dirty_tracking(),
        }
    }

    /// L1 is told of an access that its tables refuse.
    pub(crate) fn note_told(&mut self) {
        let root = self.made.root;
        self.told = if self.told == 0 || self.told == root { root } else { SEVERAL };
    }

    /// Another vCPU ran here: whether it may have left what an entry of L2 must not find. Asked once.
    pub(crate) fn owes_told(&mut self, l2_runs: bool) -> bool {
        let told = core::mem::take(&mut self.told);
        // L2 was entered behind what L1 was told, and what anybody filled in since is young enough.
        told != 0 && !(l2_runs && told == self.made.root)
    }

    /// Those of a level that does not run.
    pub(crate) fn others(&self) -> impl Iterator<Item = &Vmcs> {
        [&self.other].into_iter().chain(self.seconds.vmcss())
    }

    /// Every VMCS beside the vCPU's own: whatever a CPU may hold parts of.
    pub(crate) fn beside(&self) -> impl Iterator<Item = &Vmcs> {
        self.others().chain(self.shadow.as_ref().map(|shadow| &shadow.vmcs))
    }

    /// What lies under the VPIDs of those that may run is given up.
    pub(crate) fn drop_vpids(&mut self) {
        self.other.drop_vpid();
        self.seconds.drop_vpids();
    }

    /// Whether no VMCS beside the vCPU's own is active on another CPU than `here`.
    pub(crate) fn may_run_on(&self, here: usize) -> bool {
        // The shadow VMCS becomes active with vmcs01: it moves along. So do those that nobody enters now: a CPU has room for few, and is
        // not to keep them of each vCPU that came by.
        self.beside().all(|vmcs| vmcs.may_run_on(here))
    }

    /// Has the CPU on which they are active clear them. Interrupts are on.
    pub(crate) fn clear_elsewhere(&self) {
        self.beside().for_each(Vmcs::clear_elsewhere);
    }

    /// Whether leaving L2 needs L1's memory: a list of MSRs, or the PDPTEs of a host of 32 bits.
    pub(crate) fn needs_memory_to_leave(&self) -> bool {
        let v = self.machine.vmcs12();
        // MSRs to be stored are asked for by the caller: an entry that fails stores none (§27.8).
        v.get(field::EXIT_MSR_LOAD_COUNT) != 0 || !v.exit().contains(ExitControls::HOST_64)
    }
}
