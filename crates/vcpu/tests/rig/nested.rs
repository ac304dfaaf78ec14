//! A guest that is a hypervisor under SVM, and the block that it runs.

use std::sync::atomic::Ordering;

use ::msr::HostMsrs;
use backend::{Gprs, RAX, RCX, RDX};
use cpuid::{HostFacts, Supported};
use gannet_vcpu::{By, Offered, RunInput, UserExit};
use host::page::Pages;
use mmu::Region;
use vm::VmRef;
use x86::cpuid::feature;
use x86::vmcb::{ExitCode, Vmcb};
use x86::{Cr0, Cr4, Efer, msr};

use super::{Features, Machine, TestVcpu, exit};

/// Where the block lies.
pub const BLOCK: u64 = 0x6000;
/// L1's own root; what it maps is not looked at by the model.
pub const L1_ROOT: u64 = 0x1000;
/// Where L1 executes VMRUN.
pub const L1_RIP: u64 = 0x8000;
/// Where L2 begins.
pub const L2_RIP: u64 = 0x9000;

const HLT: u32 = 1 << 24;
const VMRUN: u32 = 1;

/// CPUID of a host with SVM.
pub fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let [a, b, c, d] = super::host_cpuid(leaf, subleaf);
    match leaf {
        // Five-level paging.
        7 => [a, b, c | 1 << 16, d],
        0x8000_0000 => [0x8000_0021, b, c, d],
        0x8000_0001 => [a, b, c | 1 << 2, d],
        // IBPB, and automatic IBRS.
        0x8000_0008 => [a, b | 1 << 12, c, d],
        0x8000_0021 => [1 << 8, 0, 0, 0],
        0x8000_000a => [1, 8, 0, 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 25],
        _ => [a, b, c, d],
    }
}

/// Where L1 has its own state kept.
pub const KEPT: u64 = 0x7000;

/// What such a host offers.
pub fn offered() -> Offered {
    static OFFERED: std::sync::OnceLock<(Supported, HostMsrs)> = std::sync::OnceLock::new();
    let (cpuid, msrs) = OFFERED.get_or_init(|| {
        let facts = HostFacts { xcr0: 7, nested: true, ..HostFacts::default() };
        let supported = Supported::read(host_cpuid, &facts).unwrap();
        assert!(supported.has(feature::SVM));
        (supported, HostMsrs { amd: true, ..HostMsrs::default() })
    });
    Offered { cpuid, msrs }
}

/// A vCPU with L1 in long mode, and 64 pages of memory from 0 on.
pub struct Hypervisor {
    pub vcpu: TestVcpu,
    memory: Pages,
    pub vm: VmRef,
    /// What of SMRAM is memory of its own.
    smram: Option<Pages>,
}

/// Where SMRAM lies.
pub const SMBASE: u64 = 0x3_0000;

impl Hypervisor {
    /// With SVM on, and a block whose guest runs in long mode. `irqchip`: in the kernel.
    pub fn new(irqchip: bool) -> Self {
        Self::on(super::features(), irqchip)
    }

