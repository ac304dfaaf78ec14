//! A guest that is a hypervisor under VMX, in VMX operation, and the VMCS12 that it enters.

use std::sync::OnceLock;

use backend::Gprs;
use cpu::ModelVmcs;
use cpuid::{HostFacts, Supported};
use gannet_vcpu::{Offered, RunInput, UserExit};
use host::page::Pages;
use mmu::Region;
use msr::HostMsrs;
use nested_vmx::example::{EVERYTHING, good};
use nested_vmx::saved::{HEADER, Header, IMAGE};
use nested_vmx::{Vmcs12, set};
use vm::VmRef;
use vmx::Features;
use x86::cpuid::feature;
use x86::vmcs::ExitReason;
use x86::vmcs::place::VMCS12_REVISION;
use x86::{Cr0, Cr4, Efer, Segment};
use zerocopy::{FromBytes as _, IntoBytes};

use super::vmx::{self as rig, VmxVcpu, exit};

const VMXON: u64 = 0x6000;
const VMCS: u64 = 0x7000;
/// Where L1 goes on after an exit of L2.
pub const L1_RIP: u64 = 0x8000;
/// Where L2 begins.
pub const L2_RIP: u64 = 0x9000;

/// A CPU that has all that VMX can have, shadow VMCSs among it.
pub fn features() -> Features {
    let all = Features { nested: true, shadow_vmcs: true, ..rig::features() };
    Features {
        nested_host: EVERYTHING,
        interrupt_status: true,
        nested_virtual_interrupts: true,
        ..all
    }
}

fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let [a, b, c, d] = super::host_cpuid(leaf, subleaf);
    match leaf {
        1 => [a, b, c | 1 << 5, d],
        // No IBRS: nothing promises L1 that L2's predictions are kept from it.
        7 => [a, b, c, d & !(1 << 26)],
        _ => [a, b, c, d],
    }
}

/// What such a host offers.
pub fn offered() -> Offered {
    static OFFERED: OnceLock<(Supported, HostMsrs)> = OnceLock::new();
    offered_by(host_cpuid, &OFFERED)
}

/// As [`offered`], with transactional regions.
fn offered_with_rtm() -> Offered {
    static OFFERED: OnceLock<(Supported, HostMsrs)> = OnceLock::new();
    fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
        let [a, b, c, d] = host_cpuid(leaf, subleaf);
        if leaf == 7 && subleaf == 0 { [a, b | 1 << 11, c, d] } else { [a, b, c, d] }
    }
    offered_by(cpuid, &OFFERED)
}

fn offered_by(
    cpuid: fn(u32, u32) -> [u32; 4],
    kept: &'static OnceLock<(Supported, HostMsrs)>,
) -> Offered {
    let (cpuid, msrs) = kept.get_or_init(|| {
        let facts = HostFacts { xcr0: 7, nested: true, ..HostFacts::default() };
        let supported = Supported::read(cpuid, &facts).unwrap();
        assert!(supported.has(feature::VMX));
        (supported, HostMsrs { hyperv: true, ..HostMsrs::default() })
    });
    Offered { cpuid, msrs }
}

/// A VMCS12 whose host and guest are in long mode, and whose guest has a VPID and no tables of L1's.
pub fn vmcs12() -> Vmcs12 {
    let mut v = good();
    set!(v, PROC_CONTROLS2 = 1 << 5, VPID = 1, HOST_RIP = L1_RIP, HOST_RSP = 0, GUEST_RIP = L2_RIP);
    v
}

/// A nested state of these.
pub fn state_of(header: &Header, vmcs12: &Vmcs12) -> Vec<u8> {
    let mut state = header.as_bytes().to_vec();
    state.extend_from_slice(vmcs12.as_bytes());
    state.resize(HEADER + IMAGE, 0);
    state[HEADER..HEADER + 4].copy_from_slice(&VMCS12_REVISION.to_le_bytes());
    state
}

/// A vCPU with L1 in long mode and VMX operation, its VMCS current, and 64 pages of memory from 0 on.
pub struct Hypervisor {
    pub vcpu: VmxVcpu,
    pub vm: VmRef,
    memory: Pages,
}

impl Hypervisor {
    /// Such a vCPU on a CPU that has these, whose local APIC is in the kernel.
    pub fn on(features: Features, vmcs12: &Vmcs12) -> Self {
        Self::restored(features, vmcs12, 0)
    }

    /// Such a vCPU, restored from a nested state that has these flags.
    pub fn restored(features: Features, vmcs12: &Vmcs12, flags: u16) -> Self {
        Self::of(rig::vcpu_offered(features, offered()), vmcs12, flags)
    }

    /// Such a vCPU, which has transactional regions.
    pub fn with_rtm(features: Features, vmcs12: &Vmcs12) -> Self {
        Self::of(rig::vcpu_offered(features, offered_with_rtm()), vmcs12, 0)
    }

    /// Such a vCPU, whose local APIC is the VMM's.
    pub fn without_apic(features: Features, vmcs12: &Vmcs12) -> Self {
        Self::of(rig::vcpu_without_apic(features, offered()), vmcs12, 0)
    }

    fn of((vcpu, vm): (VmxVcpu, VmRef), vmcs12: &Vmcs12, flags: u16) -> Self {
        let memory = Pages::zeroed(6).unwrap();
        let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: memory.hpa().0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        let mut this = Self { vcpu, vm, memory };
        this.vcpu.backend().cpu().inner().vmx.writes_read_only = true;
        let mut sregs = this.vcpu.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8005_0033), 0x1000);
        (sregs.cr4, sregs.efer) = (Cr4::PAE | Cr4::VMXE, Efer::LME | Efer::LMA | Efer::SCE);
        sregs.cs = Segment { base: 0, limit: u32::MAX, selector: 8, attr: 0xa9b };
        sregs.ss = Segment { base: 0, limit: u32::MAX, selector: 16, attr: 0xc93 };
        this.vcpu.set_sregs(&sregs, None).unwrap();
        let header = Header {
            flags,
            format: 0,
            size: (HEADER + IMAGE) as u32,
            vmxon_pa: VMXON,
            vmcs12_pa: VMCS,
            smm_flags: 0,
            pad: 0,
            vmx_flags: 0,
            preemption_timer_deadline: 0,
            reserved: [0; 11],
        };
        let state = state_of(&header, vmcs12);
        this.put(VMCS, VMCS12_REVISION.into());
        this.put(VMXON, VMCS12_REVISION.into());
        this.vcpu.set_nested_state(&state).unwrap();
        this
    }

    /// Writes a word of memory.
    pub fn put(&self, at: u64, value: u64) {
        self.memory.words()[at as usize / 8].store(value, std::sync::atomic::Ordering::Relaxed);
    }

    /// Reads a word of memory.
    pub fn get(&self, at: u64) -> u64 {
        self.memory.words()[at as usize / 8].load(std::sync::atomic::Ordering::Relaxed)
    }

    /// What the CPU does next.
    pub fn then(&mut self, step: impl FnMut(&mut ModelVmcs, &mut Gprs) + Send + 'static) {
        self.vcpu.backend().cpu().inner().vmx.then(step);
    }

    /// L1's VMCS, as a saved state has it.
    pub fn vmcs12(&mut self) -> Vmcs12 {
        let mut state = vec![0; self.vcpu.nested_state_size().unwrap()];
        self.vcpu.nested_state(&mut state).unwrap();
        Vmcs12::read_from_prefix(&state[HEADER..]).unwrap().0
    }

    /// L1 executes VMLAUNCH of its VMCS.
    pub fn vmlaunch(&mut self) {
        self.then(exit(ExitReason::Vmlaunch));
    }

    /// Runs until user space is asked.
    pub fn run(&mut self) -> UserExit {
        self.vcpu.run(&RunInput::default())
    }
}