    /// As [`new`](Self::new), on a CPU that has these features.
    pub fn on(features: Features, irqchip: bool) -> Self {
        let machine = Machine { features, irqchip, nested: true, ..Machine::default() };
        let memory = Pages::zeroed(6).unwrap();
        let vm = super::vm(&machine);
        let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: memory.hpa().0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        let mut vcpu = super::add_vcpu(&machine, &vm, 0);
        let mut sregs = vcpu.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8001_0033), L1_ROOT);
        (sregs.cr4, sregs.efer) = (Cr4::PAE, Efer::LME | Efer::LMA | Efer::SVME);
        sregs.cs.attr = 0x29b;
        vcpu.set_sregs(&sregs, None).unwrap();
        let mut regs = vcpu.regs();
        regs.rip = L1_RIP;
        vcpu.set_regs(&regs);
        vcpu.write_msr(msr::VM_HSAVE_PA, KEPT, By::Vmm).unwrap();
        let this = Self { vcpu, memory, vm, smram: None };
        for (at, value) in [
            (0x10, u64::from(VMRUN)),
            (0x58, 1),
            (0x410, 0xffff_ffff_0a9b_0010),
            (0x4d0, (Efer::LME | Efer::LMA | Efer::SVME).bits()),
            (0x548, Cr4::PAE.bits()),
            (0x550, 0x2000),
            (0x558, 0x8001_0033),
            (0x560, 0x400),
            (0x568, 0xffff_0ff0),
            (0x570, 2),
            (0x578, L2_RIP),
            (0x5d8, 0x3f00),
            (0x668, 0x0007_0406_0007_0406),
        ] {
            this.put(BLOCK + at, value);
        }
        this
    }

    /// Gives the VM SMRAM, and memory for L1's state.
    pub fn with_smram(mut self) -> Self {
        const PAGES_LOG2: u32 = 4;
        let pages = Pages::zeroed(PAGES_LOG2).unwrap();
        let hva = pages.hpa().0;
        let region = Region { slot: 0, flags: 0, gpa: SMBASE, size: 16 << 12, hva };
        self.vm.memory_in(mmu::AddressSpace::Smm).set_region(&region, &**self.vm).unwrap();
        self.smram = Some(pages);
        self.vcpu.write_msr(msr::VM_HSAVE_PA, KEPT, By::Vmm).unwrap();
        self
    }

    /// A word of SMRAM, by its offset.
    pub fn smram(&self, at: u64) -> u64 {
        let words = self.smram.as_ref().unwrap().words();
        words[at as usize / 8].load(Ordering::Relaxed)
    }

    /// Writes a word of SMRAM.
    pub fn put_smram(&self, at: u64, value: u64) {
        let words = self.smram.as_ref().unwrap().words();
        words[at as usize / 8].store(value, Ordering::Relaxed);
    }

    /// Writes a word of memory.
    pub fn put(&self, at: u64, value: u64) {
        self.memory.words()[at as usize / 8].store(value, Ordering::Relaxed);
    }

    /// Reads a word of memory.
    pub fn get(&self, at: u64) -> u64 {
        self.memory.words()[at as usize / 8].load(Ordering::Relaxed)
    }

    /// What the CPU does next.
    pub fn then(&mut self, step: impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static) {
        self.vcpu.backend().cpu().inner().then(step);
    }

    /// The guest that runs reads an MSR, and has this.
    pub fn reads_msr(&mut self, index: u32, value: u64) {
        self.then(move |vmcb, gprs| {
            exit(ExitCode::Msr)(vmcb, gprs);
            gprs.0[RCX] = index.into();
            (vmcb.save.rax, gprs.0[RDX]) = (!0, !0);
        });
        // An instruction that we carry out, so that what it was entered with is looked at.
        self.then(move |vmcb, gprs| {
            assert_eq!(gprs.0[RDX] << 32 | vmcb.save.rax, value, "MSR {index:#x}");
            exit(ExitCode::Wbinvd)(vmcb, gprs);
        });
    }

    /// The guest that runs writes an MSR.
    pub fn writes_msr(&mut self, index: u32, value: u64) {
        self.then(move |vmcb, gprs| {
            exit(ExitCode::Msr)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1;
            gprs.0[RCX] = index.into();
            (vmcb.save.rax, gprs.0[RDX]) = (value & 0xffff_ffff, value >> 32);
        });
    }

    /// L1 executes VMRUN of the block.
    pub fn vmrun(&mut self) {
        self.then(vmrun);
    }

    /// Runs until user space is asked.
    pub fn run(&mut self) -> UserExit {
        self.vcpu.run(&RunInput::default())
    }

    /// L2 runs, and has halted with user space's local APIC.
    pub fn stop_in_l2(&mut self) {
        self.vmrun();
        self.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, L2_RIP);
            assert_ne!(vmcb.control.intercepts[3] & HLT, 0);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(self.run(), UserExit::Hlt);
    }
}

/// L1 executes VMRUN of the block.
pub fn vmrun(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    exit(ExitCode::Vmrun)(vmcb, gprs);
    vmcb.control.next_rip = vmcb.save.rip + 3;
    (vmcb.save.rax, gprs.0[RAX]) = (BLOCK, BLOCK);
}
